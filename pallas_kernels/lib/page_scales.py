"""Pages of 8-bit floats, with a scale in float32 for each token and head.

A scale depends on its own token alone, so an entry has the same bits whatever else was written, and
in which step: it is the value times its scale. The pools are uint8, the bits of ``VALUES``, since
XLA for CPUs copies a whole pool of 8-bit floats, converted twice, to write one entry: 91 ms for a
pool of 6 MB, as bits 0.05 ms.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

type Pools = tuple[jax.Array, ...]  # k_pages, v_pages; of 8-bit pages also k_scales, v_scales

BITS = jnp.dtype("uint8")
VALUES = jnp.dtype("float8_e4m3fn")
LARGEST = 448.0  # finite value
SMALLEST_SCALE = 2.0**-100  # also that of a head of zeros


class PagedArgs(Protocol):
    """Arguments with pages."""

    @property
    def k_pages(self) -> jax.Array: ...  # [P, S, K, H]
    @property
    def v_pages(self) -> jax.Array: ...  # [P, S, K, H]
    @property
    def k_scales(self) -> jax.Array | None: ...  # float32[P, S, K]
    @property
    def v_scales(self) -> jax.Array | None: ...  # float32[P, S, K]


def pools_of(args: PagedArgs) -> Pools:
    """The pools of a call; the scales come last, if there are any."""
    if args.k_scales is None or args.v_scales is None:
        return args.k_pages, args.v_pages
    return args.k_pages, args.v_pages, args.k_scales, args.v_scales


def appended(k: jax.Array, v: jax.Array, pools: Pools) -> Pools:  # [T, K, H] each
    """The arrays to be written into the pools for these keys and values, in their order."""
    if len(pools) == 2:
        return k, v
    (k, k_scales), (v, v_scales) = rounded(k), rounded(v)
    return k, v, k_scales, v_scales


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [..., H] -> uint8[..., H], float32[...]
    """The bits of 8-bit floats, and their scales, by which the largest magnitude of a head becomes
    ``LARGEST``. Infinities and NaN stay in their head.
    """
    x32 = x.astype(jnp.float32)
    # a product with a constant, since XLA may make one of a division
    scales = jnp.max(jnp.abs(x32), axis=-1) * jnp.float32(1.0 / LARGEST)
    scales = jnp.maximum(scales, SMALLEST_SCALE)
    values = (x32 / scales[..., None]).astype(VALUES)
    return jax.lax.bitcast_convert_type(values, BITS), scales


def values_of(entries: jax.Array) -> jax.Array:
    """Entries of pages as numbers in float32, without their scales."""
    if entries.dtype == BITS:
        entries = jax.lax.bitcast_convert_type(entries, VALUES)
    return entries.astype(jnp.float32)


def check_scales(op: str, args: PagedArgs) -> None:
    """Raise ValueError unless 8-bit pages have scales that fit, and others have none."""
    pages, scales = args.k_pages, (args.k_scales, args.v_scales)
    found = [None if x is None else (x.shape, str(x.dtype)) for x in scales]
    needed = (pages.shape[:3], "float32") if pages.dtype == BITS else None
    if found != [needed, needed]:
        raise ValueError(
            f"{op}: scales {found[0]} and {found[1]} do not fit pages {pages.dtype}{pages.shape}"
        )
