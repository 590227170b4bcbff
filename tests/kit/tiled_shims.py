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
from pallas_kernels.quantised_gemm.tiled import fragments, integers, mosaic, scaled_tiles, step
from pallas_kernels.quantised_gemm.tiled.arrange import TILE


def replace_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions until the end of the test."""
    monkeypatch.setattr(step, "matmuls", _matmuls)
    monkeypatch.setattr(fragments, "load_words", _load_words)
    monkeypatch.setattr(fragments, "fragment", _fragment)
    monkeypatch.setattr(fragments, "scaled", _scaled)
    monkeypatch.setattr(scaled_tiles, "times_integers", _times_integers)
    monkeypatch.setattr(scaled_tiles, "times_floats", _times_floats)
    monkeypatch.setattr(mosaic, "put", _put)
    monkeypatch.setattr(mosaic, "multiply", _multiply)
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


def _put(whole: jax.Array, target: Any, totals: Any, token: int) -> None:
    """The high and the low bytes of a token's inputs, in the order of the inputs, and sums."""
    values = whole.astype(jnp.int32).reshape(target.shape[0], -1)
    totals[...] = values.sum(axis=1)
    high = (values + 128) >> 8
    for column, part in enumerate((high, values - 256 * high)):
        target.at[:, 2 * token + column][...] = part.astype(jnp.int8).reshape(len(values), 4, -1)


def _multiply(
    kind: str,
    tiles: Sequence[Any],
    factors: Any,
    tokens: Any,
    units: Any,
    totals: Any,
    total: jax.Array,
) -> jax.Array:
    """The same sums, group by group; the rows of ``units`` are tokens."""
    values = [64 * fragments.operand(kind, tile, 128.0 * (kind == "int8")) for tile in tiles]
    wide = jnp.concatenate([each.astype(jnp.float32) for each in values], axis=1)
    chunks = tokens.shape[0]
    pairs = tokens[...].astype(jnp.float32).reshape(chunks, 4, 2, -1)
    each = jnp.repeat(units[...], chunks // units.shape[1], axis=1)  # [4, chunks]
    x = (pairs[:, :, 0] * 256 + pairs[:, :, 1]) * each.T[:, :, None]
    supers = None
    if isinstance(factors, integers.RecordedFactors):
        words, factors = factors, _groups_of(factors)
        pairs = lax.bitcast_convert_type(words.supers[...], jnp.float16)  # [64, 2]
        supers = pairs.astype(jnp.float32)[:, :, None]
    inputs = wide.shape[1] // len(factors)
    sums = jnp.zeros((TILE, 4), jnp.float32)
    minima = jnp.zeros_like(sums)
    for i, group in enumerate(factors):
        own = wide[:, i * inputs : (i + 1) * inputs]
        places = slice(i * chunks // len(factors), (i + 1) * chunks // len(factors))
        some = x[places].transpose(0, 2, 1).reshape(inputs, -1)
        if group.zero is not None:
            own = own - group.zero[...].astype(jnp.float32)[:, None]
        elif kind == "int4" and group.offset is None and supers is None:
            own = own - 8
        product = io_callback(_dot, jax.ShapeDtypeStruct(sums.shape, jnp.float32), own, some)
        sums += product * group.scale[...].astype(jnp.float32)[:, None]
        if group.offset is not None:
            total_x = (totals[...].astype(jnp.float32) * each)[:, places].sum(1)
            minima += group.offset[...].astype(jnp.float32)[:, None] * total_x
    if supers is not None:
        sums, minima = sums * supers[:, 0], minima * supers[:, 1]
    return total.at[:, ::2].add(sums + minima)


def _groups_of(factors: integers.RecordedFactors) -> list[integers.Factors]:
    """Scales and offsets of each group, from the words of records."""
    skipped = 0 if factors.skipped is None else factors.skipped
    dtype = jnp.int8 if factors.signed else jnp.uint8

    def some(words: Sequence[Any], i: int) -> jax.Array | None:
        if not words:
            return None
        found = jnp.concatenate([lax.bitcast_convert_type(w[...], dtype) for w in words], axis=1)
        return found[:, i + skipped]

    places = range(factors.count)
    return [
        integers.Factors(some(factors.scales, i), None, some(factors.offsets, i)) for i in places
    ]


def _load_words(tile: Any) -> jax.Array:
    if tile.dtype == jnp.int32:
        return tile[...].reshape(-1)
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


def _scaled(weights: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
    wide = weights.astype(jnp.float32) * scale
    return (wide if offset is None else wide + offset).astype(jnp.bfloat16)


def _values(kind: str, tile: Any, *, centred: bool) -> jax.Array:  # float32[64, 64]
    middle = {"int8": 128.0, "int4": 8.0 * centred}[kind]
    return fragments.operand(kind, tile, middle).astype(jnp.float32) * 64


def _bytes(words: jax.Array, groups: range, signed: bool) -> jax.Array:  # float32[64, 64]
    found = lax.bitcast_convert_type(words, jnp.int8 if signed else jnp.uint8)
    found = found[:, groups.start : groups.stop].astype(jnp.float32)
    return jnp.repeat(found, TILE // len(groups), axis=1)


def _times_integers(
    kind: str, tile: Any, scales: jax.Array, groups: range, *, signed: bool
) -> jax.Array:
    products = _values(kind, tile, centred=True) * _bytes(scales, groups, signed)
    return (products / scaled_tiles.INTEGER_UNIT).astype(jnp.bfloat16)


def _times_floats(
    kind: str, tile: Any, factors: Sequence[jax.Array], groups: range, *, signed: bool
) -> jax.Array:
    scales, offsets = (_bytes(words, groups, signed) for words in factors[:2])
    supers = lax.bitcast_convert_type(factors[2], jnp.float16).astype(jnp.float32)
    scales, offsets = scales * supers[:, :1], offsets * supers[:, 1:]
    weights = _values(kind, tile, centred=False) * scales + offsets
    return (weights / scaled_tiles.UNIT).astype(jnp.bfloat16)


def _times(bits: jax.Array, multiplier: float) -> jax.Array:
    """bfloat16 of at most 11 bits and a sign, times a power of two. XLA on a CPU takes subnormal
    numbers for zero.
    """
    exponent = bits >> 7 & 15
    mantissa = (bits & 127).astype(jnp.float32) + jnp.where(exponent, 128.0, 0.0)
    shift = jnp.where(exponent > 1, 2.0 ** (exponent.astype(jnp.float32) - 1.0), 1.0)
    magnitude = mantissa * shift * (2.0**-133 * multiplier)
    return jnp.where(bits >> 15, -magnitude, magnitude)
