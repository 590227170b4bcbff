"""The definition of latent_prefill: attention over the expanded keys and values of all pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.latent_pages import entries_of, pools_of
from pallas_kernels.paged_prefill.ref import PrefillArgs, paged_prefill


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentPrefillArgs:
    """The arguments of ``latent_prefill``."""

    q: jax.Array  # [T, N, D + R]
    entries: jax.Array  # [T, C + R]
    k_up: jax.Array  # [N * D, C]
    v_up: jax.Array  # [N * V, C]
    pages: jax.Array  # [P, S, C + R]; of 8 bits uint8[P, S, C]: see ``lib.latent_pages``
    page_table: jax.Array  # int32[R, M]
    seq_lens: jax.Array  # int32[R]
    query_start_loc: jax.Array  # int32[R + 1]
    scales: jax.Array | None = None  # float32[P, S, G]: of 8-bit pages
    rope_pages: jax.Array | None = None  # bfloat16[P, S, R]: of 8-bit pages
    scale: float = field(metadata=STATIC)


def latent_prefill(args: LatentPrefillArgs) -> jax.Array:  # [T, N, V]
    """The pages have this step's entries; padding with zeros makes keys and values equally wide."""
    num_heads, rank = args.q.shape[1], args.k_up.shape[1]
    pool = entries_of(tuple(map(jnp.asarray, pools_of(args))))
    latents, k_rope = pool[..., :rank], pool[..., rank:]

    def expanded(w: jax.Array) -> jax.Array:  # [P, S, N, width of a head]
        by_head = jnp.asarray(w, jnp.float32).reshape(num_heads, -1, rank)
        return jnp.einsum("PSC,NDC->PSND", latents, by_head, precision="highest")

    k_nope, v = expanded(args.k_up), expanded(args.v_up)
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    k, value_dim = jnp.concatenate((k_nope, shared), axis=-1), v.shape[-1]
    width = max(k.shape[-1], value_dim)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    expanded_args = PrefillArgs(
        q=padded(jnp.asarray(args.q)),
        k_pages=padded(k),
        v_pages=padded(v),
        page_table=args.page_table,
        seq_lens=args.seq_lens,
        query_start_loc=args.query_start_loc,
        scale=args.scale,
    )
    return paged_prefill(expanded_args)[..., :value_dim]
