"""Attention in Triton: the steps that kernels of prompts and of decode rows share.

Softmax is computed in base 2. ``m_i`` is the largest score so far times log2(e), ``l_i`` the sum of
exp2(score - m_i), ``acc`` that of exp2(score - m_i) * value, all in float32 (FlashAttention-2: Dao,
2023, arXiv:2307.08691).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """c tanh(scores / c) with c = CAP."""
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 * LOG2_E / CAP)) + 1.0)


@triton.jit
def finite(m_i):
    """0 where no key has been seen: -inf - -inf would be NaN."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def first_state(
    sinks,  # [N]; unused without HAS_SINKS
    head,  # int32[ROWS]: query heads
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """m_i and l_i before any key."""
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        m_i = tl.load(sinks + head).to(tl.float32) * LOG2_E
        l_i += 1.0
    return m_i, l_i


@triton.jit
def result_of(l_i, acc):
    """Attention's output; 0 for padding, whose l_i is 0."""
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]


@triton.jit
def with_state(m_i, l_i, acc, m_ij, l_ij, acc_ij):
    """The state of two sets of keys, of which one may be empty.

    ``fma`` is written, since a compiler that chose it itself might do so in one kernel alone.
    """
    m_new = tl.maximum(m_i, m_ij)
    base = finite(m_new)
    alpha = tl.exp2(m_i - base)
    beta = tl.exp2(m_ij - base)
    l_new = tl.fma(l_i, alpha, l_ij * beta)
    acc_new = tl.fma(acc, alpha[:, None], acc_ij * beta[:, None])
    return m_new, l_new, acc_new


@triton.jit
def slots_of(
    page_ids,  # int32[M] of the row
    position,  # int32[BLOCK]
    written,  # mask of positions; unused without MASKED
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where positions of a row are in the pools: int64[BLOCK], as offsets exceed int32."""
    if MASKED:
        page = tl.load(page_ids + position // PAGE_SIZE, mask=written, other=0)
    else:
        page = tl.load(page_ids + position // PAGE_SIZE)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def is_visible(
    position,  # int32[BLOCK]: of keys
    last_key,  # int32[ROWS]: position of the last visible key of each query
    WINDOW: tl.constexpr,  # 0: no window
):
    """bool[ROWS, BLOCK]: which query sees which key."""
    visible = position[None, :] <= last_key[:, None]
    if WINDOW > 0:
        visible = visible & (position[None, :] > last_key[:, None] - WINDOW)
    return visible
