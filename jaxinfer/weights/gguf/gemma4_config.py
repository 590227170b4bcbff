"""Builds the config of Gemma 4 from GGUF metadata.

Source: ``load_arch_hparams`` and the graph of llama.cpp's src/models/gemma4.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.families import FULL, REFERENCE, WINDOWED, windows
from jaxinfer.weights.gguf.header import GGUFHeader
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.names import ROPE_FACTORS
from jaxinfer.weights.gguf.rope import rope_scaling

_INPUTS = "per_layer_token_embd.weight"
_NEVER = 1e20  # a factor above this stands for a frequency of 0


def gemma4_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Gemma 4 (text), whose layers without a window have heads of another size.

    The tensor of rope's factors says which part of these heads rotates: ``with_proportional_rope``.
    """
    meta.only("tensor_data_layout", REFERENCE)
    meta.only("hidden_activation", "gelu_pytorch_tanh", "gelu")
    meta.only("attention.scale", 0, 1)
    layers = windows(6)(meta)
    kinds, count = layers["layer_types"], meta.num_layers
    if kinds[-1] != FULL:
        words = "must give the last layer no window"
        meta.refuse("attention.sliding_window_pattern", kinds, words)
    shared = meta.count_if_set("attention.shared_kv_layers", 0)
    head_dim, full_dim = (meta.count(f"attention.key_length{end}") for end in ("_swa", ""))
    for end, width in (("_swa", head_dim), ("", full_dim)):
        meta.only(f"attention.value_length{end}", width)
        meta.only(f"rope.dimension_count{end}", width)
    meta.only("rope.scaling.type", "none")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        meta.only(key, 0, 1)
    rope_scaling(meta, full_dim)  # which reads the other keys of rope, or refuses them
    kv_heads = _by_kind(meta, "attention.head_count_kv", kinds)
    of_full = {"head_dim": full_dim, "num_key_value_heads": kv_heads[FULL]}
    first, wider = _network_widths(meta, count - shared)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": meta.count("embedding_length"),
        "intermediate_size": first,
        "use_double_wide_mlp": wider,
        "num_hidden_layers": count,
        "num_attention_heads": meta.count("attention.head_count"),
        "num_key_value_heads": kv_heads.get(WINDOWED, kv_heads[FULL]),
        "head_dim": head_dim,
        "per_layer_config": {str(i): of_full for i, kind in enumerate(kinds) if kind == FULL},
        "attention_k_eq_v": _keys_are_values(meta, kinds[: count - shared]),
        "num_kv_shared_layers": shared,
        **layers,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": meta.number_if_set("final_logit_softcapping"),
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": meta.number("rope.freq_base", 1e4)},
            WINDOWED: {
                "rope_type": "default",
                "rope_theta": meta.number("rope.freq_base_swa", 1e4),
            },
        },
        **_layer_inputs(meta),
        **_experts(meta),
    }


def _by_kind(meta: ArchitectureMetadata, key: str, kinds: Sequence[str]) -> dict[str, int]:
    """A number of each kind of layers, of which all layers have the same."""
    stored = meta.each(key)
    found = {kind: number for kind, number in zip(kinds, stored, strict=False)}
    if any(found[kind] != number for kind, number in zip(kinds, stored, strict=False)):
        meta.refuse(key, stored, "must be the same in all layers with a window, and without one")
    return {FULL: stored[-1], **found}


def _network_widths(meta: ArchitectureMetadata, own: int) -> tuple[int, bool]:
    """The width of networks, and whether those of layers without keys of their own are twice as
    wide.
    """
    key = "feed_forward_length"
    stored = meta.each(key)[: meta.num_layers]
    for wider in (False, True):
        factors = [1 + (wider and i >= own) for i in range(len(stored))]
        if stored == [stored[0] * factor for factor in factors]:
            return stored[0], wider
    meta.refuse(key, stored, "must be the same in every layer, or doubled in those that share keys")


def _keys_are_values(meta: ArchitectureMetadata, kinds: Sequence[str]) -> bool:
    """True if layers without a window make their values of keys, as they lack a tensor of values.

    Raises ``CheckpointError`` if only some do.
    """
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    lacking = [i for i in full if not meta.has_tensor(f"blk.{i}.attn_v.weight")]
    if lacking and lacking != full:
        raise CheckpointError(
            f"{meta.header.path} lacks the tensor blk.{lacking[0]}.attn_v.weight, and other layers "
            "without a window have theirs; download it again"
        )
    return bool(lacking)


def _layer_inputs(meta: ArchitectureMetadata) -> dict[str, Any]:
    width, table = meta.count_if_set("embedding_length_per_layer_input", 0), None
    if width:
        table = meta.header.tensors.get(_INPUTS)
        if table is None:
            raise CheckpointError(
                f"{meta.header.path} lacks the tensor {_INPUTS}, though its metadata key "
                f"gemma4.embedding_length_per_layer_input is {width}; download it again"
            )
    tokens = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": width, **tokens}


def _experts(meta: ArchitectureMetadata) -> dict[str, Any]:
    meta.only("expert_gating_func", 0, 1)  # softmax
    count = meta.count_if_set("expert_count", 0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
    }


def with_proportional_rope(
    header: GGUFHeader,
    config: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],  # float32[H / 2] each, by the names ``ROPE_TENSORS``
) -> dict[str, Any]:
    """The ``rope_parameters`` of Gemma 4 with the part that rotates of heads without a window.

    Raises ``CheckpointError`` unless the factors are ones, of the fastest frequencies, and then
    huge ones.
    """
    own = factors.get(ROPE_FACTORS)
    full = next(iter(config["per_layer_config"].values()))["head_dim"]
    count = 0 if own is None else int((own == 1).sum())
    rests = [] if own is None else own[count:]
    if own is None or not count or len(own) != full // 2 or not all(one > _NEVER for one in rests):
        raise CheckpointError(
            f"{header.path}: its tensor {ROPE_FACTORS} does not hold {full // 2} factors, ones and "
            "then huge ones, as of Gemma 4; convert the model again"
        )
    sections = config["rope_parameters"]
    rotated = {"partial_rotary_factor": count / len(own)}
    return {**sections, FULL: {**sections[FULL], **rotated}}
