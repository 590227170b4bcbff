"""Rotary position embeddings: frequencies as values, tables per step.

Owns: ``RopeConfig``, the known scalings, how long a context each allows, ``rope_tables``. The
rotation itself, in the half-split layout of Hugging Face checkpoints, is
``pallas_kernels.numerics.rotate``.

The cache holds rotated keys, so that a position has the same frequencies for as long as an engine
runs. Two scalings (``DynamicScaling``, ``LongRopeScaling``) follow the length of the sequence; here
they follow the longest that the engine may meet, ``RopeConfig.for_context``. Up to the original
length they are what transformers computes, and beyond it what transformers computes for one
sequence of that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np


class RopeScaling(Protocol):
    """What a kind of scaling does to the frequencies, and to the length that a model can take."""

    @property
    def attention_scale(self) -> float:
        """Factor on cosine and sine."""
        ...

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """The frequencies to rotate by."""
        ...

    def lengths(self, positions: int) -> tuple[int, int]:
        """The context of an engine without ``max_model_len``, and the longest one, of a model with
        so many ``max_position_embeddings``.
        """
        ...

    def for_context(self, length: int) -> Self:
        """This scaling in an engine whose sequences may have ``length`` tokens."""
        ...


@dataclass(frozen=True)
class _Steady:
    """What most scalings have in common: attention as it is, the same at every length."""

    @property
    def attention_scale(self) -> float:
        """See ``RopeScaling``."""
        return 1.0

    def for_context(self, length: int) -> Self:
        """See ``RopeScaling``."""
        del length
        return self


@dataclass(frozen=True)
class LinearScaling(_Steady):
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

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
class ProportionalScaling(_Steady):
    """The fastest components alone rotate, positions divided by ``factor``.

    Of the components the first ``partial_rotary_factor`` rotate, by the frequencies they would have
    if all did; the others stay as they are.
    """

    factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        rotated = int(self.partial_rotary_factor * rope.head_dim // 2)
        kept = np.where(np.arange(len(frequencies)) < rotated, frequencies, np.float32(0))
        return (kept / np.float32(self.factor)).astype(np.float32)

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        longest = max(positions, int(positions * self.factor))
        return longest, longest


@dataclass(frozen=True)
class DynamicScaling(_Steady):
    """A larger base for longer sequences (bloc97 and emozilla 2023, dynamic NTK).

    The base grows from ``original_max_position_embeddings`` on; ``length`` is the engine's context,
    see the head of this file.
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
        theta = rope.theta * growth ** (rope.head_dim / (rope.head_dim - 2))
        return inverse_frequencies(RopeConfig(rope.head_dim, theta))

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        return positions, max(positions, int(positions * self.factor))

    def for_context(self, length: int) -> Self:
        """See ``RopeScaling``."""
        return replace(self, length=max(length, self.original_max_position_embeddings))


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): each component divided by a factor of its own.

    ``short_factor`` up to the original length, ``long_factor`` beyond it, where ``length``, the
    engine's context, decides: see the head of this file. ``attention_factor`` replaces
    ``sqrt(1 + ln(factor) / ln(original length))``.
    """

    short_factor: tuple[float, ...]  # H / 2
    long_factor: tuple[float, ...]  # H / 2
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    length: int = 0

    @property
    def attention_scale(self) -> float:
        """See ``RopeScaling``."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        return math.sqrt(
            1 + math.log(self.factor) / math.log(self.original_max_position_embeddings)
        )

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        del rope
        is_long = self.length > self.original_max_position_embeddings
        return frequencies / np.array(
            self.long_factor if is_long else self.short_factor, np.float32
        )

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings
        return original, max(positions, int(original * self.factor))

    def for_context(self, length: int) -> Self:
        """See ``RopeScaling``."""
        return replace(self, length=max(length, self.original_max_position_embeddings))


@dataclass(frozen=True)
class Llama3Scaling(_Steady):
    """Llama 3.1: slow components divided by ``factor``, fast ones kept, a linear blend between.

    A component is slow when its wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` and fast below ``... / high_freq_factor``. Source: ``apply_scaling`` of Meta's
    reference model, whose configs state the scaled length as ``max_position_embeddings``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        del rope
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (kept * frequencies + (1 - kept) * frequencies / self.factor).astype(np.float32)

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        original = self.original_max_position_embeddings
        return positions, max(positions, int(original * self.factor))


@dataclass(frozen=True)
class YarnScaling(_Steady):
    """YaRN (Peng et al. 2023): a blend by component index, and sharper attention.

    Components that turn more than ``beta_fast`` times over the original context are kept, those
    under ``beta_slow`` turns are divided by ``factor``; without ``truncate`` the bounds between
    them are not rounded to whole components. ``attention_factor`` replaces the paper's
    ``0.1 ln(factor) + 1``, and so does the quotient that ``mscale`` and ``mscale_all_dim`` give
    where both are there and not 0 (DeepSeek). ``attn_factor`` multiplies it, as in vLLM
    (DeepSeek-R1-0528-Qwen3-8B uses it to switch the sharpening off).
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
            quotient = self._sharpened(self.mscale) / self._sharpened(self.mscale_all_dim)
            return quotient * self.attn_factor
        return self._sharpened(1.0) * self.attn_factor

    def _sharpened(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0

    def rescale(self, rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:  # float32[H / 2]
        """See ``RopeScaling``."""
        first, last = (self._component(rope, turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rope.head_dim - 1)
        index = np.arange(len(frequencies), dtype=np.float32)
        divided = np.clip((index - first) / (last - first or 0.001), 0.0, 1.0)
        blend = (1 - divided) * frequencies + divided * frequencies / self.factor
        return blend.astype(np.float32)

    def _component(self, rope: RopeConfig, turns: float) -> float:
        """The (fractional) component that turns so often over the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``."""
        longest = max(positions, int(self.original_max_position_embeddings * self.factor))
        return longest, longest


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

    def lengths(self, positions: int) -> tuple[int, int]:
        """See ``RopeScaling``; the defaults are vLLM's, but the original length of a scaling whose
        frequencies follow the context.
        """
        return self.scaling.lengths(positions) if self.scaling else (positions, positions)

    def for_context(self, length: int) -> RopeConfig:
        """The rotation of an engine whose sequences may have ``length`` tokens."""
        return replace(self, scaling=self.scaling.for_context(length)) if self.scaling else self


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
