"""Rotary position embeddings: the scalings, their context lengths, and the tables of a step.

The rotation itself, in the half-split layout of Hugging Face checkpoints, is
``pallas_kernels.lib.numerics.rotate``.

The KV cache holds rotated keys, so the frequencies of a position must not change while an engine
runs. Two scalings (``DynamicScaling``, ``LongRopeScaling``) depend on the length of the sequence in
transformers; here they depend on the engine's context length (``RopeConfig.for_context``). If that
is at most the original length, they equal transformers'; else they equal transformers' for a
sequence of that length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RopeScaling(ABC):
    """A scaling of rope: it changes the frequencies and the context length of a model."""

    @property
    def attention_scale(self) -> float:
        """The factor on cosine and sine."""
        return 1.0

    @abstractmethod
    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """The scaled frequencies."""

    @abstractmethod
    def lengths(self, positions: int) -> tuple[int, int]:
        """The default context length and the longest one; ``positions``: max_position_embeddings.

        The default is used if ``max_model_len`` is not set.
        """

    def for_context(self, length: int) -> Self:
        """This scaling for an engine with context length ``length``; most do not depend on it."""
        del length
        return self


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions are divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float
    original_max_position_embeddings: int | None = None

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        del rope
        return frequencies / np.float32(self.factor)

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings or positions
        longest = max(positions, int(original * self.factor))
        return longest, longest


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Only the fastest components rotate, and positions are divided by ``factor``.

    The fraction ``partial_rotary_factor`` of components rotates, with the frequencies that they
    have when all rotate; the others are not changed.
    """

    factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        rotated = int(self.partial_rotary_factor * rope.width // 2)
        kept = np.where(np.arange(len(frequencies)) < rotated, frequencies, np.float32(0))
        return (kept / np.float32(self.factor)).astype(np.float32)

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        longest = max(positions, int(positions * self.factor))
        return longest, longest


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """A larger base for longer sequences (bloc97 and emozilla 2023, dynamic NTK).

    The base grows beyond ``original_max_position_embeddings``. ``length`` is the engine's context
    length: see the module's docstring.
    """

    factor: float
    original_max_position_embeddings: int
    length: int = 0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings
        if self.length <= original:
            return frequencies
        growth = self.factor * self.length / original - (self.factor - 1)
        theta = rope.theta * growth ** (rope.dim / (rope.dim - 2))
        return inverse_frequencies(RopeConfig(rope.dim, theta))

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        return positions, max(positions, int(positions * self.factor))

    def for_context(self, length: int) -> Self:
        """See ``RopeScaling``."""
        return replace(self, length=max(length, self.original_max_position_embeddings))


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024): each component is divided by its own factor.

    The factors are ``short_factor`` if ``length``, the engine's context length, is at most the
    original length, else ``long_factor``: see the module's docstring. ``attention_factor`` replaces
    ``sqrt(1 + ln(factor) / ln(original length))``, and ``short_mscale`` and ``long_mscale``, if
    they are not None, replace both for short and long lengths (Phi-3.5-MoE).
    """

    short_factor: tuple[float, ...]  # H / 2
    long_factor: tuple[float, ...]  # H / 2
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    length: int = 0

    @property
    def attention_scale(self) -> float:
        """See ``RopeScaling``."""
        own = self.long_mscale if self._is_long else self.short_mscale
        if own is not None:
            return own
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(
            1 + math.log(self.factor) / math.log(self.original_max_position_embeddings)
        )

    @property
    def _is_long(self) -> bool:
        return self.length > self.original_max_position_embeddings

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        del rope
        return frequencies / np.array(
            self.long_factor if self._is_long else self.short_factor, np.float32
        )

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings
        return original, max(positions, int(original * self.factor))

    def for_context(self, length: int) -> Self:
        """See ``RopeScaling``."""
        return replace(self, length=max(length, self.original_max_position_embeddings))


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: slow components are divided by ``factor``, fast ones kept, those between blended.

    A component is slow when its wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` and fast below ``... / high_freq_factor``. Source: ``apply_scaling`` of Meta's
    reference model. In its configs ``max_position_embeddings`` is the scaled length.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        del rope
        rotations = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        if span == 0:  # Llama 4 Scout: none is blended
            return np.where(
                rotations >= self.low_freq_factor, frequencies, frequencies / self.factor
            ).astype(np.float32)
        kept = np.clip((rotations - self.low_freq_factor) / span, 0.0, 1.0)
        return (kept * frequencies + (1 - kept) * frequencies / self.factor).astype(np.float32)

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings
        return positions, max(positions, int(original * self.factor))


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023): a blend by component index, and an attention scale.

    Components with more than ``beta_fast`` rotations over the original context are kept, those
    with fewer than ``beta_slow`` are divided by ``factor``, and those between are blended. Without
    ``truncate`` the bounds are not rounded to whole components. The attention scale is the paper's
    ``0.1 ln(factor) + 1``, unless ``attention_factor`` replaces it, or the quotient from ``mscale``
    and ``mscale_all_dim`` if both are set and not 0 (DeepSeek). ``attn_factor`` multiplies it, as
    in vLLM (DeepSeek-R1-0528-Qwen3-8B uses it to cancel the attention scale).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    attn_factor: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def attention_scale(self) -> float:
        """See ``RopeScaling``."""
        if self.attention_factor is not None:
            return self.attention_factor * self.attn_factor
        if self.mscale and self.mscale_all_dim:
            quotient = self.mscaled(self.mscale) / self.mscaled(self.mscale_all_dim)
            return quotient * self.attn_factor
        return self.mscaled(1.0) * self.attn_factor

    def mscaled(self, mscale: float) -> float:
        """DeepSeek's factor for ``mscale``."""
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        first, last = (self._component(rope, beta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.dim - 1)
        index = np.arange(len(frequencies), dtype=np.float32)
        divided = np.clip((index - first) / (last - first or 0.001), 0.0, 1.0)
        blend = (1 - divided) * frequencies + divided * frequencies / self.factor
        return blend.astype(np.float32)

    def _component(self, rope: RopeConfig, rotations: float) -> float:
        """The (fractional) component with so many rotations over the original context."""
        wavelength = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        longest = max(positions, int(self.original_max_position_embeddings * self.factor))
        return longest, longest


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of the rotation; ``scaling`` None is the original scheme.

    With ``rotary_dim`` only so many components of a head rotate, and one more if that is odd: the
    frequencies are those of the odd number. They are the first of each half of the head, as the
    weights are laid out (``models.params.RotaryRows``), and the tables hold the angle 0 for the
    others: every kernel then computes them without a form of its own. Heads may rotate
    ``backwards``.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    backwards: bool = False

    @property
    def dim(self) -> int:
        """The number of components in the formulas of frequencies."""
        return self.rotary_dim or self.head_dim

    @property
    def width(self) -> int:
        """The number of components of a head that rotate."""
        return self.dim + self.dim % 2

    @property
    def attention_scale(self) -> float:
        """The factor on cosine and sine."""
        return self.scaling.attention_scale if self.scaling else 1.0

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``.

        The default lengths are vLLM's, except for scalings that depend on the context length: their
        default is the original length.
        """
        return self.scaling.lengths(positions) if self.scaling else (positions, positions)

    def for_context(self, length: int) -> RopeConfig:
        """The rope config for an engine with context length ``length``."""
        return replace(self, scaling=self.scaling.for_context(length)) if self.scaling else self


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:  # float32[width / 2]
    """Radians per position of each pair of components that rotates, in float32 as the reference
    models do.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    frequencies = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    return rope.scaling.rescale(rope, frequencies) if rope.scaling else frequencies


def rope_tables(
    rope: RopeConfig,
    positions: jax.Array,  # int32[T]
    learned: jax.Array | None = None,  # float32[H / 2]
) -> tuple[jax.Array, jax.Array]:  # float32[T, H / 2] each
    """Cosine and sine of each token's angles; they are computed once per step.

    Frequencies are multiplied by the exponentials of those that are ``learned``.
    """
    frequencies = inverse_frequencies(rope)
    frequencies = frequencies if learned is None else frequencies * jnp.exp(learned)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = -angles if rope.backwards else angles
    cos, sin = jnp.cos(angles) * rope.attention_scale, jnp.sin(angles) * rope.attention_scale
    if rope.width == rope.head_dim:
        return cos, sin
    others = ((0, 0), (0, (rope.head_dim - rope.width) // 2))  # their scale is 1
    return jnp.pad(cos, others, constant_values=1.0), jnp.pad(sin, others)
