"""The families of decoders with state spaces or short convolutions.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's
src/models/{mamba,mamba2,falcon-h1,granite-hybrid,nemotron-h,jamba,lfm2}.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.gguf.families import (
    QKV_BIAS,
    ROPE_REMARK,
    Family,
    Reader,
    attending_layers,
    constant,
    counts,
    granite_factors,
    kv_heads,
    number,
)
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

_FULL, _STATE = "full_attention", "linear_attention"
_EPS = "attention.layer_norm_rms_epsilon"


def _kv_heads(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    return {"num_key_value_heads": kv_heads(meta)}


def _kinds(key: str, other: str) -> Reader:
    """The list of layers' kinds: attention, or the other one."""

    def read(meta: ArchitectureMetadata) -> Mapping[str, Any]:
        return {key: [_FULL if one else other for one in attending_layers(meta)]}

    return read


def _heads(meta: ArchitectureMetadata) -> tuple[int, int]:
    """The heads of a Mamba-2, and their width."""
    heads, inner = meta.count("ssm.time_step_rank"), meta.count("ssm.inner_size")
    if inner % heads:
        meta.refuse("ssm.inner_size", inner, f"must be a multiple of ssm.time_step_rank, {heads}")
    return heads, inner // heads


def _mamba2(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """The mixer of hybrid models; ``mamba_expand`` is the mixer's width by the stream's."""
    heads, head_dim = _heads(meta)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": meta.count("ssm.state_size"),
        "mamba_n_groups": meta.count("ssm.group_count"),
        "mamba_d_conv": meta.count("ssm.conv_kernel"),
        "mamba_expand": heads * head_dim / meta.count("embedding_length"),
        "mamba_conv_bias": meta.has_in_a_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_in_a_layer("ssm_in.bias"),
    }


def _alone(meta: ArchitectureMetadata) -> dict[str, Any]:
    """The keys of a decoder of state spaces alone; those of attention and networks are 0."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        meta.only(key, 0)
    meta.only("rope.dimension_count", 0)
    meta.only("tensor_data_layout", "reference")
    meta.skip("context_length")  # 2 ** 20 in all files
    return {
        "hidden_size": meta.count("embedding_length"),
        "num_hidden_layers": meta.num_layers,
        "state_size": meta.count("ssm.state_size"),
        "conv_kernel": meta.count("ssm.conv_kernel"),
        "expand": meta.count("ssm.inner_size") / meta.count("embedding_length"),
        "layer_norm_epsilon": meta.number(_EPS),
        "hidden_act": "silu",
        "use_conv_bias": meta.has_in_a_layer("ssm_conv1d.bias"),
        "use_bias": meta.has_in_a_layer("ssm_in.bias"),
    }


def _mamba(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Mamba, or Falcon Mamba, which normalises the inputs of steps."""
    own = {
        "intermediate_size": meta.count("ssm.inner_size"),
        "time_step_rank": meta.count("ssm.time_step_rank"),
    }
    if not meta.flag("ssm.dt_b_c_rms"):
        names = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        return _alone(meta) | own | names
    names = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return _alone(meta) | own | names | {"mixer_rms_eps": meta.number(_EPS)}


def _mamba2_alone(meta: ArchitectureMetadata) -> dict[str, Any]:
    heads, head_dim = _heads(meta)
    return _alone(meta) | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": heads,
        "head_dim": head_dim,
        "n_groups": meta.count("ssm.group_count"),
    }


def _granite_experts(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Experts, and the network beside them; a model without experts has only that network."""
    experts = meta.count_if_set("expert_count", 0)
    if not experts:
        for key in ("expert_used_count", "expert_shared_feed_forward_length"):
            meta.skip(key)
        shared = meta.count_if_set("expert_shared_feed_forward_length", 0)
        return {
            "num_local_experts": 0,
            "shared_intermediate_size": shared or meta.count("feed_forward_length"),
        }
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": meta.count("expert_used_count"),
        "shared_intermediate_size": meta.count("expert_shared_feed_forward_length"),
    }


def _rotates(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """The kind of positions: llama.cpp takes a remark for it, which is false without rope."""
    rotates = meta.flag(ROPE_REMARK) or not meta.has(ROPE_REMARK)
    return {"position_embedding_type": "rope" if rotates else "nope"}


def _nemotron_h(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Nemotron-H without experts."""
    for key in ("expert_count", "expert_used_count"):
        meta.only(key, 0)
    return _single_blocks(meta, "mlp")


def _nemotron_h_moe(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Nemotron 3, whose networks are experts without gates, perhaps in a latent width."""
    config = _single_blocks(meta, "moe")
    width = meta.count("expert_feed_forward_length", config["intermediate_size"])
    meta.only("expert_gating_func", 0, 2)
    latent = meta.count_if_set("moe_latent_size", 0)
    return config | {
        "n_routed_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": meta.count("expert_shared_feed_forward_length"),
        "n_shared_experts": meta.count("expert_shared_count", 1),
        "n_group": meta.count_if_set("expert_group_count", 1),
        "topk_group": meta.count_if_set("expert_group_used_count", 1),
        "norm_topk_prob": meta.flag("expert_weights_norm"),
        "routed_scaling_factor": meta.number_if_set("expert_weights_scale") or 1.0,
        **({"moe_latent_size": latent} if latent else {}),
    }


def _single_blocks(meta: ArchitectureMetadata, network_kind: str) -> dict[str, Any]:
    """A decoder whose layers have one block each, some of them networks of this kind; nothing
    rotates.
    """
    for key in ("rope.dimension_count", "rope.freq_base", ROPE_REMARK):
        meta.skip(key)
    meta.only("tensor_data_layout", "reference")
    meta.only("attention.sliding_window", 0)
    meta.only("hidden_activation", "relu2")
    attends, widths = attending_layers(meta), meta.counts("feed_forward_length")
    width = {one for one in widths if one} or {1}
    if len(width) > 1:
        meta.refuse("feed_forward_length", widths, "must be the same where it is not 0")
    pairs = zip(attends, widths, strict=False)
    kinds = [_FULL if one else network_kind if network else _STATE for one, network in pairs]
    heads, head_dim = _heads(meta)
    attention = meta.count("attention.head_count")
    of_head = meta.count("attention.key_length", meta.count("embedding_length") // attention)
    meta.only("attention.value_length", of_head)
    meta.only("attention.scale", 0, of_head**-0.5)
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": meta.count("embedding_length"),
        "num_hidden_layers": meta.num_layers,
        "layers_block_type": kinds,
        "num_attention_heads": attention,
        "num_key_value_heads": kv_heads(meta),
        "head_dim": of_head,
        "intermediate_size": width.pop(),
        "max_position_embeddings": meta.count("context_length"),
        "layer_norm_epsilon": meta.number(_EPS),
        "mlp_hidden_act": "relu2",
        "mlp_bias": meta.has_in_a_layer("ffn_up.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": meta.count("ssm.state_size"),
        "n_groups": meta.count("ssm.group_count"),
        "conv_kernel": meta.count("ssm.conv_kernel"),
        "use_conv_bias": meta.has_in_a_layer("ssm_conv1d.bias"),
        "use_bias": meta.has_in_a_layer("ssm_in.bias"),
    }


def _every(meta: ArchitectureMetadata, name: str, layers: Sequence[bool]) -> dict[str, int]:
    """The offset and the period of the layers that are true."""
    found = [i for i, one in enumerate(layers) if one] or [len(layers)]
    period = found[1] - found[0] if len(found) > 1 else len(layers) + 1
    offset = found[0]
    if [i % period == offset for i in range(len(layers))] != list(layers):
        words = f"must be at a period, of layers with {name}"
        meta.refuse("attention.head_count_kv", list(layers), words, "use another model")
    return {f"{name}_period": period, f"{name}_offset": offset}


def _jamba(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    tensors = (f"blk.{i}.ffn_gate_inp.weight" for i in range(meta.num_layers))
    sparse = [meta.has_tensor(name) for name in tensors]
    width, inner = meta.count("embedding_length"), meta.count("ssm.inner_size")
    if inner % width:
        meta.refuse("ssm.inner_size", inner, f"must be a multiple of embedding_length, {width}")
    return {
        **_every(meta, "attn_layer", attending_layers(meta)),
        **_every(meta, "expert_layer", sparse),
        "num_experts": meta.count_if_set("expert_count", 1),
        "num_experts_per_tok": meta.count_if_set("expert_used_count", 1),
        "mamba_d_state": meta.count("ssm.state_size"),
        "mamba_d_conv": meta.count("ssm.conv_kernel"),
        "mamba_dt_rank": meta.count("ssm.time_step_rank"),
        "mamba_expand": inner // width,
        "mamba_conv_bias": meta.has_in_a_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has_in_a_layer("ssm_in.bias"),
    }


def _falcon_h1(meta: ArchitectureMetadata) -> Mapping[str, Any]:
    """Falcon-H1; multipliers are in the weights."""
    return {
        **_mamba2(meta),
        "mamba_d_ssm": meta.count("ssm.inner_size"),
        "mamba_rms_norm": meta.has_in_a_layer("ssm_norm.weight"),
    }


_LFM2_NAMES = MappingProxyType({"rms_norm_eps": "norm_eps", "hidden_act": None})
_LFM2: tuple[Reader, ...] = (
    _kv_heads,
    _kinds("layer_types", "conv"),
    counts(conv_L_cache="shortconv.l_cache"),
)
STATE_FAMILIES: Mapping[str, Any] = MappingProxyType(
    {
        "mamba": _mamba,
        "mamba2": _mamba2_alone,
        "falcon-h1": Family(
            "FalconH1ForCausalLM",
            "falcon_h1",
            fixed={"mamba_norm_before_gate": False},
            present={
                **QKV_BIAS,
                "mlp_bias": "ffn_up.bias",
                "projectors_bias": "ssm_out.bias",
            },
            readers=(_falcon_h1,),
        ),
        "granitehybrid": Family(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            options={"scaled": True},
            present=QKV_BIAS,
            readers=(
                _kv_heads,
                _kinds("layer_types", _STATE),
                _mamba2,
                _granite_experts,
                _rotates,
                granite_factors,
            ),
        ),
        "nemotron_h": _nemotron_h,
        "nemotron_h_moe": _nemotron_h_moe,
        "jamba": Family("JambaForCausalLM", "jamba", readers=(_kv_heads, _jamba)),
        "lfm2": Family(
            "Lfm2ForCausalLM",
            "lfm2",
            fixed={"block_auto_adjust_ff_dim": False},
            present={"conv_bias": "shortconv.conv.bias"},
            renamed=_LFM2_NAMES,
            readers=_LFM2,
        ),
        "lfm2moe": Family(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            fixed={"norm_topk_prob": True},
            present={
                "conv_bias": "shortconv.conv.bias",
                "use_expert_bias": "exp_probs_b.bias",
            },
            renamed=_LFM2_NAMES,
            readers=(
                *_LFM2,
                counts(num_experts="expert_count", num_experts_per_tok="expert_used_count"),
                counts(moe_intermediate_size="expert_feed_forward_length"),
                counts(num_dense_layers="leading_dense_block_count"),
                constant("expert_gating_func", 2),
                number("routed_scaling_factor", "expert_weights_scale", 1.0),
            ),
        ),
    }
)
