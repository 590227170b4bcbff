"""Which calls the Triton kernel of append_decode takes, and how it cuts them up.

Needs no Triton, so that a machine without it can ask. Must not know: the kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import jax

from pallas_kernels import tuned
from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.paged_decode import launch as paged_decode
from pallas_kernels.paged_decode.launch import Launch, shapes_of


def queries_of(qkv: jax.Array, k_pages: jax.Array) -> jax.ShapeDtypeStruct:  # [B, N, H]
    """Shape and dtype of the queries in ``qkv``."""
    rows, heads, head_dim = qkv.shape
    return jax.ShapeDtypeStruct((rows, heads - 2 * k_pages.shape[2], head_dim), qkv.dtype)


def call_shapes(qkv: jax.Array, k_pages: jax.Array) -> Hashable:  # [B, N + 2K, H], [P, S, K, H]
    """What ``shapes_of`` says of a case, of a call."""
    (b, n, h), (page_size, num_kv_heads) = queries_of(qkv, k_pages).shape, k_pages.shape[1:3]
    return (b, n, num_kv_heads, h, page_size, str(qkv.dtype), str(k_pages.dtype))


def supports(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del cos, sin, qk_norms, arrivals, eps
    queries = queries_of(qkv, k_pages)
    pages = (k_pages, v_pages, page_table, seq_lens)
    return paged_decode.supports(queries, *pages, scale=scale, window=window)  # type: ignore[arg-type]


def by_rule(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """paged_decode's choice; in float32, where products leave the matrix units, turning the queries
    leaves registers for the smallest block alone.
    """
    queries = queries_of(qkv, k_pages)
    rule = paged_decode.by_rule(queries, k_pages, page_table)  # type: ignore[arg-type]
    return rule if qkv.dtype.itemsize <= 2 else replace(rule, block=paged_decode.BLOCKS[0])


def choose(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """The tuned choice for a call of these shapes on this device, else that of the rule."""
    choice = tuned.lookup("append_decode", CASES, shapes_of, call_shapes(qkv, k_pages))
    return Launch(**choice) if choice else by_rule(qkv, k_pages, page_table)
