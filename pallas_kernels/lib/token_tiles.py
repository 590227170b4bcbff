"""Tiles of tokens, for what computes each token separately with arrays too large for all tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.lib.device import current_device

MOST_TOKENS = 64


def tile_width(tokens: int, most: int, *, cap: int = MOST_TOKENS) -> int:
    """The tokens of a tile, if ``most`` of them fit in memory, and at most ``cap``.

    Tiles are as few as they can be, and then as narrow, so that the last one is nearly full.
    """
    tiles = -(-tokens // max(1, min(most, cap)))
    return -(-tokens // tiles) if tiles else 1


def by_tiles(
    function: Callable[..., jax.Array],  # of [W, ...] each -> [W, ...]
    arrays: tuple[jax.Array, ...],  # [T, ...] each
    most: int,
    *,
    cap: int = MOST_TOKENS,
) -> jax.Array:  # [T, ...]
    """The results of a function of tiles, which is called with as many tokens each time.

    Tokens that fill the last tile are zeros.
    """
    tokens = len(arrays[0])
    width = tile_width(tokens, most, cap=cap)
    rest = -tokens % width

    def tiled(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, rest)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, width, *x.shape[1:])

    if width == tokens:
        return function(*arrays)
    out = jax.lax.map(lambda tile: function(*tile), tuple(map(tiled, arrays)))
    return out.reshape(-1, *out.shape[2:])[:tokens]


def wide_einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:  # float32[...]
    """Sums of products in float32, of operands in one dtype, which is kept if tensor cores can
    multiply it. XLA has no such matmul of 16-bit values for CPUs.
    """
    if current_device().platform == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(equation, x, y, precision="highest", preferred_element_type=jnp.float32)
