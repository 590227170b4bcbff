"""delta_prefill in plain XLA: chunks of 64 tokens in parallel, then a scan over their states.

With c the sum of log decays from a chunk's begin, the changes u of the state by the tokens of a
chunk solve (1 + A) u = beta (v - exp(c) k S), where A[i, j] = beta[i] exp(c[i] - c[j]) k[i].k[j]
for j < i. The inverse needs no state, so only products with the state S are in the scan. (Yang et
al. 2024, arXiv:2412.06464, section 3.3.) Differentiable.

If each component d of keys decays by itself, the terms of k[i].k[j] have the factors exp(c[i, d] -
c[j, d]), and exp(-c[j]) alone overflows. So the chunk is halved again and again: between the first
half of a block of tokens and its second one the decay is that to the border, times that from it,
and neither is above 1 (``_by_channel``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.lib.chunk_scan import (
    CHUNK,
    Advance,
    Chunks,
    by_token,
    chunks_of,
    scan_chunks,
)


def workspace_bytes(args: DeltaPrefillArgs) -> int:
    """A bound on the memory that a call allocates: the matrices of all chunks, in float32; the
    states are updated in place.
    """
    chunks = args.q.shape[0] // CHUNK + args.begins.shape[0]
    return 4 * chunks * args.v.shape[1] * CHUNK * _of_token(args)


def _of_token(args: DeltaPrefillArgs) -> int:
    """Elements of a token and head: of each chunk some 6 matrices of chunk by chunk, 8 of keys
    (with their own decays 20) and 4 of values.
    """
    keys = 20 if args.by_channel else 8
    return 6 * CHUNK + keys * args.k.shape[2] + 4 * args.v.shape[2]


def chunk_workspace_bytes(args: DeltaPrefillArgs) -> int:
    """The same of ``used_chunks``: of one chunk, and the outputs of all in float32, twice."""
    _, heads, value_dim = args.v.shape
    chunks = args.q.shape[0] // CHUNK + args.begins.shape[0]
    return 4 * heads * CHUNK * (_of_token(args) + 2 * chunks * value_dim)


@jax.jit  # one trace serves every layer
def delta_prefill(args: DeltaPrefillArgs) -> tuple[jax.Array, jax.Array]:  # [T, V, Dv], the states
    """See ``delta_prefill.api``; what needs no state is computed for all chunks at once."""
    chunks = chunks_of(args.query_start_loc, len(args.q))
    return _scanned(args, chunks, _advance, _factors(args, chunks.tokens, chunks.is_token))


@jax.jit
def used_chunks(args: DeltaPrefillArgs) -> tuple[jax.Array, jax.Array]:
    """``delta_prefill`` for a CPU: one chunk at a time, and only if it has tokens. In a step with
    one prompt most have none.
    """
    chunks = chunks_of(args.query_start_loc, len(args.q))
    advance = partial(_advance_if_used, args)
    return _scanned(args, chunks, advance, (chunks.tokens, chunks.is_token))


def _scanned(
    args: DeltaPrefillArgs, chunks: Chunks, advance: Advance, each: Any
) -> tuple[jax.Array, jax.Array]:
    """The outputs of tokens, and the states."""
    out, states = scan_chunks(args, args.states, chunks, advance, each)
    return by_token(out, args.query_start_loc, chunks, len(args.q)).astype(args.v.dtype), states


class Factors(NamedTuple):
    """The arrays of N chunks that need no state, in float32."""

    values: jax.Array  # [N, V, CHUNK, Dv]: the changes of a state of zeros
    keys: jax.Array  # [N, V, CHUNK, Dk]: these times the state are subtracted from the changes
    queries: jax.Array  # [N, V, CHUNK, Dk]: these times the state are added to the outputs
    within: jax.Array  # [N, V, CHUNK, CHUNK]: and these times the changes
    ends_k: jax.Array  # [N, V, Dk, CHUNK]: these times the changes are added to the state
    decayed: jax.Array  # [N, V, 1 or Dk]: the decay of the state


def _factors(
    args: DeltaPrefillArgs,
    tokens: jax.Array,  # int32[N, CHUNK]
    is_token: jax.Array,  # bool[N, CHUNK]
) -> Factors:
    """The factors of chunks with these tokens."""
    key_heads, heads = args.q.shape[1], args.v.shape[1]

    def chunked(x: jax.Array) -> jax.Array:  # [T, H, ...] -> float32[N, H, CHUNK, ...]
        shape = (*is_token.shape, *(1,) * (x.ndim - 1))
        found = jnp.where(is_token.reshape(shape), x[tokens], 0)
        return jnp.moveaxis(found.astype(jnp.float32), 2, 1)

    def by_value_head(x: jax.Array) -> jax.Array:  # [N, K, ...] -> [N, V, ...]
        return jnp.repeat(x, heads // key_heads, axis=1)

    q, k, v = chunked(args.q), chunked(args.k), chunked(args.v)
    decay, beta = chunked(args.log_decay), chunked(args.beta)[..., None]
    if args.by_channel:
        q, k = by_value_head(q), by_value_head(k)
        found = _by_channel(q, k, decay)
    else:
        found = _by_head(q, k, decay, by_value_head)
        q, k = by_value_head(q), by_value_head(k)
    at = jnp.arange(CHUNK)
    inverse = unit_inverse(jnp.where(at[:, None] > at, found.of_keys * beta, 0))
    return Factors(
        values=_product("NHij,NHjd->NHid", inverse, beta * v),
        keys=_product("NHij,NHjd->NHid", inverse, beta * found.since * k),
        queries=q * found.since,
        within=found.of_queries,
        ends_k=(k * found.until).swapaxes(2, 3),
        decayed=found.since[..., -1, :],
    )


class _Decayed(NamedTuple):
    """The decays of chunks, and with these the products of their tokens i with earlier ones j."""

    of_keys: jax.Array  # [N, V, CHUNK, CHUNK]: k[i].k[j]
    of_queries: jax.Array  # [N, V, CHUNK, CHUNK]: q[i].k[j], or i = j; 0 if j is later
    since: jax.Array  # [N, V, CHUNK, 1 or Dk]: the decay of the state before the chunk
    until: jax.Array  # [N, V, CHUNK, 1 or Dk]: of a token, to the end of the chunk


def _by_head(
    q: jax.Array,  # [N, K, CHUNK, Dk]
    k: jax.Array,  # [N, K, CHUNK, Dk]
    log_decay: jax.Array,  # [N, V, CHUNK]
    by_value_head: Callable[[jax.Array], jax.Array],
) -> _Decayed:
    """One decay for all components."""
    decay, at = jnp.cumsum(log_decay, axis=-1), jnp.arange(CHUNK)
    # masked before exp: a difference above the diagonal is positive and may overflow
    seen = at[:, None] >= at[None]
    between = jnp.exp(jnp.where(seen, decay[..., :, None] - decay[..., None, :], -jnp.inf))
    return _Decayed(
        of_keys=by_value_head(_product("NHid,NHjd->NHij", k, k)) * between,
        of_queries=by_value_head(_product("NHid,NHjd->NHij", q, k)) * between,
        since=jnp.exp(decay)[..., None],
        until=jnp.exp(decay[..., -1:] - decay)[..., None],
    )


def _by_channel(
    q: jax.Array,  # [N, V, CHUNK, Dk]
    k: jax.Array,  # [N, V, CHUNK, Dk]
    log_decay: jax.Array,  # [N, V, CHUNK, Dk]
) -> _Decayed:
    """A decay of each component.

    From blocks of one token to the whole chunk, two adjacent blocks of ``size`` tokens are joined:
    the products within each are known, and those of the second one's tokens with the first one's
    have the decays from the border and to it. These are sums within a block, which lose nothing
    where a strong decay comes before.
    """
    size, outer = 1, k.shape[:2]

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [N, V, B, ...] -> B / 2 each
        pairs = x.reshape(*outer, -1, 2, *x.shape[3:])
        return pairs[:, :, :, 0], pairs[:, :, :, 1]

    def tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [N, V, B / 2, size, Dk] each
        return halves(x.reshape(*outer, -1, size, x.shape[-1]))

    # log decays from a block's begin, with the token's own, and from the token to the block's end
    since = log_decay[:, :, :, None]  # [N, V, B, size, Dk]
    until = jnp.zeros_like(since)
    of_keys = jnp.zeros((*outer, CHUNK, 1, 1), k.dtype)  # [N, V, B, size, size]
    of_queries = jnp.sum(q * k, axis=-1)[..., None, None]
    while size < CHUNK:
        first, second = halves(since)
        to_border, to_end = halves(until)
        earlier = tokens(k)[0] * jnp.exp(to_border)
        later_k, later_q = (tokens(x)[1] * jnp.exp(second) for x in (k, q))
        of_keys = _joined(*halves(of_keys), _between(later_k, earlier))
        of_queries = _joined(*halves(of_queries), _between(later_q, earlier))
        since = jnp.concatenate((first, second + first[..., -1:, :]), axis=3)
        until = jnp.concatenate((to_border + second[..., -1:, :], to_end), axis=3)
        size *= 2
    return _Decayed(
        of_keys[:, :, 0], of_queries[:, :, 0], jnp.exp(since[:, :, 0]), jnp.exp(until[:, :, 0])
    )


def _between(later: jax.Array, earlier: jax.Array) -> jax.Array:
    """Products of the tokens of blocks [..., S, Dk] each -> [..., S, S]; XLA has no fast form of
    many small ones.
    """
    if later.shape[-2] < 8:
        return jnp.sum(later[..., :, None, :] * earlier[..., None, :, :], axis=-1)
    return _product("...id,...jd->...ij", later, earlier)


def _joined(first: jax.Array, second: jax.Array, below: jax.Array) -> jax.Array:
    """Blocks [..., S, S] on the diagonal and below it -> [..., 2S, 2S]."""
    upper = jnp.concatenate((first, jnp.zeros_like(below)), axis=-1)
    return jnp.concatenate((upper, jnp.concatenate((below, second), axis=-1)), axis=-2)


def _advance(state: jax.Array, one: Factors) -> tuple[jax.Array, jax.Array]:
    """See ``Advance``, for the factors of one chunk."""
    changes = one.values - _product("Hik,Hkd->Hid", one.keys, state)
    out = _product("Hik,Hkd->Hid", one.queries, state)
    out += _product("Hij,Hjd->Hid", one.within, changes)
    decayed = state * one.decayed[..., None]
    return decayed + _product("Hki,Hid->Hkd", one.ends_k, changes), out


def _advance_if_used(
    args: DeltaPrefillArgs,
    state: jax.Array,
    chunk: tuple[jax.Array, jax.Array],  # int32[CHUNK], bool[CHUNK]
) -> tuple[jax.Array, jax.Array]:
    """See ``Advance``; outputs of a chunk without tokens are zeros."""

    def used(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, is_token = chunk
        factors = _factors(args, tokens[None], is_token[None])
        return _advance(state, jax.tree.map(lambda x: x[0], factors))

    def unused(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads, _, value_dim = state.shape
        return state, jnp.zeros((heads, CHUNK, value_dim), jnp.float32)

    return jax.lax.cond(jnp.any(chunk[1]), used, unused, state)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest")


def unit_inverse(lower: jax.Array) -> jax.Array:  # float32[..., CHUNK, CHUNK] -> the same
    """The inverse of 1 + ``lower``, which is strictly lower triangular.

    The inverses of blocks on the diagonal give those of blocks of twice the size. A power series
    would need fewer products, but its terms grow to 1e17 where a token is repeated.
    """
    at = jnp.arange(CHUNK)
    inverse = jnp.eye(CHUNK, dtype=lower.dtype)
    size = 1
    while size < CHUNK:
        pairs = at // (2 * size)
        corner = (pairs[:, None] == pairs) & (at[:, None] // size > at // size)
        below = jnp.where(corner, lower, 0)
        if size == 1:
            inverse = inverse - below
        else:
            inverse -= _product(
                "...ij,...jk->...ik", _product("...ij,...jk->...ik", inverse, below), inverse
            )
        size *= 2
    return inverse
