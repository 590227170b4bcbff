"""Positions without parameters that are no rotation: ALiBi's slopes, and sinusoids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Alibi:
    """Scores less the distance of the key times a slope of their head (Press et al. 2021,
    arXiv:2108.12409). ``scale`` multiplies all slopes, ``geometric`` is of those of any N, and
    ``most`` is minus the binary logarithm of the last one. With ``root`` it is the square root of
    the distance.
    """

    num_heads: int
    scale: float = 1.0
    geometric: bool = False
    most: float = 8.0
    root: bool = False

    def slopes(self) -> np.ndarray:  # float32[N]
        """2^(-m i / n) for i from 1 to n, the largest power of two up to N; the heads after these
        have every second one of 2 n, from the first on. If ``geometric``, n is N; m is ``most``.
        """
        n = self.num_heads if self.geometric else 2 ** math.floor(math.log2(self.num_heads))
        first = -self.most * np.arange(1, n + 1) / n
        others = -self.most * np.arange(1, 2 * n, 2) / (2 * n)
        exponents = np.concatenate([first, others])[: self.num_heads]
        return (2.0**exponents * self.scale).astype(np.float32)

    def own(self, num_heads: int, axis: str | None) -> jax.Array:  # float32[num_heads]
        """The slopes of the heads of one device, which has so many; see ``StepContext.axis``."""
        slopes = jnp.asarray(self.slopes())
        if axis is None:
            return slopes
        return jax.lax.dynamic_slice_in_dim(slopes, jax.lax.axis_index(axis) * num_heads, num_heads)


@dataclass(frozen=True)
class Sinusoids:
    """Sines and cosines of a position, which are added to embeddings (Vaswani et al. 2017).

    Frequencies fall from 1 to 1 / ``base``: the last one is that, or with ``open_end`` the next.
    """

    base: float = 10000.0
    open_end: bool = False

    def of(self, positions: jax.Array, width: int) -> jax.Array:  # int32[T] -> float32[T, width]
        """The sines of all frequencies, then their cosines."""
        half = width // 2
        steps = half if self.open_end else half - 1
        frequencies = self.base ** (-np.arange(half, dtype=np.float32) / np.float32(steps))
        angles = positions.astype(jnp.float32)[:, None] * frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
