"""Rotary embeddings in GGUF: their metadata keys and the tensor rope_freqs.weight, read as a
config.json's ``rope_scaling``.

Owns: what each ``rope.*`` key means, the older names among them.

Source: ``load_hparams`` in llama.cpp's src/llama-model.cpp, ``llama_context`` for YaRN's factors,
``ggml_rope_ext`` for what multiplies what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.nn.rope import Llama3Scaling, RopeConfig, inverse_frequencies
from jaxinfer.weights.gguf_header import GGUFHeader
from jaxinfer.weights.gguf_metadata import ArchitectureMetadata

# Meta's constants, the same in Llama 3.1, 3.2 and 3.3; GGUF keeps only what follows from them.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT = 8192

_YARN_NUMBERS = (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))


def rope_scaling(meta: ArchitectureMetadata, head_dim: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` that the keys describe, None for none.

    Raises ``CheckpointError`` that names the key for what cannot be computed.
    """
    meta.only("rope.dimension_count", head_dim)  # else a part of each head is rotated
    key = "rope.scaling.type"
    kind = meta.text(key, "linear")
    if kind not in ("none", "linear", "yarn"):
        meta.refuse(key, kind, "is supported as none, linear or yarn", "use another model")
    factor = _factor(meta, required=kind != "none" and meta.has(key))
    original = meta.count("rope.scaling.original_context_length", meta.count("context_length"))
    if kind == "yarn":
        return _yarn(meta, factor, original)
    meta.only("rope.scaling.attn_factor", 1)
    meta.only("rope.scaling.yarn_attn_factor", 1)
    meta.only("rope.scaling.yarn_ext_factor", 0)
    for name, _ in _YARN_NUMBERS:
        meta.skip(f"rope.scaling.{name}")  # a blend of frequencies that only YaRN has
    return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def _factor(meta: ArchitectureMetadata, *, required: bool) -> float:
    """By how much positions are divided: ``rope.scaling.factor``, or else its older name."""
    newer = meta.number_if_set("rope.scaling.factor")
    older = meta.number_if_set("rope.scale_linear")
    if newer is None and older is None and required:
        return meta.number("rope.scaling.factor")  # which says that it is missing
    return newer or older or 1.0


def _yarn(meta: ArchitectureMetadata, factor: float, original: int) -> dict[str, Any]:
    meta.only("rope.scaling.yarn_ext_factor", 1)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for name, key in _YARN_NUMBERS:
        if meta.has(f"rope.scaling.{name}"):
            scaling[key] = meta.number(f"rope.scaling.{name}")
    attention = meta.number("rope.scaling.attn_factor", 1.0) * _yarn_attention(meta)
    return scaling if attention == 1 else scaling | {"attn_factor": attention}


def _yarn_attention(meta: ArchitectureMetadata) -> float:
    """``yarn_attn_factor``, which multiplies YaRN's own 0.1 ln(factor) + 1.

    The converter writes either of two config keys to it: ``attn_factor``, which multiplies and is
    below 1 where it is used (DeepSeek-R1-0528-Qwen3-8B), or ``attention_factor``, which replaces
    and is above 1. A value above 1 could mean either.
    """
    key = "rope.scaling.yarn_attn_factor"
    value = meta.number(key, 1.0)
    if value > 1:
        meta.refuse(key, value, "is supported up to 1", "use the Hugging Face folder of the model")
    return value


def llama3_scaling(
    header: GGUFHeader,
    config: Mapping[str, Any],
    factors: np.ndarray,  # float32[H / 2]: the tensor rope_freqs.weight
) -> dict[str, Any]:
    """The scaling whose factors the file holds: known up to Llama 3's constants, then compared.

    Raises ``CheckpointError`` for factors of another scheme.
    """
    scaling = Llama3Scaling(
        factor=float(factors.max()),
        low_freq_factor=_LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor=_LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=_LLAMA3_ORIGINAL_CONTEXT,
    )
    plain = RopeConfig(config["head_dim"], config["rope_theta"])
    expected = inverse_frequencies(plain) / inverse_frequencies(
        RopeConfig(plain.head_dim, plain.theta, scaling)
    )
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{header.path}: its tensor rope_freqs.weight does not follow Llama 3's rope scaling, "
            "the only one supported in this form; use another model"
        )
    if config["rope_scaling"] is not None:
        raise CheckpointError(
            f"{header.path} scales rope twice, by the tensor rope_freqs.weight and by the metadata "
            "key rope.scaling.type; convert the model again with one of the two"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
