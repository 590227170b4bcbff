"""The definition of latent_decode: append the new entries, then attend to all of the context."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_decode.attend_ref import attend
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.latent_pages import appended, entries_of, pools_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentDecodeArgs:
    """The arguments of ``latent_decode``."""

    q_latent: jax.Array  # [B, N, C]
    q_rope: jax.Array  # [B, N, R]
    entries: jax.Array  # [B, C + R]
    pages: jax.Array  # [P, S, C + R]; of 8 bits uint8[P, S, C]: see ``lib.latent_pages``
    page_table: jax.Array  # int32[B, M]
    seq_lens: jax.Array  # int32[B]
    scales: jax.Array | None = None  # float32[P, S, G]: of 8-bit pages
    rope_pages: jax.Array | None = None  # bfloat16[P, S, R]: of 8-bit pages
    scale: float = field(metadata=STATIC)


def latent_decode(args: LatentDecodeArgs) -> tuple[jax.Array, ...]:  # [B, N, C] and the pools
    """A row of length 0 is padding: its entry goes to page 0, which is never read.

    Keys and values are entries, so grouped-query attention with one kv head gives the result, and
    its last R components, sums of rotated keys, are not needed.
    """
    lens, page_size = np.asarray(args.seq_lens), args.pages.shape[1]
    last = np.maximum(lens - 1, 0)
    page = np.asarray(args.page_table)[np.arange(len(lens)), last // page_size]
    pools = tuple(np.array(pool) for pool in pools_of(args))
    own = appended(jnp.asarray(args.entries), pools_of(args))
    for pool, entries in zip(pools, own, strict=True):
        entries = np.asarray(entries.astype(pool.dtype))
        for row in np.flatnonzero(lens):
            pool[page[row], last[row] % page_size] = entries[row]
    queries = jnp.concatenate((jnp.asarray(args.q_latent), jnp.asarray(args.q_rope)), axis=-1)
    stored = pools[0] if len(pools) == 1 else entries_of(tuple(map(jnp.asarray, pools)))
    heads = jnp.asarray(stored)[:, :, None]  # [P, S, 1, C + R]
    out = attend(queries, (heads, heads), args.page_table, lens, scale=args.scale)
    return out[..., : args.q_latent.shape[-1]], *map(jnp.asarray, pools)
