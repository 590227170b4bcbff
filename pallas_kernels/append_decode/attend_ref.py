"""The definition of decode attention: masked softmax over a row's whole page table."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lib.page_scales import Pools, values_of
from pallas_kernels.lib.softmax import biased, capped


@partial(jax.jit, static_argnames=("scale", "window", "cap", "root"))
def attend(
    q: jax.Array,  # [B, N, H]
    pools: Pools,  # [P, S, K, H] each; scales float32[P, S, K]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    sinks: jax.Array | None = None,  # [N], with values [B, N]
    slopes: jax.Array | None = None,  # float32[N]
    sink_values: jax.Array | None = None,  # [B, N, H]
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    root: bool = False,
) -> jax.Array:  # [B, N, H]
    """Each row's query attends to the last ``window`` (None: all) of its ``seq_lens[b]`` tokens.

    The query is the context's last token, whose K and V are already in the pages. Token p of row b
    lies in page ``page_table[b, p // S]`` at offset p % S; entries past the row's pages may be
    junk, and slots past its length may hold anything, NaN included. A row of length 0 is padding
    and yields zeros. N is a multiple of K; query head n reads kv head n // (N // K). Sums are in
    float32; the result has q's dtype, and the pages that or a narrower one, with scales if it has 8
    bits (``lib.page_scales``). ``sinks`` are logits of
    each head beside its scores: they take part in the softmax and have no value (Xiao et al., 2023,
    arXiv:2309.17453; gpt-oss learns them). With ``sink_values`` they are those of each row, and
    have these values. ``cap`` is that of ``softmax.capped``,
    ``slopes`` and ``root`` are those of ``softmax.biased``.
    """
    _, page_size, num_kv_heads, head_dim = pools[0].shape

    def attend_row(row: tuple[Any, ...]) -> jax.Array:
        query, page_ids, length, sinks, sink_values = row
        position = jnp.arange(page_ids.size * page_size)
        seen = position < length
        if window is not None:
            seen &= position >= length - window

        def read(of: int) -> jax.Array:  # float32[keys, K, H]
            found = [pool.at[page_ids].get(mode="clip") for pool in pools[of::2]]
            rows = values_of(found[0].reshape(-1, num_kv_heads, head_dim))
            for scales in found[1:]:
                rows *= scales.reshape(-1, num_kv_heads, 1)
            return jnp.where(seen[:, None, None], rows, 0.0)

        grouped = query.astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        scores = jnp.einsum("KGH,SKH->KGS", grouped, read(0), precision="highest") * scale
        of_heads = None if slopes is None else slopes.reshape(num_kv_heads, -1, 1)  # [K, G, 1]
        scores = biased(capped(scores, cap), of_heads, length - 1 - position, root=root)
        if sinks is None:
            weights, of_sinks = jax.nn.softmax(scores, axis=-1, where=seen), 0.0
        else:
            beside = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)  # [K, G, 1]
            both = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), beside], axis=-1)
            weights, of_sinks = jnp.split(jax.nn.softmax(both, axis=-1), (len(position),), -1)
        out = jnp.einsum("KGS,SKH->KGH", weights, read(1), precision="highest")
        if sink_values is not None:
            out += of_sinks * sink_values.astype(jnp.float32).reshape(out.shape)
        return jnp.where(length > 0, out.reshape(query.shape), 0.0).astype(q.dtype)

    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, q.shape[:2])
    return jax.lax.map(attend_row, (q, page_table, seq_lens, sinks, sink_values))
