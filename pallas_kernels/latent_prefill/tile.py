"""A tile of latent_prefill in Triton: consecutive tokens of a row, for one head.

``chunk_state`` is of expanded attention to the step's own tokens, ``context_state`` of absorbed
attention to what precedes them. Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.latent_decode.triton import load_keys, load_latents
from pallas_kernels.latent_prefill import launch
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib.attention_triton import slots_of
from pallas_kernels.lib.latent_pages import as_stored, pools_of
from pallas_kernels.lib.numerics import power_of_two


@triton.jit
def _softmax_step(scores, m_i, l_i, SCALE: tl.constexpr):
    """The new m_i and l_i, the factor alpha that rescales acc, and the block's p."""
    m_ij = tl.maximum(m_i, tl.max(scores, 1) * SCALE)
    alpha = tl.exp2(m_i - m_ij)
    p = tl.exp2(scores * SCALE - m_ij[:, None])
    return m_ij, l_i * alpha + tl.sum(p, 1), alpha, p


@triton.jit
def _attend_blocks(
    q_nope,  # [TOKENS, D]
    q_rope,  # [TOKENS, R]
    token,  # int32[TOKENS]: index of each query
    m_i,
    l_i,
    acc,  # float32[TOKENS, V]
    k_nope,  # [T, N, D], of one head
    k_rope,  # [T, C + R], of the rotated key
    v,  # [T, N, V], of one head
    start,
    end,
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # False: start to end are whole blocks that every query sees
):
    keys = tl.arange(0, BLOCK)
    nope = tl.arange(0, NOPE)
    rope = tl.arange(0, ROPE)
    value = tl.arange(0, VALUE)
    for first in range(start, end, BLOCK):
        key = first + keys
        at_key = key.to(tl.int64)[:, None]
        at_nope = k_nope + at_key * (NUM_HEADS * NOPE) + nope[None, :]
        at_rope = k_rope + at_key * ENTRY + rope[None, :]
        at_value = v + at_key * (NUM_HEADS * VALUE) + value[None, :]
        if MASKED:
            inside = (key < end)[:, None]
            k = tl.load(at_nope, mask=inside, other=0.0)
            kr = tl.load(at_rope, mask=inside, other=0.0)
        else:
            k = tl.load(at_nope)
            kr = tl.load(at_rope)
        scores = tl.dot(q_nope, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(kr), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= token[:, None], scores, float("-inf"))
        m_i, l_i, alpha, p = _softmax_step(scores, m_i, l_i, SCALE)  # type: ignore[misc]
        acc = acc * alpha[:, None]
        values = tl.load(at_value, mask=inside, other=0.0) if MASKED else tl.load(at_value)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def chunk_state(
    q,  # [T, N, D + R]
    k_nope,  # [T, N, D]
    entries,  # [T, C + R]
    v,  # [T, N, V]
    head,
    first,  # token of the tile
    row_start,
    row_end,
    is_row,  # False for padding, which attends to nothing
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """m_i, l_i and acc of a tile of one head's queries over the step's tokens of the same row."""
    token = first + tl.arange(0, TOKENS)
    inside = token < row_end
    at_query = q + (token.to(tl.int64) * NUM_HEADS + head)[:, None] * (NOPE + ROPE)
    nope = tl.arange(0, NOPE)
    rope = tl.arange(0, ROPE)
    q_nope = tl.load(at_query + nope[None, :], mask=inside[:, None], other=0.0)
    q_rope = tl.load(at_query + NOPE + rope[None, :], mask=inside[:, None], other=0.0)
    end = tl.where(is_row, tl.minimum(first + TOKENS, row_end), row_start)
    diagonal = tl.where(is_row, row_start + (first - row_start) // BLOCK * BLOCK, row_start)
    m_i = tl.full((TOKENS,), float("-inf"), tl.float32)
    l_i = tl.zeros((TOKENS,), tl.float32)
    acc = tl.zeros((TOKENS, VALUE), tl.float32)
    k_head = k_nope + head * NOPE
    v_head = v + head * VALUE
    k_rope = entries + RANK
    m_i, l_i, acc = _attend_blocks(
        q_nope, q_rope, token, m_i, l_i, acc, k_head, k_rope, v_head, row_start, diagonal,
        SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK + ROPE, BLOCK, False,
    )  # fmt: skip
    m_i, l_i, acc = _attend_blocks(
        q_nope, q_rope, token, m_i, l_i, acc, k_head, k_rope, v_head, diagonal, end,
        SCALE, NUM_HEADS, NOPE, ROPE, VALUE, RANK + ROPE, BLOCK, True,
    )  # fmt: skip
    return m_i, tl.where(is_row, l_i, 1.0), acc


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of an array [ROWS, 2 * WIDTH]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def _absorbed(
    at_query,  # pointers to queries [TOKENS, 1]
    at_up,  # pointers to a row of weights [1, WIDTH]
    inside,
    TOKENS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """Queries multiplied by columns of the weights that expand latents to keys."""
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, NOPE, STEP):  # in steps, since loads pass through registers
        nope = start + tl.arange(0, STEP)
        queries = tl.load(at_query + nope[None, :], mask=inside, other=0.0)
        total = tl.dot(
            queries, tl.load(at_up + nope[:, None] * RANK), total, input_precision="ieee"
        )
    return total.to(at_query.dtype.element_ty)


@triton.jit
def _expanded(
    total,  # float32[TOKENS, V]
    means,  # [TOKENS, WIDTH]
    at_up,  # pointers to the first half of the weights [WIDTH, V]
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``total`` plus the values of mean latents."""
    HALF: tl.constexpr = WIDTH // 2
    left, right = _halves(means, TOKENS, HALF)  # type: ignore[misc]
    total = tl.dot(left, tl.load(at_up), total, input_precision="ieee")
    return tl.dot(right, tl.load(at_up + HALF), total, input_precision="ieee")


@triton.jit
def context_state(
    q,  # [T, N, D + R]
    k_up,  # [N, D, C]
    v_up,  # [N, V, C]
    pages,  # [P, S, C + R]; SCALED: uint8[P, S, C]
    page_ids,  # int32[M] of the row
    scales,  # float32[P, S, G]; unused without SCALED
    rope_pages,  # [P, S, R]; unused without SCALED
    head,
    first,  # token of the tile
    row_end,
    lower,  # the first entry ...
    upper,  # ... and one past the last one; there is one at least
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The log-sum-exp, in base 2, and the mean value of entries before the step, for a tile of one
    head's queries: float32[TOKENS] and float32[TOKENS, V].
    """
    token = first + tl.arange(0, TOKENS)
    inside = (token < row_end)[:, None]
    at_query = q + (token * NUM_HEADS + head)[:, None] * (NOPE + ROPE)
    rope = tl.arange(0, ROPE)
    HALF: tl.constexpr = RANK // 2  # all of a latent at once would spill registers
    components = tl.arange(0, HALF)
    keys = tl.arange(0, BLOCK)
    q_rope = tl.load(at_query + NOPE + rope[None, :], mask=inside, other=0.0)
    at_up = k_up + head * NOPE * RANK + components[None, :]
    left_query = _absorbed(at_query, at_up, inside, TOKENS, NOPE, RANK, HALF, STEP)
    right_query = _absorbed(at_query, at_up + HALF, inside, TOKENS, NOPE, RANK, HALF, STEP)

    m_i = tl.full((TOKENS,), float("-inf"), tl.float32)
    l_i = tl.zeros((TOKENS,), tl.float32)
    left_acc = tl.zeros((TOKENS, HALF), tl.float32)
    right_acc = tl.zeros((TOKENS, HALF), tl.float32)
    for start in range(lower, upper, BLOCK):
        position = start + keys
        seen = position < upper
        slot = slots_of(page_ids, position, seen, PAGE_SIZE, True)
        there = seen[:, None]
        left = load_latents(
            pages, scales, slot, there, q_rope.dtype, 0, HALF, RANK, ROPE, GROUPS, SCALED, BLOCK
        )
        right = load_latents(
            pages, scales, slot, there, q_rope.dtype, HALF, HALF, RANK, ROPE, GROUPS, SCALED, BLOCK
        )
        k_rope = load_keys(pages, rope_pages, slot, rope, there, q_rope.dtype, RANK, ROPE, SCALED)
        scores = tl.dot(left_query, tl.trans(left), input_precision="ieee")
        scores = tl.dot(right_query, tl.trans(right), scores, input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_i, l_i, alpha, p = _softmax_step(scores, m_i, l_i, SCALE)  # type: ignore[misc]
        p = p.to(left.dtype)
        left_acc = tl.dot(p, left, left_acc * alpha[:, None], input_precision="ieee")
        right_acc = tl.dot(p, right, right_acc * alpha[:, None], input_precision="ieee")

    value = tl.arange(0, VALUE)
    left_acc = (left_acc / l_i[:, None]).to(q_rope.dtype)
    right_acc = (right_acc / l_i[:, None]).to(q_rope.dtype)
    at_up = v_up + (head * VALUE + value)[None, :] * RANK + tl.arange(0, HALF // 2)[:, None]
    values = tl.zeros((TOKENS, VALUE), tl.float32)
    values = _expanded(values, left_acc, at_up, TOKENS, HALF)
    values = _expanded(values, right_acc, at_up + HALF, TOKENS, HALF)
    return m_i + tl.log2(l_i), values


def chunk_operands(args: LatentPrefillArgs) -> tuple[jax.Array, ...]:
    """The step's own keys [T, N * D], entries [T, C + R] and values [T, N * V], as later chunks
    read them from the pages.
    """
    rank = args.k_up.shape[1]
    entries = as_stored(args.entries, pools_of(args))
    latents = entries[:, :rank].astype(args.q.dtype)
    # float32 as in the kernels, not rounded to tf32
    precision = "highest" if args.q.dtype == jnp.float32 else None
    k_nope, v = (jnp.matmul(latents, w.T, precision=precision) for w in (args.k_up, args.v_up))
    return k_nope, entries, v


def chunk_sizes(args: LatentPrefillArgs) -> dict[str, Any]:
    """The parameters of all kernels."""
    (t, n, _), rank = args.q.shape, args.k_up.shape[1]
    num_starts = args.query_start_loc.shape[0]
    return {
        "num_tokens": t,
        "num_starts": num_starts,
        "SCALE": args.scale * math.log2(math.e),
        "STARTS_TILE": max(launch.STARTS_TILE, power_of_two(num_starts)),
        "NUM_HEADS": n,
        "NOPE": args.k_up.shape[0] // n,
        "ROPE": args.entries.shape[1] - rank,
        "VALUE": args.v_up.shape[0] // n,
        "RANK": rank,
    }


def context_sizes(args: LatentPrefillArgs) -> dict[str, Any]:
    """The parameters of kernels that read pages."""
    return chunk_sizes(args) | {
        "table_width": args.page_table.shape[1],
        "GROUPS": 1 if args.scales is None else args.scales.shape[2],
        "SCALED": args.scales is not None,
        "PAGE_SIZE": args.pages.shape[1],
        "STEP": launch.MIN_TILE,
    }


def context_operands(args: LatentPrefillArgs) -> tuple[Any, ...]:
    """The arrays of kernels that read pages."""
    unused = (args.seq_lens,) * 2  # placeholders for arrays that the kernel does not read
    context = args.pages, args.page_table, args.seq_lens, args.query_start_loc
    return args.q, args.k_up, args.v_up, *context, *(pools_of(args)[1:] or unused)
