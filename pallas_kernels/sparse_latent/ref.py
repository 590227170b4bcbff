"""The definition of sparse_latent: attention over expanded keys and values of chosen positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.latent_pages import entries_of, pools_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SparseLatentArgs:
    """The arguments of ``sparse_latent``."""

    q: jax.Array  # [T, N, D + R]
    k_up: jax.Array  # [N * D, C]
    v_up: jax.Array  # [N * V, C]
    pages: jax.Array  # [P, S, C + R]; of 8 bits uint8[P, S, C]: see ``lib.latent_pages``
    page_table: jax.Array  # int32[B, M]
    rows: jax.Array  # int32[T]: the row of each token
    positions: jax.Array  # int32[T, K]: those that each token reads; -1: none
    scales: jax.Array | None = None  # float32[P, S, G]: of 8-bit pages
    rope_pages: jax.Array | None = None  # bfloat16[P, S, R]: of 8-bit pages
    sinks: jax.Array | None = None  # float32[N]
    scale: float = field(metadata=STATIC)


def sparse_latent(args: SparseLatentArgs) -> jax.Array:  # [T, N, V]
    """Each token alone; those that read no position yield zeros."""
    rank, size = args.k_up.shape[1], args.pages.shape[1]
    q, k_up, v_up = (np.asarray(x, np.float32) for x in (args.q, args.k_up, args.v_up))
    heads = q.shape[1]
    k_up, v_up = k_up.reshape(heads, -1, rank), v_up.reshape(heads, -1, rank)
    pool = np.asarray(entries_of(tuple(map(jnp.asarray, pools_of(args)))))
    out = np.zeros((len(q), heads, v_up.shape[1]), np.float32)
    for token, (row, given) in enumerate(zip(args.rows, args.positions, strict=True)):
        at = np.asarray(given)[np.asarray(given) >= 0]
        if not len(at):
            continue
        entries = pool[np.asarray(args.page_table)[row, at // size], at % size]  # [K, C + R]
        latents, k_rope = entries[:, :rank], entries[:, rank:]
        k = np.einsum("KC,NDC->KND", latents, k_up)
        shared = np.broadcast_to(k_rope[:, None], (len(at), heads, k_rope.shape[1]))
        scores = np.einsum("NH,KNH->NK", q[token], np.concatenate((k, shared), axis=2))
        scores = scores * args.scale
        if args.sinks is not None:  # the score of a key whose value is 0
            scores = np.concatenate((np.asarray(args.sinks)[:, None], scores), axis=1)
        p = np.asarray(jax.nn.softmax(scores, axis=1))[:, -len(at) :]
        out[token] = np.einsum("NK,KC,NVC->NV", p, latents, v_up)
    return jnp.asarray(out, args.q.dtype)
