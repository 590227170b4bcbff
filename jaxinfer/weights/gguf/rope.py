"""Converts GGUF's ``rope.*`` keys and tensors of factors to config.json's ``rope_scaling``.

Owns: the meaning of each ``rope.*`` key, including older names.

Source: ``load_hparams`` in llama.cpp's src/llama-model.cpp, ``llama_context`` for YaRN's factors,
``ggml_rope_ext`` for the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.nn.rope import Llama3Scaling, RopeConfig, inverse_frequencies
from jaxinfer.weights.gguf.header import GGUFHeader
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

# Factors of high frequencies and original lengths of Llama 3.1 to 3.3, of Llama 4, and of Step 3.5;
# the factor of low frequencies is 1.
_LLAMA3 = ((4.0, 8192), (1.0, 8192), (32.0, 131072))
_YARN_NUMBERS = (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))


def rope_scaling(meta: ArchitectureMetadata, rotated: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` that the keys describe, for heads of which ``rotated`` components
    rotate; None without scaling. Factors in tensors are left to ``scaling_with_factors``.

    Raises ``CheckpointError``, with the key's name, for an unsupported scaling.
    """
    meta.only("rope.dimension_count", rotated)
    key = "rope.scaling.type"
    kind = meta.text(key, "linear")
    has_factors = any(map(meta.has_tensor, (LONG_FACTORS, SHORT_FACTORS)))
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and has_factors):
        meta.refuse(key, kind, "is supported as none, linear or yarn", "use another model")
    factor = _factor(meta, required=kind in ("linear", "yarn") and meta.has(key))
    original = meta.count("rope.scaling.original_context_length", meta.count("context_length"))
    if kind == "yarn":
        return _yarn(meta, factor, original)
    meta.only("rope.scaling.yarn_attn_factor", 1)
    meta.only("rope.scaling.yarn_ext_factor", 0)
    for name, _ in _YARN_NUMBERS:
        meta.skip(f"rope.scaling.{name}")  # only YaRN uses these
    if has_factors:
        return _longrope(meta, original)
    meta.only("rope.scaling.attn_factor", 1)
    return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def deepseek_rope_scaling(meta: ArchitectureMetadata, rope_dim: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` of DeepSeek, whose key ``mscale_all_dim`` scales scores.

    The file holds a tenth of it. In all published models ``mscale`` is the same, so that cosine and
    sine are not scaled, and llama.cpp computes them so.
    """
    scaling = rope_scaling(meta, rope_dim)
    tenth = meta.number_if_set("rope.scaling.yarn_log_multiplier")
    if scaling is None or tenth is None or scaling["rope_type"] != "yarn":
        return scaling
    if "attn_factor" in scaling:
        meta.refuse("rope.scaling.yarn_log_multiplier", tenth, "is not supported beside a factor")
    mscale = round(10 * tenth, 6)
    return scaling | {"mscale": mscale, "mscale_all_dim": mscale}


def _factor(meta: ArchitectureMetadata, *, required: bool) -> float:
    """The divisor of positions: ``rope.scaling.factor``, or else the key's older name."""
    newer = meta.number_if_set("rope.scaling.factor")
    older = meta.number_if_set("rope.scale_linear")
    if newer is None and older is None and required:
        return meta.number("rope.scaling.factor")  # raises: the key is missing
    return newer or older or 1.0


def _longrope(meta: ArchitectureMetadata, original: int) -> dict[str, Any]:
    """LongRoPE without its factors, which are tensors; a file of Phi-3 has no scaling's type."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        meta.only(key, 0, 1)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
    }


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

    The converter stores either of two config keys under this name: ``attn_factor``, a multiplier
    that is below 1 in known models (DeepSeek-R1-0528-Qwen3-8B), or ``attention_factor``, a
    replacement that is above 1. A value above 1 is therefore ambiguous and refused.
    """
    key = "rope.scaling.yarn_attn_factor"
    value = meta.number(key, 1.0)
    if value > 1:
        meta.refuse(key, value, "is supported up to 1", "use the Hugging Face folder of the model")
    return value


def scaling_with_factors(
    header: GGUFHeader,
    config: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],  # float32[H / 2] each, by the names ``ROPE_TENSORS``
) -> dict[str, Any]:
    """The ``rope_scaling`` of ``config`` with the factors of the file.

    Raises ``CheckpointError`` if they do not fit.
    """
    if "rope_scaling" not in config:
        raise CheckpointError(
            f"{header.path} has the tensor {next(iter(factors))}, but a model of "
            f"{config['model_type']} has no rope; convert the model again"
        )
    half = int(config["head_dim"] * config.get("partial_rotary_factor", 1)) // 2
    for name, values in factors.items():
        if values.shape != (half,) or not np.isfinite(values).all() or values.min() <= 0:
            raise CheckpointError(
                f"{header.path}: its tensor {name} does not hold {half} positive numbers; convert "
                "the model again"
            )
    if ROPE_FACTORS in factors:
        return _llama3_scaling(header, config, factors[ROPE_FACTORS])
    lacking = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name not in factors]
    if lacking:
        raise CheckpointError(
            f"{header.path} has the tensor {next(iter(factors))} but not {lacking[0]}; download it "
            "again"
        )
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") != "longrope":
        raise CheckpointError(
            f"{header.path} scales rope twice, by the tensor {LONG_FACTORS} and by the metadata "
            "key rope.scaling.type; convert the model again with one of the two"
        )
    long, short = (
        [float(str(one)) for one in factors[name]] for name in (LONG_FACTORS, SHORT_FACTORS)
    )
    return scaling | {"long_factor": long, "short_factor": short}


def _llama3_scaling(
    header: GGUFHeader, config: Mapping[str, Any], factors: np.ndarray
) -> dict[str, Any]:
    """Llama 3's scaling with the file's factor.

    GGUF holds one factor per frequency. The scaling is rebuilt from the largest of them and Llama
    3's constants, and its factors are compared with the file's. Raises ``CheckpointError`` if they
    differ.
    """
    plain = RopeConfig(config["head_dim"], config["rope_theta"])
    for high, original in _LLAMA3:
        scaling = Llama3Scaling(
            factor=float(factors.max()),
            low_freq_factor=1.0,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
        scaled = inverse_frequencies(RopeConfig(plain.head_dim, plain.theta, scaling))
        if np.allclose(factors, inverse_frequencies(plain) / scaled, rtol=1e-3):
            break
    else:
        raise CheckpointError(
            f"{header.path}: its tensor rope_freqs.weight does not follow Llama 3's rope scaling, "
            "the only one supported in this form; use another model"
        )
    if config["rope_scaling"] not in (None, {"rope_type": "default"}):
        raise CheckpointError(
            f"{header.path} scales rope twice, by the tensor rope_freqs.weight and by the metadata "
            "key rope.scaling.type; convert the model again with one of the two"
        )
    return {"rope_type": "llama3", **asdict(scaling)}
