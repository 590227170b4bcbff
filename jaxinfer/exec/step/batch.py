"""A step's plan as one flat int32 array, and that array as a batch on the device.

Owns: the wire layout between host and device. The host sends what only it knows (page tables,
lengths, prompt tokens and their requests' settings) in a single transfer; positions and page slots
are derived on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.config import Limits
from jaxinfer.core.shapes import cdiv, round_up
from jaxinfer.core.step import Bucket, StepPlan
from jaxinfer.exec.step.drafts import Drafter
from jaxinfer.exec.step.slots import NUM_SETTINGS, SlotState
from jaxinfer.nn.context import Pages, Rows

# int32 values, 256 bytes: XLA hands a section to a kernel where it lies, and kernels are compiled
# for arguments that begin at a multiple of 16 bytes (Triton) or 256 (Mosaic): INVALID_ARGUMENT.
# The rows of the page table are padded to it as well, since a kernel may be handed some of them.
ALIGN = 64
NOWHERE = (0, 0, 0)  # no place: see ``pallas_kernels.publish``
NO_SETTINGS = np.zeros((0, NUM_SETTINGS), np.int32)
ROOM = 2**23 // 4  # int32 values, 8 MiB: see ``copied_in``


class Draws(NamedTuple):
    """The N tokens that a step draws: after each token of a decode row, and after the last token of
    each prefill row.
    """

    tokens: jax.Array  # int32[N]: index, in the step, of the token before
    slots: jax.Array  # int32[N]
    lens: jax.Array  # int32[N]: tokens before it in its sequence


class Drafts(NamedTuple):
    """Tokens that decode rows propose behind their last one."""

    token_ids: jax.Array  # int32[D, Q - 1]
    most: jax.Array  # int32[D]: how many of them the row may accept


class DeviceBatch(NamedTuple):
    """What one step computes on; padding rows read and write the last slot and page 0."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]
    seq_lens: jax.Array  # int32[B]: context length, this step's tokens included; 0 of padding
    rows: Rows
    pages: tuple[Pages, ...]  # of each group
    draws: Draws
    drafts: Drafts | None  # None where decode rows have one token
    settings: jax.Array  # int32[R, NUM_SETTINGS]: of the prefill rows
    samples: jax.Array  # bool[B]: whether the row's last token draws the next one
    place: jax.Array  # int32[3]: where tokens are published


class Fields[A](NamedTuple):
    """The sections of the flat array, in order: as sizes, numpy views or device arrays."""

    place: A  # [3]: where tokens are published
    seq_slots: A  # [B]
    seq_lens: A  # [B]
    samples: A  # [B]
    settings: A  # [R * NUM_SETTINGS]
    query_start_loc: A  # [R + 1]
    token_ids: A  # [Tp]
    query_lens: A  # [D]: tokens of each decode row, where they may have several
    first_pages: A  # [B] of each group with a window: the page that its table begins with
    page_tables: A  # [B * M] of each group, one after the other


class GroupTable(NamedTuple):
    """The page table of one group of layers."""

    most_pages: int  # of a row
    window: int | None  # in tokens

    @property
    def width(self) -> int:
        """M: columns, padding included."""
        return round_up(self.most_pages, ALIGN)


@dataclass(frozen=True)
class BatchLayout:
    """The wire layout of one bucket."""

    bucket: Bucket
    groups: tuple[GroupTable, ...]
    sink_slot: int
    page_size: int

    @property
    def num_windows(self) -> int:
        """Groups with a window."""
        return sum(group.window is not None for group in self.groups)

    @classmethod
    def of(cls, bucket: Bucket, limits: Limits) -> BatchLayout:
        """The layout of a bucket in an engine with these limits."""
        # drafts may lie behind the end of the context; they are written to page 0
        behind = cdiv(bucket.query_tokens - 1, limits.page_size)
        groups = (
            GroupTable(limits.most_pages(window) + behind, window) for window in limits.windows
        )
        return cls(bucket, tuple(groups), limits.max_num_seqs, limits.page_size)

    def sizes(self) -> Fields[int]:
        """Length of each section."""
        b, tp = self.bucket.num_seqs, self.bucket.num_prefill_tokens
        return Fields(
            place=len(NOWHERE),
            seq_slots=b,
            seq_lens=b,
            samples=b,
            settings=self.bucket.num_prefills * NUM_SETTINGS,
            query_start_loc=self.bucket.num_prefills + 1,
            token_ids=tp,
            query_lens=self.bucket.num_decodes if self.bucket.query_tokens > 1 else 0,
            first_pages=b * self.num_windows,
            page_tables=b * sum(group.width for group in self.groups),
        )

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the flat array."""
        return jax.ShapeDtypeStruct((self._starts[-1],), jnp.int32)

    def empty(self) -> np.ndarray:  # int32[...]
        """The flat array of a step without rows, to be filled by its sections."""
        return np.zeros(self._starts[-1], np.int32)

    def split[A: (np.ndarray, jax.Array)](self, flat: A) -> Fields[A]:
        """The sections of a flat array; views where it is a numpy array."""
        return Fields(*(flat[section] for section in self._sections))

    def tables[A: (np.ndarray, jax.Array)](self, page_tables: A) -> list[A]:
        """The page table [B, M] of each group."""
        b, start, found = self.bucket.num_seqs, 0, []
        for group in self.groups:
            end = start + b * group.width
            found.append(page_tables[start:end].reshape(b, group.width))
            start = end
        return found

    @cached_property
    def _sections(self) -> tuple[slice, ...]:
        pairs = zip(self._starts, self.sizes(), strict=False)
        return tuple(slice(start, start + size) for start, size in pairs)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where each section begins, and the end of the last."""
        return tuple(accumulate((cdiv(size, ALIGN) * ALIGN for size in self.sizes()), initial=0))


def pack(
    plan: StepPlan,
    layout: BatchLayout,
    settings: np.ndarray = NO_SETTINGS,  # int32[len(plan.prefills), NUM_SETTINGS]
) -> np.ndarray:  # int32[...]
    """The flat array of a plan, without its place. Work is per row and page, never per token."""
    flat = layout.empty()
    wire = layout.split(flat)
    wire.settings[: settings.size] = settings.ravel()
    wire.seq_slots[:] = layout.sink_slot
    tables = layout.tables(wire.page_tables)
    windowed = [index for index, group in enumerate(layout.groups) if group.window is not None]
    first_pages = wire.first_pages.reshape(len(windowed), layout.bucket.num_seqs)
    if len(wire.query_lens):
        wire.query_lens[: len(plan.decodes)] = [row.num_scheduled_tokens for row in plan.decodes]
    for first, rows in ((0, plan.decodes), (layout.bucket.num_decodes, plan.prefills)):
        span = slice(first, first + len(rows))
        wire.seq_slots[span] = [row.slot for row in rows]
        wire.seq_lens[span] = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        wire.samples[span] = [row.samples for row in rows]
        for firsts, group in zip(first_pages, windowed, strict=True):
            firsts[span] = [row.pages[group].first for row in rows]
        for index, row in enumerate(rows, first):
            for table, pages in zip(tables, row.pages, strict=True):
                ids = pages.ids.array()
                table[index, : len(ids)] = ids
    start = 0
    for index, row in enumerate(plan.prefills):
        end = start + row.num_scheduled_tokens
        wire.token_ids[start:end] = row.token_ids
        wire.query_start_loc[index + 1 :] = end
        start = end
    return flat


def copied_in(flat: jax.Array) -> jax.Array:  # int32[...]
    """The flat array in memory of the step's own, and ``ROOM`` behind it; inside a GPU's step.

    XLA records those kernels of the step's CUDA graph anew whose memory has moved since the last
    call, which takes the host up to 1 ms of a step that takes the device 2.6. A batch always comes
    in new memory, and each layer's attention reads it: now only this copy does. Temporaries stay
    where they are as long as nothing else has their size in blocks of 2 MiB, since XLA's allocator
    gives out first of a size what was freed first. Those of a small step would have the one block
    that batches and drawn tokens have; with the room, which nobody writes, they are larger.
    """
    own = lax.empty((flat.size + ROOM,), flat.dtype)
    # without the barrier XLA has kernels read the sections where they came
    return lax.optimization_barrier(lax.dynamic_update_slice(own, flat, (0,)))


def unpack(
    flat: jax.Array,  # int32[...]
    layout: BatchLayout,
    slots: SlotState,
    drafter: Drafter | None = None,
) -> DeviceBatch:
    """The batch of a flat array; traced inside the step. ``drafter`` proposes the tokens of decode
    rows behind their first, where a bucket's have several.
    """
    wire, bucket = layout.split(flat), layout.bucket
    d = bucket.num_decodes
    decodes = _decode_tokens(wire, bucket, slots, drafter)
    seq_lens, starts = wire.seq_lens, wire.query_start_loc
    if decodes.drafts is not None:
        seq_lens = jnp.concatenate((decodes.ends, seq_lens[d:]))
    begins, rows, positions, token_ids, real, last, draws = decodes[:7]
    if bucket.num_prefill_tokens:
        row, position, in_row = _prefill_tokens(bucket, seq_lens[d:], starts)
        begins = jnp.concatenate((begins, seq_lens[d:] - (starts[1:] - starts[:-1])))
        first_prefill = bucket.num_decode_tokens
        last_prefill = first_prefill + jnp.maximum(starts[1:] - 1, 0)
        rows, positions, token_ids, real, last, draws = (
            jnp.concatenate(parts)
            for parts in (
                (rows, d + row),
                (positions, position),
                (token_ids, wire.token_ids),
                (real, in_row),
                (last, last_prefill),
                (draws, last_prefill),
            )
        )
    return DeviceBatch(
        token_ids=token_ids,
        positions=positions,
        seq_lens=seq_lens,
        rows=Rows(rows, real, wire.seq_slots, begins, last, _query_starts(bucket, starts)),
        pages=_pages_of_groups(layout, wire, seq_lens, rows, positions, real),
        draws=_draws(bucket, wire.seq_slots, seq_lens, positions, draws),
        drafts=decodes.drafts,
        settings=wire.settings.reshape(-1, NUM_SETTINGS),
        samples=wire.samples > 0,
        place=wire.place,
    )


class _DecodeTokens(NamedTuple):
    """The decode rows' part of a batch: D rows of Q tokens."""

    begins: jax.Array  # int32[D]
    rows: jax.Array  # int32[D * Q]
    positions: jax.Array  # int32[D * Q]
    token_ids: jax.Array  # int32[D * Q]
    real: jax.Array  # bool[D * Q]
    last: jax.Array  # int32[D]: index of each row's last token
    draws: jax.Array  # int32[D * Q]: index of each token
    ends: jax.Array  # int32[D]: context length, the row's tokens included
    drafts: Drafts | None


def _decode_tokens(
    wire: Fields[jax.Array], bucket: Bucket, slots: SlotState, drafter: Drafter | None
) -> _DecodeTokens:
    """Where decode rows are. A row of one token is where the host says. One with drafts is where
    its slot says, since the host does not know yet how many drafts steps in flight accept.
    """
    d, q = bucket.num_decodes, bucket.query_tokens
    rows = jnp.arange(d, dtype=jnp.int32)
    lens, own = wire.seq_lens[:d], wire.seq_slots[:d]
    real = lens > 0
    if q == 1:
        positions = jnp.maximum(lens - 1, 0)
        token_ids = slots.token_ids[own, positions]
        return _DecodeTokens(positions, rows, positions, token_ids, real, rows, rows, lens, None)
    assert drafter is not None and slots.lengths is not None, "rows of several tokens need drafts"
    begins = jnp.maximum(jnp.where(real, slots.lengths[own], 0) - 1, 0)
    history = slots.token_ids[own]
    drafts = drafter.propose(history, begins + 1)
    assert drafts.shape == (d, q - 1), "a drafter proposes query_tokens - 1 tokens"
    token_ids = jnp.concatenate((history[rows, begins][:, None], drafts), axis=1)
    index = jnp.arange(d * q, dtype=jnp.int32)
    return _DecodeTokens(
        begins=begins,
        rows=index // q,
        positions=begins[index // q] + index % q,
        token_ids=token_ids.ravel(),
        real=real[index // q],
        last=rows * q + q - 1,
        draws=index,
        ends=begins + q,
        drafts=Drafts(drafts, wire.query_lens - 1),
    )


def _query_starts(
    bucket: Bucket,
    starts: jax.Array,  # int32[R + 1]
) -> jax.Array:  # int32[R + 1], or with drafts int32[D + R + 1]
    """Where each row that attends as a prompt does begins: rows with drafts are among them."""
    if bucket.query_tokens == 1:
        return starts
    decodes = jnp.arange(bucket.num_decodes, dtype=jnp.int32) * bucket.query_tokens
    return jnp.concatenate((decodes, bucket.num_decode_tokens + starts))


def _draws(
    bucket: Bucket,
    seq_slots: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]
    positions: jax.Array,  # int32[T]
    tokens: jax.Array,  # int32[N]
) -> Draws:
    if bucket.query_tokens == 1:
        return Draws(tokens, seq_slots, seq_lens)
    d, q = bucket.num_decodes, bucket.query_tokens
    own = jnp.concatenate((jnp.repeat(seq_slots[:d], q), seq_slots[d:]))
    lens = jnp.concatenate((positions[: d * q] + 1, seq_lens[d:]))
    return Draws(tokens, own, lens)


def _pages_of_groups(
    layout: BatchLayout,
    wire: Fields[jax.Array],
    seq_lens: jax.Array,  # int32[B]
    rows: jax.Array,  # int32[T]
    positions: jax.Array,  # int32[T]
    real: jax.Array,  # bool[T]
) -> tuple[Pages, ...]:
    """Where each group finds the context of each row. The table of a group with a window begins
    with a page of the context's own (``core.step.Pages.first``), and lengths count from there.
    """
    found: list[Pages] = []
    firsts = iter(wire.first_pages.reshape(layout.num_windows, layout.bucket.num_seqs))
    for group, table in zip(layout.groups, layout.tables(wire.page_tables), strict=True):
        if layout.bucket.num_prefills:
            # A section that a kernel of Mosaic's reads becomes part of its call in XLA, and such a
            # call is recorded at every step, 10 us of the host a layer. Linked calls are few.
            table = lax.optimization_barrier(table)
        page, lens = positions // layout.page_size, seq_lens
        if group.window is not None:
            first = next(firsts)
            lens, page = seq_lens - first * layout.page_size, page - first[rows]
        slot_mapping = table[rows, page] * layout.page_size + positions % layout.page_size
        found.append(Pages(jnp.where(real, slot_mapping, 0), table, lens))
    return tuple(found)


def _prefill_tokens(
    bucket: Bucket,
    seq_lens: jax.Array,  # int32[R]
    starts: jax.Array,  # int32[R + 1]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, position and "is no padding" of each token of the prefill part, all [Tp]."""
    token = jnp.arange(bucket.num_prefill_tokens, dtype=jnp.int32)
    # a token's row is the number of rows that end at or before it
    row = jnp.sum(token[:, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
    real = row < bucket.num_prefills
    row = jnp.minimum(row, bucket.num_prefills - 1)
    position = seq_lens[row] - starts[1:][row] + token
    return row, jnp.where(real, position, 0), real
