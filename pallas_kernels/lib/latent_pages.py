"""Pages of multi-head latent attention: a token's latent (C), and the rotated key (R) behind it.

Either one pool holds both, or a latent has 8 bits in groups of 128 components, each with a scale in
float32, and the rotated key is a pool of its own in bfloat16: with C = 512 and R = 64 a token takes
656 bytes (was 1,152 in 16 bits), as in DeepSeek's kernels (FlashMLA). See ``page_scales``: an entry
depends on its own token alone.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.lib.page_scales import BITS, Pools, rounded, values_of

GROUP = 128  # components that share a scale
ROPE_DTYPE = jnp.dtype("bfloat16")


class LatentPagesArgs(Protocol):
    """Arguments with pages of latents."""

    @property
    def pages(self) -> jax.Array: ...  # [P, S, C + R]; of 8 bits uint8[P, S, C]
    @property
    def scales(self) -> jax.Array | None: ...  # float32[P, S, G]
    @property
    def rope_pages(self) -> jax.Array | None: ...  # bfloat16[P, S, R]


def num_groups(rank: int) -> int:
    """G: the scales of a latent."""
    return max(1, rank // GROUP)


def pools_of(args: LatentPagesArgs) -> Pools:
    """The pools of a call; of 8 bits the scales and the rotated keys come last."""
    if args.scales is None or args.rope_pages is None:
        return (args.pages,)
    return args.pages, args.scales, args.rope_pages


def appended(entries: jax.Array, pools: Pools) -> Pools:  # [T, C + R]
    """The arrays to be written into the pools for these entries, in their order."""
    if len(pools) == 1:
        return (entries,)
    rank, groups = pools[0].shape[2], pools[1].shape[2]
    bits, scales = rounded(entries[:, :rank].reshape(len(entries), groups, -1))
    return bits.reshape(len(entries), rank), scales, entries[:, rank:].astype(pools[2].dtype)


def entries_of(arrays: Pools) -> jax.Array:  # float32[..., C + R]
    """The entries that arrays of pools stand for."""
    if len(arrays) == 1:
        return arrays[0].astype(jnp.float32)
    bits, scales, rope = arrays
    by_group = values_of(bits).reshape(*scales.shape, -1) * scales[..., None]
    return jnp.concatenate((by_group.reshape(bits.shape), rope.astype(jnp.float32)), axis=-1)


def as_stored(entries: jax.Array, pools: Pools) -> jax.Array:  # [T, C + R]
    """The entries as pages return them."""
    if len(pools) == 1:
        return entries
    return entries_of(appended(entries, pools)).astype(entries.dtype)


def read_block(pools: Pools, page_ids: jax.Array) -> jax.Array:  # float32[entries, C + R]
    """A block of entries. Ids out of range are clipped; the caller masks those."""
    blocks = (pool.at[page_ids].get(mode="clip") for pool in pools)
    return entries_of(tuple(block.reshape(-1, *block.shape[2:]) for block in blocks))


def check_pools(
    op: str,
    args: LatentPagesArgs,
    entries: jax.Array,  # [T, C + R]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
) -> None:
    """Raise ValueError when the shapes of latent attention do not fit together."""
    pools, width = pools_of(args), sum(pool.shape[-1] for pool in pools_of(args)[::2])
    if args.pages.ndim != 3 or entries.ndim != 2 or entries.shape[1] != width:
        raise ValueError(f"{op}: entries {entries.shape} do not fit pages {args.pages.shape}")
    if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
        raise ValueError(
            f"{op}: page_table {page_table.shape} does not fit seq_lens {seq_lens.shape}"
        )
    shape, own = args.pages.shape, [(pool.shape[:2], str(pool.dtype)) for pool in pools[1:]]
    needed = [(shape[:2], "float32"), (shape[:2], str(ROPE_DTYPE))]
    groups = pools[1].shape[2] if len(pools) > 1 else 1
    if (args.pages.dtype == BITS) != (len(pools) > 1) or own not in ([], needed):
        raise ValueError(f"{op}: pages {args.pages.dtype}{shape} do not fit {own}")
    if shape[2] % groups:
        raise ValueError(f"{op}: {groups} scales do not divide latents of {shape[2]}")
