"""The wire layout between host and device."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.step import Bucket, PageGroup, Pages, ScheduledSeq, StepPlan
from jaxinfer.exec.step.batch import ALIGN, BatchLayout, GroupTable, copy_batch, fill, pack, unpack
from jaxinfer.exec.step.slots import init_slots
from jaxinfer.nn.context import Rows, Saves
from jaxinfer.nn.state import read_states, stored_states

SLOTS, PAGE_SIZE, MAX_PAGES, NUM_PAGES = 64, 16, 70, 4000
BUCKETS = (Bucket(1), Bucket(0, 64, 4), Bucket(3, 65, 5))


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_sections_are_aligned_and_do_not_overlap(bucket: Bucket) -> None:
    """A GPU's kernels read sections in place and refuse addresses that are not aligned."""
    layout = BatchLayout(
        bucket, (GroupTable(7, PageGroup()), GroupTable(70, PageGroup(9))), 4, PAGE_SIZE
    )
    numbered = np.arange(*layout.abstract().shape, dtype=np.int32)
    sections = layout.split(numbered)
    assert [section.size for section in sections] == list(layout.sizes())
    filled = [section for section in sections if section.size]
    assert all(section[0] % ALIGN == 0 for section in filled)
    assert all(first[-1] < second[0] for first, second in pairwise(filled))
    tables = layout.tables(sections.page_tables)
    assert [table[0, 0] % ALIGN for table in tables] == [0, 0]
    assert [table.shape[1] % ALIGN for table in tables] == [0, 0]  # so is any row of them
    assert sum(table.size for table in tables) == sections.page_tables.size


def _row(slot: int, computed: int, scheduled: int, decode: bool = False) -> ScheduledSeq:
    """A row that owns the last pages of the pool."""
    pages = range(NUM_PAGES - -(-(computed + scheduled) // PAGE_SIZE), NUM_PAGES)
    tokens = None if decode else np.arange(1, scheduled + 1, dtype=np.int32)
    return ScheduledSeq("r", 0, slot, computed, scheduled, (Pages(IntLog(pages)),), tokens)


@pytest.mark.parametrize(
    ("bucket", "decodes", "prefills"),
    [
        pytest.param(Bucket(0, 4096, 64), (), ((7, 0, 1024),), id="one_prompt_for_64"),
        pytest.param(Bucket(4, 64, 2), ((63, 1119, 1), (0, 0, 1)), ((1, 1103, 17),), id="mixed"),
        pytest.param(Bucket(0, 64, 2), (), ((5, 0, 1), (4, 3, 20)), id="padding_tokens_alone"),
        pytest.param(Bucket(1, 64, 1), ((2, 16, 1),), ((3, 1056, 64),), id="no_padding"),
        pytest.param(Bucket(2), (), (), id="only_padding"),
    ],
)
def test_every_index_of_a_batch_is_in_range(
    bucket: Bucket,
    decodes: tuple[tuple[int, int, int], ...],
    prefills: tuple[tuple[int, int, int], ...],
) -> None:
    layout = BatchLayout(bucket, (GroupTable(MAX_PAGES, PageGroup()),), SLOTS, PAGE_SIZE)
    rows = [_row(*row, decode=True) for row in decodes], [_row(*row) for row in prefills]
    plan = StepPlan(0, bucket, (), *map(tuple, rows))
    flat = pack(plan, layout)
    slots = init_slots(SLOTS, MAX_PAGES * PAGE_SIZE, jax.ShapeDtypeStruct((0,), jnp.float32))
    batch = unpack(jnp.asarray(flat), layout, slots)
    (attention,), batch_rows = batch.pages, batch.rows
    spans = [range(at, at + 1) for at in range(len(decodes))]
    ends = np.cumsum([bucket.num_decodes, *(count for *_, count in prefills)])
    spans += [range(*span) for span in pairwise(ends)]
    slots, positions = np.zeros(bucket.num_tokens, int), np.zeros(bucket.num_tokens, int)
    for span, row in zip(spans, plan.rows, strict=True):
        positions[span] = row.num_computed_tokens + np.arange(len(span))
        slots[span] = row.pages[0].ids.array()[positions[span] // PAGE_SIZE] * PAGE_SIZE
        slots[span] += positions[span] % PAGE_SIZE
    np.testing.assert_array_equal(attention.slot_mapping, slots)
    np.testing.assert_array_equal(batch.positions, positions)
    for indices, end in (
        (attention.page_table, NUM_PAGES),
        (batch_rows.slots, SLOTS + 1),
        (batch_rows.last_tokens, bucket.num_tokens),
        (batch_rows.query_start_loc, bucket.num_prefill_tokens + 1),
        (attention.seq_lens, MAX_PAGES * PAGE_SIZE + 1),
    ):
        assert np.all((np.asarray(indices) >= 0) & (np.asarray(indices) < end))
    taken = [*range(len(decodes)), *range(bucket.num_decodes, bucket.num_decodes + len(prefills))]
    last = np.asarray(batch_rows.last_tokens)[taken]
    assert last.tolist() == [span[-1] for span in spans]
    last_of_padding = np.delete(np.asarray(batch_rows.last_tokens), taken)
    assert not np.asarray(batch_rows.is_token)[last_of_padding].any()
    padding = np.delete(np.asarray(batch_rows.slots), taken)
    assert np.all(padding == SLOTS) and not np.delete(np.asarray(attention.seq_lens), taken).any()


@pytest.mark.parametrize("pages", [1, MAX_PAGES])
@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_a_filled_batch_has_prompts_as_long_as_fits(bucket: Bucket, pages: int) -> None:
    layout = BatchLayout(bucket, (GroupTable(pages, PageGroup()),), SLOTS, PAGE_SIZE)
    flat = pack(StepPlan(0, bucket, (), (), ()), layout)
    fill(flat, layout)
    slots = init_slots(SLOTS, MAX_PAGES * PAGE_SIZE, jax.ShapeDtypeStruct((0,), jnp.float32))
    batch = unpack(jnp.asarray(flat), layout, slots)
    d, most = bucket.num_decodes, pages * PAGE_SIZE * bucket.num_prefills
    assert batch.rows.is_token[d:].sum() == min(bucket.num_prefill_tokens, most)
    assert not batch.rows.is_token[:d].any()
    assert int(batch.pages[0].slot_mapping.max()) < PAGE_SIZE  # page 0
    assert int(batch.positions.max()) < pages * PAGE_SIZE
    assert np.all(np.asarray(batch.rows.slots) == SLOTS)


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_only_rows_of_an_engine_with_snapshots_have_state_rows(bucket: Bucket) -> None:
    groups = (GroupTable(MAX_PAGES, PageGroup()),)
    plain, own = (BatchLayout(bucket, groups, SLOTS, PAGE_SIZE, has) for has in (False, True))
    assert plain.sizes().state_rows == plain.sizes().kept_rows == 0
    assert own.sizes().state_rows + own.sizes().kept_rows > 0 and own.size > plain.size
    flat = jnp.asarray(pack(StepPlan(0, bucket, (), (), ()), plain))
    slots = init_slots(SLOTS, MAX_PAGES * PAGE_SIZE, jax.ShapeDtypeStruct((0,), jnp.float32))
    rows = unpack(flat, plain, slots).rows
    assert rows.reads is None and rows.saves is None and rows.keeps is None


def test_state_rows() -> None:
    """Two decode rows, a prompt that starts from a snapshot, one that saves two, and padding."""
    bucket, sink = Bucket(3, 64, 4), SLOTS
    layout = BatchLayout(bucket, (GroupTable(MAX_PAGES, PageGroup()),), SLOTS, PAGE_SIZE, True)
    second = replace(_row(8, 47, 1, decode=True), saves=((1, 2),))
    decodes = _row(9, 40, 1, decode=True), second
    prefills = replace(_row(7, 32, 5), reads=3), replace(_row(6, 0, 40), saves=((16, 4), (32, 0)))
    slots = init_slots(SLOTS, MAX_PAGES * PAGE_SIZE, jax.ShapeDtypeStruct((0,), jnp.float32))
    flat = pack(StepPlan(0, bucket, (), decodes, prefills), layout)
    rows = unpack(jnp.asarray(flat), layout, slots).rows
    assert rows.reads is not None and rows.saves is not None
    assert rows.reads.tolist() == [9, 8, sink, sink + 4, 6, sink, sink]
    assert rows.slots.tolist() == [9, 8, sink, 7, 6, sink, sink]
    assert rows.keeps is not None and rows.keeps.tolist() == [9, sink + 1 + 2, sink]
    assert rows.saves.num_tokens.tolist() == [[0, 0], [16, 32], [0, 0], [0, 0]]
    rest = [[sink, sink]]
    assert rows.saves.state_rows.tolist() == [*rest, [sink + 5, sink + 1], *rest, *rest]
    # the second prompt's tokens begin at 3 + 5
    assert rows.saves.last_tokens(rows)[1].tolist() == [8 + 15, 8 + 31]
    in_range = (rows.saves.last_tokens(rows) >= 0) & (rows.saves.last_tokens(rows) < 67)
    assert bool(in_range.all())


def test_states_are_read_and_stored_by_row() -> None:
    """A row at position 0 starts with zeros; rows of padding write the sink alone."""
    nothing = jnp.zeros(0, jnp.int32)
    array = jnp.arange(10.0)[:, None] * jnp.ones((1, 2))  # 4 slots, the sink, 5 snapshots
    saves = Saves(jnp.asarray([[2, 3], [0, 0]]), jnp.asarray([[5, 9], [4, 4]]))
    rows = Rows(
        *(nothing, nothing),
        slots=jnp.asarray([1, 0, 4]),
        begins=jnp.asarray([7, 0, 0]),
        last_tokens=nothing,
        query_start_loc=nothing,
    )
    assert read_states(array, rows)[:, 0].tolist() == [1, 0, 0]
    assert read_states(array, rows._replace(reads=jnp.asarray([8, 0, 4])))[:, 0].tolist() == [
        8,
        0,
        0,
    ]
    last = jnp.asarray([[-1.0, -1], [-2, -2], [-3, -3]])
    assert stored_states(array, rows, last)[:, 0].tolist() == [-2, -1, 2, 3, -3, *range(5, 10)]
    saved = -jnp.arange(10.0, 18.0).reshape(2, 2, 2)
    stored = stored_states(array, rows._replace(saves=saves), last, saved)
    assert stored[jnp.asarray([0, 1, 2, 3, 5, 6, 7, 8, 9]), 0].tolist() == [
        *(-2, -1, 2, 3, -10, 6, 7, 8, -12)
    ]


def test_copied_in_has_the_same_sections() -> None:
    layout = BatchLayout(Bucket(2, 64, 2), (GroupTable(MAX_PAGES, PageGroup()),), SLOTS, PAGE_SIZE)
    flat = np.arange(layout.abstract().size, dtype=np.int32)
    for original, copied in zip(
        layout.split(flat), layout.split(jax.jit(copy_batch)(jnp.asarray(flat))), strict=True
    ):
        np.testing.assert_array_equal(original, copied)


def test_an_entry_for_several_tokens_is_written_by_the_last_of_them() -> None:
    layout = BatchLayout(Bucket(0, 16, 1), (GroupTable(8, PageGroup(None, 4)),), SLOTS, PAGE_SIZE)
    tokens = np.arange(9, dtype=np.int32)
    row = ScheduledSeq("r", 0, 1, 5, 9, (Pages(IntLog((3,))),), tokens)  # positions 5 to 13
    slots = init_slots(SLOTS, 512, jax.ShapeDtypeStruct((0,), jnp.float32))
    (pages,) = unpack(
        jnp.asarray(pack(StepPlan(0, layout.bucket, (), (), (row,)), layout)), layout, slots
    ).pages
    at = 3 * PAGE_SIZE
    assert pages.slot_mapping.tolist() == [0, 0, at + 1, 0, 0, 0, at + 2, *[0] * 9]
    assert pages.seq_lens.tolist() == [3]
