"""Rotary position embeddings: frequencies as values, tables per step.

Owns: ``RopeConfig``, the known scalings, ``rope_tables``. The rotation itself, in the half-split
layout of Hugging Face checkpoints, is ``pallas_kernels.numerics.rotate``.
Must not know: config files, model families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        return 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """The frequencies to rotate by."""
        del rope
        return frequencies / np.float32(self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: slow components divided by ``factor``, fast ones kept, a linear blend between.

    A component is slow when its wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` and fast below ``... / high_freq_factor``. Source: ``apply_scaling`` of Meta's
    reference model.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        return 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """The frequencies to rotate by."""
        del rope
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (kept * frequencies + (1 - kept) * frequencies / self.factor).astype(np.float32)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a blend by component index, and sharper attention.

    Components that turn more than ``beta_fast`` times over the original context are kept, those
    under ``beta_slow`` turns are divided by ``factor``. ``attention_factor`` replaces the paper's
    ``0.1 ln(factor) + 1``; ``attn_factor`` multiplies it, as in vLLM (DeepSeek-R1-0528-Qwen3-8B
    uses it to switch the sharpening off).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    attn_factor: float = 1.0

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor * self.attn_factor
        return (0.1 * math.log(max(self.factor, 1.0)) + 1.0) * self.attn_factor

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """The frequencies to rotate by."""
        first = max(math.floor(self._component(rope, self.beta_fast)), 0)
        last = min(math.ceil(self._component(rope, self.beta_slow)), rope.head_dim - 1)
        index = np.arange(len(frequencies), dtype=np.float32)
        divided = np.clip((index - first) / max(last - first, 0.001), 0.0, 1.0)
        blend = (1 - divided) * frequencies + divided * frequencies / self.factor
        return blend.astype(np.float32)

    def _component(self, rope: RopeConfig, turns: float) -> float:
        """The (fractional) component that turns so often over the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


type RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """Everything that decides the rotation; ``scaling`` None is the original scheme."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        return self.scaling.attention_scale if self.scaling else 1.0


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:  # float32[H / 2]
    """Radians per position of each pair of components, in float32 as the reference models do."""
    exponents = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    return rope.scaling.rescale(rope, frequencies) if rope.scaling else frequencies


def rope_tables(
    rope: RopeConfig,
    positions: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:  # float32[T, H / 2] each
    """Cosine and sine of every token's angles; computed once per step, shared by the layers."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope)
    return jnp.cos(angles) * rope.attention_scale, jnp.sin(angles) * rope.attention_scale
