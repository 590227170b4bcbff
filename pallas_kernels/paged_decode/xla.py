"""paged_decode in plain XLA: blocks of keys under an online softmax, for every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

KEYS_PER_BLOCK = 256  # fixed, so that a row's bits depend on nothing but the row


def paged_decode(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:  # [B, N, H]
    """See ``paged_decode.api``."""
    b, n, h = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    block_pages = max(1, KEYS_PER_BLOCK // page_size)
    block = block_pages * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    grouped = (q.astype(jnp.float32) * scale).reshape(b, num_kv_heads, -1, h)  # [B, K, G, H]
    first = 0 if window is None else jnp.min(jnp.maximum(seq_lens - window, 0)) // block
    last = -(-jnp.max(seq_lens) // block)

    def body(i, carry):
        top, total, acc = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * block_pages, block_pages, axis=1)
        position = i * block + jnp.arange(block)
        visible = position < seq_lens[:, None]  # [B, block]
        if window is not None:
            visible &= position >= seq_lens[:, None] - window
        k = k_pages.at[pages].get(mode="clip").reshape(b, block, num_kv_heads, h)
        v = v_pages.at[pages].get(mode="clip").reshape(b, block, num_kv_heads, h)
        scores = jnp.einsum("BKGH,BSKH->BKGS", grouped, k.astype(jnp.float32))
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        # Rows that have seen nothing keep -inf; subtract 0 there, since -inf - -inf is NaN.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(top - base)
        # A weight of 0 does not silence NaN in a slot nobody wrote: clear the values as well.
        v = jnp.where(visible[:, :, None, None], v.astype(jnp.float32), 0.0)
        mixed = jnp.einsum("BKGS,BSKH->BKGH", weights, v)
        total = total * decay + jnp.sum(weights, axis=-1)
        return new_top, total, acc * decay[..., None] + mixed

    shape = grouped.shape[:3]
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(grouped.shape))
    _, total, acc = jax.lax.fori_loop(first, last, body, start)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.reshape(b, n, h).astype(q.dtype)
