"""Stand-ins for what JAX's interpreter cannot run of Mosaic kernels with weights in tiles.

It has no wgmma with an operand in registers, cannot rename registers and has no scattered accesses.
So ``matmuls``, ``load_words``, ``fragment``, ``load_at`` and ``store_at`` are replaced. The
replacement of ``fragment`` is the layout of operand A as the PTX ISA defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from pallas_kernels.experts import decode
from pallas_kernels.quantised_gemm.tiled import fragments, step


def replace_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions until the end of the test."""
    monkeypatch.setattr(step, "matmuls", _matmuls)
    monkeypatch.setattr(fragments, "load_words", _load_words)
    monkeypatch.setattr(fragments, "fragment", _fragment)
    monkeypatch.setattr(decode, "load_at", _load_at)
    monkeypatch.setattr(decode, "store_at", _store_at)


def _load_at(ref: Any, indices: jax.Array) -> jax.Array:
    return jnp.stack([ref[indices[i]] for i in range(indices.size)])


def _store_at(ref: Any, offsets: jax.Array, values: jax.Array) -> None:
    for column in range(values.shape[1]):
        first = offsets[0, column]

        @pl.when(first >= 0)
        def _write(first: Any = first, column: int = column) -> None:
            row, output = jnp.divmod(first, ref.shape[-1])
            rows = (row,) if len(ref.shape) == 2 else jnp.divmod(row, ref.shape[1])
            ref.at[*rows, pl.ds(output, values.shape[0])][...] = values[:, column]


def _dot(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ x.astype(np.float32)


def _matmuls(sums: Any, tokens: int, totals: Sequence[jax.Array] | None = None) -> list[jax.Array]:
    """Sums of matmuls by numpy; XLA's would use its thread pool."""
    shape = jax.ShapeDtypeStruct((64, tokens), jnp.float32)
    found = [
        reduce(jnp.add, (io_callback(_dot, shape, a, x[...]) for a, x in operands))
        for operands in sums
    ]
    return found if totals is None else [*map(jnp.add, totals, found)]


def _load_words(tile: Any) -> jax.Array:
    return lax.bitcast_convert_type(tile[...].reshape(-1, 4), jnp.int32)


def _fragment(
    words: Sequence[jax.Array], multipliers: Sequence[float], minus: Any = 0.0
) -> jax.Array:
    pairs = [lax.bitcast_convert_type(w, jnp.uint16) for w in words]  # [words, 2]
    scaled = [_times(x, m) for x, m in zip(pairs, multipliers, strict=True)]
    if len(pairs) == 4:  # [pair, half, thread, k16, element]
        arranged = jnp.stack(scaled).reshape(2, 2, 128, 4, 2).transpose(1, 2, 3, 0, 4)
    else:  # [half, two of k16, thread, one of them, pair, element]
        arranged = jnp.stack(scaled).reshape(2, 2, 128, 2, 2, 2).transpose(0, 2, 1, 3, 4, 5)
    axes = arranged.reshape(2, 4, 8, 4, 4, 2, 2)  # half, warp, g, t, k16, pair, element
    found = axes.transpose(1, 0, 2, 4, 5, 3, 6).reshape(64, 64)
    return (found - jnp.asarray(minus, jnp.float32)).astype(jnp.bfloat16)


def _times(bits: jax.Array, multiplier: float) -> jax.Array:
    """bfloat16 of at most 11 bits and a sign, times a power of two. XLA on a CPU takes subnormal
    numbers for zero.
    """
    exponent = bits >> 7 & 15
    mantissa = (bits & 127).astype(jnp.float32) + jnp.where(exponent, 128.0, 0.0)
    shift = jnp.where(exponent > 1, 2.0 ** (exponent.astype(jnp.float32) - 1.0), 1.0)
    magnitude = mantissa * shift * (2.0**-133 * multiplier)
    return jnp.where(bits >> 15, -magnitude, magnitude)
