"""The wire layout of a step: packs a plan into one flat int32 array, and unpacks it on the device.

The host sends page tables, lengths, prompt tokens and their requests' settings in a single
transfer; the device derives positions and page slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import cdiv, round_up
from jaxinfer.core.step import TAPS, Bucket, PageGroup, StepPlan
from jaxinfer.exec.step.slots import NUM_SETTINGS, SlotState
from jaxinfer.exec.step.state_rows import NUM_STATE_ROWS, pack_state_rows, with_state_rows
from jaxinfer.nn.context import Pages, Rows

# int32 values, 256 bytes: XLA passes the address of a section to a kernel, and kernels are compiled
# for addresses that are multiples of 16 bytes (Triton) or 256 (Mosaic); others are an
# INVALID_ARGUMENT. Rows of page tables are padded too, as a kernel may get a part of them. Where it
# gets the rows of prompts, those before them are a multiple of ``compile.buckets.GPU_ROWS``.
ALIGN = 64
NO_PLACE = (0, 0, 0)  # tokens are not published, masks not read: see ``pallas_kernels.publish``
MASK_PLACE = slice(ALIGN, ALIGN + len(NO_PLACE))  # ``Fields.mask_place``, the second section
PEERS = 2 * ALIGN  # where ``Fields.peers`` begins, the third section, of at most ``ALIGN``
MASKED = 2  # in ``Fields.samples``
NO_SETTINGS = np.zeros((0, NUM_SETTINGS), np.int32)
PADDING = 2**23 // 4  # int32 values, 8 MiB: see ``copy_batch``


class Draws(NamedTuple):
    """The N draws of a step: after each token of a decode row, after the last of a prefill row."""

    tokens: jax.Array  # int32[N]: index, in the step, of the token after which it draws
    slots: jax.Array  # int32[N]
    lens: jax.Array  # int32[N]: tokens before the drawn one in its sequence


class Drafts(NamedTuple):
    """Proposed tokens of decode rows, after each row's first token."""

    token_ids: jax.Array  # int32[D, Q - 1]
    limits: jax.Array  # int32[D]: the largest number of them that the row may accept


class DeviceBatch(NamedTuple):
    """The input of one step; padding rows read and write the last slot and page 0."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]
    seq_lens: jax.Array  # int32[B]: context length with this step's tokens; 0 for padding
    rows: Rows
    pages: tuple[Pages, ...]  # of each group
    draws: Draws
    drafts: Drafts | None  # None if decode rows have one token
    settings: jax.Array  # int32[R, NUM_SETTINGS] of the prefill rows
    samples: jax.Array  # bool[B]: whether a token is drawn after the row's last one
    masked: jax.Array  # bool[B]: whether that token waits for a mask
    place: jax.Array  # int32[3]: address and number for ``publish``
    mask_place: jax.Array  # int32[3]: address and number for ``pallas_kernels.mask``
    peers: jax.Array  # int32[2 * N]: see ``Fields``
    steered: jax.Array | None  # bool[B]; None if the bucket does not tap


class Fields[A](NamedTuple):
    """The sections of the flat array, in order: as sizes, numpy views or device arrays."""

    place: A  # [3]: address and number for ``publish``
    mask_place: A  # [3]: address and number for ``pallas_kernels.mask``
    peers: A  # [2 * N]: addresses of the devices' exchange memory, if they have some
    seq_slots: A  # [B]
    seq_lens: A  # [B]
    samples: A  # [B]: whether a token is drawn; ``MASKED`` if it waits for a mask
    settings: A  # [R * NUM_SETTINGS]
    query_start_loc: A  # [R + 1]
    token_ids: A  # [Tp]
    query_lens: A  # [D]: tokens of each decode row; empty if they have one
    steered: A  # [B]: whether the row is steered; empty if the bucket does not tap
    state_rows: A  # [R * NUM_STATE_ROWS]: see ``state_rows``; empty without snapshots
    kept_rows: A  # [D]: where states of decode rows are saved, likewise
    first_pages: A  # [B] for each group with a window: the number of the first page in its table
    page_tables: A  # [B * M] for each group


class GroupTable(NamedTuple):
    """The page table of one group of layers."""

    max_pages: int  # pages of a row
    group: PageGroup

    @property
    def width(self) -> int:
        """M: columns, padding included."""
        return round_up(self.max_pages, ALIGN)


@dataclass(frozen=True)
class BatchLayout:
    """The wire layout of one bucket."""

    bucket: Bucket
    groups: tuple[GroupTable, ...]
    sink_slot: int
    page_size: int
    has_snapshots: bool = False  # of layer state: rows may start from them and save them
    num_peers: int = 0  # N: devices with exchange memory (``pallas_kernels.all_reduce``)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The indices of the groups with a window."""
        return tuple(i for i, own in enumerate(self.groups) if own.group.window is not None)

    @classmethod
    def of(cls, bucket: Bucket, limits: Limits, num_peers: int = 0) -> BatchLayout:
        """The layout of a bucket in an engine with these limits."""
        # drafts may be beyond the end of the context; they are written to page 0
        drafts = bucket.query_tokens - 1
        groups = (
            GroupTable(
                limits.most_pages(group) + cdiv(drafts, limits.tokens_per_page(group)), group
            )
            for group in limits.groups
        )
        has_snapshots = limits.num_snapshots > 0
        sizes = limits.max_num_seqs, limits.page_size
        return cls(bucket, tuple(groups), *sizes, has_snapshots, num_peers)

    def sizes(self) -> Fields[int]:
        """The length of each section."""
        b, tp = self.bucket.num_seqs, self.bucket.num_prefill_tokens
        return Fields(
            place=len(NO_PLACE),
            mask_place=len(NO_PLACE),
            peers=2 * self.num_peers,
            seq_slots=b,
            seq_lens=b,
            samples=b,
            settings=self.bucket.num_prefills * NUM_SETTINGS,
            query_start_loc=self.bucket.num_prefills + 1,
            token_ids=tp,
            query_lens=self.bucket.num_decodes if self.bucket.query_tokens > 1 else 0,
            steered=b if TAPS in self.bucket.variants else 0,
            state_rows=self.bucket.num_prefills * NUM_STATE_ROWS if self.has_snapshots else 0,
            kept_rows=self.bucket.num_decodes if self.has_snapshots else 0,
            first_pages=b * len(self.windowed),
            page_tables=b * sum(own.width for own in self.groups),
        )

    @cached_property
    def size(self) -> int:
        """The length of the flat array."""
        return round_up(self._sections[-1].stop, ALIGN)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the flat array."""
        return jax.ShapeDtypeStruct((self.size,), jnp.int32)

    def split[A: (np.ndarray, jax.Array)](self, flat: A) -> Fields[A]:
        """The sections of a flat array; they are views of a numpy array."""
        return Fields(*[flat[section] for section in self._sections])

    def tables[A: (np.ndarray, jax.Array)](self, page_tables: A) -> list[A]:
        """The page table [B, M] of each group."""
        return [page_tables[span].reshape(shape) for span, shape in self._tables]

    @cached_property
    def _tables(self) -> tuple[tuple[slice, tuple[int, int]], ...]:
        """Where each group's table is in the section ``page_tables``, and its shape."""
        shapes = [(self.bucket.num_seqs, own.width) for own in self.groups]
        starts = accumulate((b * width for b, width in shapes), initial=0)
        return tuple(
            (slice(start, start + b * width), (b, width))
            for start, (b, width) in zip(starts, shapes, strict=False)
        )

    @cached_property
    def _sections(self) -> tuple[slice, ...]:
        starts = accumulate((round_up(size, ALIGN) for size in self.sizes()), initial=0)
        pairs = zip(starts, self.sizes(), strict=False)  # the last start is the end
        return tuple(slice(start, start + size) for start, size in pairs)


def pack(
    plan: StepPlan,
    layout: BatchLayout,
    settings: np.ndarray = NO_SETTINGS,  # int32[len(plan.prefills), NUM_SETTINGS]
    steered: Sequence[bool] = (),  # of each row, if the bucket taps
    masked: Sequence[int] = (),  # indices of rows that wait for masks
) -> np.ndarray:  # int32[...]
    """The flat array of a plan, without places. Host time is per row and page, not per token."""
    flat = np.zeros(layout.size, np.int32)
    wire, bucket = layout.split(flat), layout.bucket
    wire.seq_slots[:] = layout.sink_slot
    tables = layout.tables(wire.page_tables)
    if bucket.query_tokens > 1:
        wire.query_lens[: len(plan.decodes)] = [row.num_scheduled_tokens for row in plan.decodes]
    for first, rows in ((0, plan.decodes), (bucket.num_decodes, plan.prefills)):
        if not rows:
            continue
        span = slice(first, first + len(rows))
        wire.seq_slots[span] = [row.slot for row in rows]
        wire.seq_lens[span] = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        wire.samples[span] = [row.samples for row in rows]
        for number, group in enumerate(layout.windowed):
            begin = number * bucket.num_seqs + first
            wire.first_pages[begin : begin + len(rows)] = [row.pages[group].first for row in rows]
        for group, table in enumerate(tables):
            for index, row in enumerate(rows, first):
                ids = row.pages[group].ids.array()
                table[index, : len(ids)] = ids
    if masked:
        first_prefill, added = len(plan.decodes), bucket.num_decodes - len(plan.decodes)
        wire.samples[[i + added * (i >= first_prefill) for i in masked]] = MASKED
    if settings.size:
        wire.settings[: settings.size] = settings.ravel()
    if TAPS in bucket.variants:
        wire.steered[: len(plan.decodes)] = steered[: len(plan.decodes)]
        prefills = steered[len(plan.decodes) :]
        wire.steered[bucket.num_decodes : bucket.num_decodes + len(prefills)] = prefills
    if layout.has_snapshots:
        pack_state_rows(wire.state_rows, wire.kept_rows, plan, layout.sink_slot)
    start = 0
    for index, row in enumerate(plan.prefills):
        end = start + row.num_scheduled_tokens
        wire.token_ids[start:end] = row.token_ids
        wire.query_start_loc[index + 1 :] = end
        start = end
    return flat


def fill(flat: np.ndarray, layout: BatchLayout) -> None:  # int32[...]
    """Make prompts of the padding prefill rows of a batch, as long as fits, on page 0."""
    wire, bucket = layout.split(flat), layout.bucket
    longest = [own.max_pages * layout.page_size for own in layout.groups]
    each = min([bucket.num_prefill_tokens // max(1, bucket.num_prefills), *longest])
    wire.query_start_loc[:] = each * np.arange(bucket.num_prefills + 1)
    wire.seq_lens[bucket.num_decodes :] = each


def copy_batch(flat: jax.Array) -> jax.Array:  # int32[...]
    """Copy the flat array to a temporary with ``PADDING`` after it; traced inside a GPU's step.

    XLA records a kernel of the step's CUDA graph again if its memory has moved since the last call,
    which takes the host up to 1 ms of a step that takes the device 2.6 ms. A batch is always in new
    memory, and the attention of each layer reads it; with the copy, only the copy is recorded
    again. A temporary does not move as long as no other freed block has its size, in units of 2
    MiB, as XLA's allocator reuses the one that was freed first: so no two arrays of such a size may
    be in use at a time, and those of loading are released (``device_memory.release_freed_blocks``).
    Batches and drawn tokens occupy one unit, and so would the temporaries of a small step; the
    unwritten padding makes them larger (``docs/notes/0008-batch-and-command-buffers.md``).
    """
    own = lax.empty((flat.size + PADDING,), flat.dtype)
    # without the barrier XLA lets kernels read the sections of the argument
    return lax.optimization_barrier(lax.dynamic_update_slice(own, flat, (0,)))


def unpack(
    flat: jax.Array,  # int32[...]
    layout: BatchLayout,
    slots: SlotState,
) -> DeviceBatch:
    """The batch of a flat array; traced inside the step.

    With drafts the host does not know the lengths of decode rows, which their slots store, as they
    store the tokens of a row after the first, if the bucket has some.
    """
    wire, bucket = layout.split(flat), layout.bucket
    d, q = bucket.num_decodes, bucket.query_tokens
    seq_lens, starts = wire.seq_lens, wire.query_start_loc
    rows = last = tokens = jnp.arange(d, dtype=jnp.int32)
    real = seq_lens[:d] > 0
    begins, drafts = jnp.maximum(seq_lens[:d] - 1, 0), None
    if slots.lengths is not None:
        lengths = jnp.where(real, slots.lengths[wire.seq_slots[:d]], 0)
        begins = jnp.maximum(lengths - 1, 0)
        seq_lens = jnp.concatenate((begins + q, seq_lens[d:]))
    positions = begins
    if q == 1:
        token_ids = slots.token_ids[wire.seq_slots[:d], positions]
    else:
        token_ids, drafts = _with_drafts(wire, begins, slots, q - 1)
        tokens, last = jnp.arange(d * q, dtype=jnp.int32), rows * q + q - 1
        rows, real = tokens // q, real[tokens // q]
        positions = begins[rows] + tokens % q
    if bucket.num_prefill_tokens:
        row, position, in_row = _prefill_tokens(bucket, seq_lens[d:], starts)
        begins = jnp.concatenate((begins, seq_lens[d:] - (starts[1:] - starts[:-1])))
        is_row = starts[1:] > starts[:-1]  # others have the step's last token, mostly padding
        last_prefill = d * q - 1 + jnp.where(is_row, starts[1:], bucket.num_prefill_tokens)
        rows, positions, token_ids, real, last, tokens = (
            jnp.concatenate(parts)
            for parts in (
                (rows, d + row),
                (positions, position),
                (token_ids, wire.token_ids),
                (real, in_row),
                (last, last_prefill),
                (tokens, last_prefill),
            )
        )
    draws, query_starts = Draws(tokens, wire.seq_slots, seq_lens), starts
    if drafts is not None:
        own = jnp.concatenate((jnp.repeat(wire.seq_slots[:d], q), wire.seq_slots[d:]))
        lens = jnp.concatenate((positions[: d * q] + 1, seq_lens[d:]))
        draws = Draws(tokens, own, lens)
        # rows with drafts attend as prompts do
        query_starts = jnp.concatenate((jnp.arange(d, dtype=jnp.int32) * q, d * q + starts))
    step_rows = Rows(rows, real, wire.seq_slots, begins, last, query_starts)
    if layout.has_snapshots:
        step_rows = with_state_rows(step_rows, wire.state_rows, wire.kept_rows)
    return DeviceBatch(
        token_ids=token_ids,
        positions=positions,
        seq_lens=seq_lens,
        rows=step_rows,
        pages=_pages_of_groups(layout, wire, seq_lens, rows, positions, real),
        draws=draws,
        drafts=drafts,
        settings=wire.settings.reshape(-1, NUM_SETTINGS),
        samples=wire.samples > 0,
        masked=wire.samples == MASKED,
        place=wire.place,
        mask_place=wire.mask_place,
        peers=wire.peers,
        steered=wire.steered > 0 if TAPS in bucket.variants else None,
    )


def _with_drafts(
    wire: Fields[jax.Array],
    begins: jax.Array,  # int32[D]: the position of the first token of each decode row
    slots: SlotState,
    count: int,  # drafts of a row
) -> tuple[jax.Array, Drafts]:  # int32[D * (1 + count)]
    """The tokens of all decode rows, and the drafts among them."""
    assert slots.drafts is not None, "rows of several tokens need drafts"
    own = wire.seq_slots[: len(begins)]
    drafts = slots.drafts[own, :count]
    first = slots.token_ids[own, begins]
    token_ids = jnp.concatenate((first[:, None], drafts), axis=1).ravel()
    return token_ids, Drafts(drafts, wire.query_lens - 1)


def _pages_of_groups(
    layout: BatchLayout,
    wire: Fields[jax.Array],
    seq_lens: jax.Array,  # int32[B]
    rows: jax.Array,  # int32[T]
    positions: jax.Array,  # int32[T]
    real: jax.Array,  # bool[T]
) -> tuple[Pages, ...]:
    """The pages of each row's context in each group.

    The table of a group with a window begins with the first page that a row still holds
    (``core.step.Pages.first``), and its lengths count from that page. An entry for several tokens
    is written by the last of them, and counts from then on.
    """
    found: list[Pages] = []
    firsts = iter(wire.first_pages.reshape(len(layout.windowed), layout.bucket.num_seqs))
    for own, table in zip(layout.groups, layout.tables(wire.page_tables), strict=True):
        if layout.bucket.num_prefills:
            # XLA fuses the slice of a section into the call of a Mosaic kernel that reads it, and
            # records such a call at every step, which takes the host 10 us per layer. Linked calls
            # are few, so decode steps do not need the barrier.
            table = lax.optimization_barrier(table)
        each, lens, entries, ends = own.group.tokens_per_entry, seq_lens, positions, real
        if each > 1:
            lens, entries = seq_lens // each, positions // each
            ends = real & (positions % each == each - 1)
        page = entries // layout.page_size
        if own.group.window is not None:
            first = next(firsts)
            lens, page = lens - first * layout.page_size, page - first[rows]
        slot_mapping = table[rows, page] * layout.page_size + entries % layout.page_size
        found.append(Pages(jnp.where(ends, slot_mapping, 0), table, lens))
    return tuple(found)


def _prefill_tokens(
    bucket: Bucket,
    seq_lens: jax.Array,  # int32[R]
    starts: jax.Array,  # int32[R + 1]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, position and whether it is not padding, of each prefill token; all are [Tp]."""
    token = jnp.arange(bucket.num_prefill_tokens, dtype=jnp.int32)
    # a token's row is the number of rows that end at or before it
    row = jnp.sum(token[:, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
    real = row < bucket.num_prefills
    row = jnp.minimum(row, bucket.num_prefills - 1)
    position = seq_lens[row] - starts[1:][row] + token
    return row, jnp.where(real, position, 0), real
