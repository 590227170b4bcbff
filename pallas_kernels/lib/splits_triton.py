"""Splits of a context in Triton: their states, and the merge by the CTA that arrives last.

Each CTA attends to the keys of one split and stores its state: the largest score ``m_i``, the sum
``l_i`` of exp2(score - m_i), and ``acc``, the sum of exp2(score - m_i) * value (Flash-Decoding: Dao
et al., 2023). The states of the splits that are merged are adjacent: ``accs`` is float32[splits,
rows, width] and ``m_l`` float32[splits, 2, rows], where a row is a query of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def splits_of(
    tiles,  # of a row
    keys,  # that its tiles see
    SPLITS: tl.constexpr,  # of a tile at most
    CTAS: tl.constexpr,  # that the splits are for
    MIN_KEYS: tl.constexpr,  # of a split at least, if there are as many
):
    """The splits of each tile of a row; a tile that sees fewer keys may use fewer."""
    splits = tl.minimum(CTAS // tl.maximum(tiles, 1), SPLITS)
    return tl.maximum(tl.minimum(splits, tl.cdiv(keys, MIN_KEYS)), 1)


@triton.jit
def item_of(
    item,
    rows,  # int32[STARTS_TILE]: 0, 1, 2 and so on
    items,  # int32[STARTS_TILE]: of each row
):
    """The row of an item, and its index among the items of the row."""
    row = tl.sum((tl.cumsum(items, 0) <= item).to(tl.int32), 0)
    return row, item - tl.sum(tl.where(rows < row, items, 0), 0)


@triton.jit
def entries_of_split(
    keys,  # that a tile sees
    splits,
    BLOCK: tl.constexpr,
):
    """The keys of each split, whole blocks, and the number of splits that have any; at least 1."""
    per_split = tl.cdiv(tl.cdiv(keys, splits), BLOCK) * BLOCK
    return per_split, tl.maximum(tl.cdiv(keys, tl.maximum(per_split, 1)), 1)


@triton.jit
def store_state(
    accs,  # float32[splits, rows, width]
    m_l,  # float32[splits, 2, rows]: m_i, l_i
    split,
    row,  # int32[ROWS]
    column,  # int32[COLUMNS]
    in_rows,  # mask of rows
    inside,  # mask of rows and columns
    m_i,  # float32[ROWS]
    l_i,  # float32[ROWS]
    acc,  # float32[ROWS, COLUMNS]
    rows,
    width,
):
    """Store the state of one split."""
    at_m = m_l + split * 2 * rows + row
    tl.store(at_m, m_i, mask=in_rows)
    tl.store(at_m + rows, l_i, mask=in_rows)
    at_acc = accs + split * rows * width
    tl.store(at_acc + row[:, None] * width + column[None, :], acc, mask=inside)


@triton.jit
def arrives_last(
    arrivals,  # int32[1], which is 0 before the first CTA arrives and after the last one has
    used,  # CTAs that arrive
):
    """True in the CTA that arrives last, which may read the states of all."""
    tl.debug_barrier()  # all stores of the CTA come before the arrival, which releases them
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel") == used - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def merged(
    accs,  # float32[splits, rows, width]
    m_l,  # float32[splits, 2, rows]: m_i, l_i
    used,  # splits that have states
    row,  # int32[ROWS]
    column,  # int32[COLUMNS]
    in_rows,  # mask of rows
    inside,  # mask of rows and columns
    rows,
    width,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,  # splits that are in flight at the same time
):
    """The outputs [ROWS, COLUMNS] of all splits, merged in the order of the splits.

    They are read split by split: so many components of all splits of a row, as a wide head has in
    flight, would not leave registers for those of the next row.
    """
    # ".cg" bypasses L1, which is not coherent with the writes of other SMs
    splits = tl.arange(0, SPLITS)
    valid = (splits < used)[:, None] & in_rows[None, :]
    at_m = m_l + splits[:, None] * 2 * rows + row[None, :]
    m_i = tl.load(at_m, mask=valid, other=float("-inf"), cache_modifier=".cg")
    l_i = tl.load(at_m + rows, mask=valid, other=0.0, cache_modifier=".cg")
    m_max = tl.where(in_rows, tl.max(m_i, 0), 0.0)
    l_sum = tl.where(in_rows, tl.sum(l_i * tl.exp2(m_i - m_max[None, :]), 0), 1.0)
    acc_sum = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, used, UNROLL):
        for i in tl.static_range(UNROLL):  # type: ignore[attr-defined]
            split = first + i
            is_used = split < used
            at_own = m_l + split * 2 * rows + row
            m = tl.load(at_own, mask=in_rows & is_used, other=float("-inf"), cache_modifier=".cg")
            at_acc = accs + (split * rows + row)[:, None] * width + column[None, :]
            acc = tl.load(at_acc, mask=inside & is_used, other=0.0, cache_modifier=".cg")
            acc_sum += acc * tl.exp2(m - m_max)[:, None]
    return acc_sum / l_sum[:, None]
