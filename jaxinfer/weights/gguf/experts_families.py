"""The families of mixtures of experts, as data.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's src/models/*.cpp, one file for each
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.gguf.dense_families import BOTH
from jaxinfer.weights.gguf.experts_config import dbrx_sections, m3_keys, mimo2_layers, step35_layers
from jaxinfer.weights.gguf.families import (
    QKV_BIAS,
    ROPE_REMARK,
    Family,
    Reader,
    constant,
    counts,
    granite_factors,
    ignored,
    image_positions,
    number,
    windows,
)
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

_COUNT, _USED, _WIDTH = "expert_count", "expert_used_count", "expert_feed_forward_length"
_SHARED_WIDTH, _DENSE = "expert_shared_feed_forward_length", "leading_dense_block_count"
_MAVERICKS_EXPERTS = 128
_SIZES = counts(num_experts=_COUNT, num_experts_per_tok=_USED, moe_intermediate_size=_WIDTH)
_SOFTMAX, _SIGMOID = constant("expert_gating_func", 0, 1), constant("expert_gating_func", 2)


def _without_groups(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """One group of experts, of which all are chosen from."""
    for key in ("expert_group_count", "expert_group_used_count"):
        meta.only(key, 0, 1)
    return {"n_group": 1, "topk_group": 1}


def _flag(key: str, name: str) -> Reader:
    return lambda meta: {key: meta.flag(name)}


def _set_count(key: str, name: str, default: int = 0) -> Reader:
    """An integer, or ``default`` where it is not set."""
    return lambda meta: {key: meta.count_if_set(name, default)}


def _llama4(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """The switch of norms of heads, which the model with 128 experts does not have."""
    return {"use_qk_norm": meta.count(_COUNT) != _MAVERICKS_EXPERTS}


def _granite_moe(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Granite's mixtures, with a network of all tokens if the file has the width of one."""
    shared = meta.count_if_set(_SHARED_WIDTH, 0)
    return (_GRANITE_SHARED if shared else _GRANITE_MOE)(meta)


_GRANITE_READERS: tuple[Reader, ...] = (
    counts(num_local_experts=_COUNT, num_experts_per_tok=_USED),
    _SOFTMAX,
    constant(ROPE_REMARK, True),
    granite_factors,
)
_GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    options={"scaled": True},
    present=QKV_BIAS,
    data_layouts=BOTH,
    readers=_GRANITE_READERS,
)
_GRANITE_SHARED = Family(
    "GraniteMoeSharedForCausalLM",
    "granitemoeshared",
    options={"scaled": True},
    present=QKV_BIAS,
    data_layouts=BOTH,
    readers=(*_GRANITE_READERS, counts(shared_intermediate_size=_SHARED_WIDTH)),
)
# Experts as DeepSeek-V3 chooses them.
_BIASED: tuple[Reader, ...] = (
    counts(n_routed_experts=_COUNT, num_experts_per_tok=_USED, moe_intermediate_size=_WIDTH),
    _SIGMOID,
    _without_groups,
    _set_count("n_shared_experts", "expert_shared_count"),
    _set_count("first_k_dense_replace", _DENSE),
    number("routed_scaling_factor", "expert_weights_scale", 1.0),
    _flag("norm_topk_prob", "expert_weights_norm"),
)
EXPERTS_FAMILIES: Mapping[str, Any] = MappingProxyType(
    {
        "dbrx": Family(
            "DbrxForCausalLM",
            "dbrx",
            fixed={"tie_word_embeddings": False},
            options={"eps": "layer_norm_eps"},
            renamed={
                "hidden_size": "d_model",
                "num_attention_heads": "n_heads",
                "num_hidden_layers": "n_layers",
                "max_position_embeddings": "max_seq_len",
                **dict.fromkeys(("layer_norm_eps", "intermediate_size", "hidden_act")),
            },
            readers=(dbrx_sections, _SOFTMAX, constant("attention.layer_norm_epsilon", 1e-5)),
        ),
        "mimo2": Family(
            "MiMoV2FlashForCausalLM",
            "mimo_v2_flash",
            fixed={"norm_topk_prob": True},
            options={"partial": True, "dense": False, "value_dim": True},
            readers=(
                counts(n_routed_experts=_COUNT, num_experts_per_tok=_USED),
                counts(moe_intermediate_size=_WIDTH),
                _SIGMOID,
                constant("expert_weights_norm", True),
                _without_groups,
                constant("expert_weights_scale", 0, 1.0),
                mimo2_layers,
            ),
        ),
        "step35": Family(
            "Step3p5ForCausalLM",
            "step3p5",
            options={"dense": False},
            readers=(
                counts(n_routed_experts=_COUNT, num_experts_per_tok=_USED),
                counts(moe_intermediate_size=_WIDTH, share_expert_dim=_SHARED_WIDTH),
                _SIGMOID,
                constant("expert_weights_norm", True),
                number("moe_router_scaling_factor", "expert_weights_scale", 1.0),
                ignored(_DENSE, "moe_every_n_layers"),  # by tensors
                step35_layers,
            ),
        ),
        # llama.cpp does not renormalise the weights of the chosen experts of these two.
        "qwen2moe": Family(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            fixed={"norm_topk_prob": False},
            options={"dense": False},
            present={"qkv_bias": "attn_q.bias"},
            readers=(
                _SIZES,
                counts(shared_expert_intermediate_size=_SHARED_WIDTH),
                _SOFTMAX,
            ),
        ),
        # The text of a model with images.
        "qwen3vlmoe": Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            fixed={"norm_topk_prob": True},
            options={"dense": False},
            present=QKV_BIAS,
            readers=(
                _SIZES,
                _SOFTMAX,
                image_positions,
                ignored("n_deepstack_layers"),
            ),
        ),
        "cohere2moe": Family(
            "Cohere2MoeForCausalLM",
            "cohere2_moe",
            fixed={
                "expert_selection_fn": "sigmoid",
                "shared_expert_combination_strategy": "average",
            },
            options={"eps": "layer_norm_eps"},
            renamed={"intermediate_size": "prefix_dense_intermediate_size"},
            present=QKV_BIAS,
            readers=(
                counts(num_experts=_COUNT, num_experts_per_tok=_USED, intermediate_size=_WIDTH),
                _SIGMOID,
                _flag("norm_topk_prob", "expert_weights_norm"),
                _set_count("num_shared_experts", "expert_shared_count"),
                ignored(_SHARED_WIDTH),  # of all of these
                _set_count("first_k_dense_replace", _DENSE),
                number("logit_scale", "logit_scale"),
                windows(4),
            ),
        ),
        "mellum": Family(  # only layers without a window scale their rope
            "MellumForCausalLM",
            "mellum",
            fixed={"norm_topk_prob": True},
            options={"dense": False},
            present=QKV_BIAS,
            readers=(
                _SIZES,
                _SOFTMAX,
                windows(4),
            ),
        ),
        "hy_v3": Family(
            "HYV3ForCausalLM",
            "hy_v3",
            present=QKV_BIAS,
            readers=(
                _SIZES,
                constant("expert_gating_func", 0, 2),
                constant("expert_weights_norm", True),
                _without_groups,
                _set_count("num_shared_experts", "expert_shared_count"),
                ignored(_SHARED_WIDTH),  # of all of these
                _set_count("first_k_dense_replace", _DENSE),
                number("router_scaling_factor", "expert_weights_scale", 1.0),
            ),
        ),
        "exaone-moe": Family(
            "ExaoneMoeForCausalLM",
            "exaone_moe",
            readers=(
                _SIZES,
                constant("expert_gating_func", 0, 2),
                _without_groups,
                _set_count("num_shared_experts", "expert_shared_count"),
                ignored(_SHARED_WIDTH),  # of all of these
                _set_count("first_k_dense_replace", _DENSE),
                number("routed_scaling_factor", "expert_weights_scale", 1.0),
                _flag("norm_topk_prob", "expert_weights_norm"),
                windows(4),
            ),
        ),
        "llama4": Family(
            "Llama4ForCausalLM",
            "llama4_text",
            # llama.cpp's constants, which are those of the published models
            fixed={
                "attention_chunk_size": 8192,
                "no_rope_layer_interval": 4,
                "attn_temperature_tuning": True,
                "attn_scale": 0.1,
                "floor_scale": 8192,
            },
            renamed={"intermediate_size": "intermediate_size_mlp"},
            present=QKV_BIAS,
            data_layouts=BOTH,
            readers=(
                counts(num_local_experts=_COUNT, num_experts_per_tok=_USED),
                counts(intermediate_size=_WIDTH),
                counts(interleave_moe_layer_step="interleave_moe_layer_step"),
                constant("expert_gating_func", 0, 2),
                constant(_DENSE, 0),
                _llama4,
            ),
        ),
        "olmoe": Family(
            "OlmoeForCausalLM",
            "olmoe",
            fixed={"norm_topk_prob": False},
            present=QKV_BIAS,
            readers=(counts(num_experts=_COUNT, num_experts_per_tok=_USED), _SOFTMAX),
        ),
        "granitemoe": _granite_moe,
        "glm4moe": Family(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            options={"partial": True},
            present={**QKV_BIAS, "use_qk_norm": "attn_q_norm.weight"},
            readers=_BIASED,
        ),
        "deepseek": Family(
            "DeepseekForCausalLM",
            "deepseek",
            fixed={"norm_topk_prob": False},  # llama.cpp has no other
            present=QKV_BIAS,
            readers=(
                counts(
                    n_routed_experts=_COUNT, num_experts_per_tok=_USED, moe_intermediate_size=_WIDTH
                ),
                _SOFTMAX,
                constant("expert_weights_scale", 1.0),
                _set_count("n_shared_experts", "expert_shared_count"),
                _set_count("first_k_dense_replace", _DENSE),
            ),
        ),
        "dots1": Family(
            "Dots1ForCausalLM",
            "dots1",
            fixed={"sliding_window": None},  # llama.cpp computes without it, and files lack it
            present=QKV_BIAS,
            readers=_BIASED,
        ),
        "ernie4_5-moe": Family(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            present={"use_bias": "attn_q.bias"},
            readers=(
                counts(moe_num_experts=_COUNT, moe_k=_USED, moe_intermediate_size=_WIDTH),
                counts(moe_layer_interval="interleave_moe_layer_step"),
                _SOFTMAX,
                _set_count("moe_layer_start_index", _DENSE),
                _set_count("moe_num_shared_experts", "expert_shared_count"),
                ignored(_SHARED_WIDTH),  # derived from other keys, and of no use
            ),
        ),
        "hunyuan-moe": Family(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            options={"dense": False},
            present=QKV_BIAS,
            readers=(
                counts(num_experts=_COUNT, moe_topk=_USED, intermediate_size=_WIDTH),
                lambda meta: constant(_SHARED_WIDTH, meta.count(_WIDTH))(meta),
                constant("expert_shared_count", 0, 1),
                _SOFTMAX,
            ),
        ),
        "minimax-m2": Family(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            options={"partial": True, "dense": False},
            readers=(
                counts(num_local_experts=_COUNT, num_experts_per_tok=_USED),
                counts(intermediate_size=_WIDTH, rotary_dim="rope.dimension_count"),
                _SIGMOID,
            ),
        ),
        "minimax-m3": Family(
            "MiniMaxM3SparseForCausalLM",
            "minimax_m3_vl_text",
            options={"partial": True, "dense": False},
            readers=(counts(num_local_experts=_COUNT, intermediate_size=_WIDTH), _SIGMOID, m3_keys),
        ),
        # llama.cpp takes a softmax of the two highest scores for the model's own routing
        "phimoe": Family(
            "PhimoeForCausalLM",
            "phimoe",
            present=QKV_BIAS,
            readers=(
                counts(num_local_experts=_COUNT, num_experts_per_tok=_USED),
                lambda meta: {"lm_head_bias": meta.has_tensor("output.bias")},
                _SOFTMAX,
                # the model's, though llama.cpp computes without it
                lambda meta: {
                    "sliding_window": meta.count_if_set("attention.sliding_window", 0) or None
                },
            ),
        ),
        "bailingmoe": Family(
            "BailingMoeForCausalLM",
            "bailing_moe",
            options={"dense": False},
            readers=(
                _SIZES,
                _SOFTMAX,
                _flag("norm_topk_prob", "expert_weights_norm"),
                constant("expert_weights_scale", 1.0),
                constant(_DENSE, 0),
                _set_count("num_shared_experts", "expert_shared_count"),
            ),
        ),
        "bailingmoe2": Family(
            "BailingMoeV2ForCausalLM",
            "bailing_moe_v2",
            fixed={"norm_topk_prob": True, "score_function": "sigmoid", "use_qk_norm": True},
            options={"partial": True},
            present={"moe_router_enable_expert_bias": ("exp_probs_b.bias", "exp_probs_b")},
            readers=(
                _SIZES,
                _SIGMOID,
                constant("expert_weights_norm", True),
                _set_count("n_group", "expert_group_count", 1),
                _set_count("topk_group", "expert_group_used_count", 1),
                number("routed_scaling_factor", "expert_weights_scale", 1.0),
                _set_count("num_shared_experts", "expert_shared_count"),
                lambda meta: {
                    "moe_shared_expert_intermediate_size": meta.count_if_set(_SHARED_WIDTH, 0)
                    or meta.count(_WIDTH)
                },
                _set_count("first_k_dense_replace", _DENSE),
            ),
        ),
        "afmoe": Family(
            "AfmoeForCausalLM",
            "afmoe",
            fixed={"mup_enabled": True},
            present=QKV_BIAS,
            readers=(
                _SIZES,
                _SIGMOID,
                constant("expert_weights_norm", True),
                number("route_scale", "expert_weights_scale", 1.0),
                _set_count("num_dense_layers", _DENSE),
                _set_count("num_shared_experts", "expert_shared_count"),
                windows(4),
            ),
        ),
    }
)
