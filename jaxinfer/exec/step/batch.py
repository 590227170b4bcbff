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
from jaxinfer.exec.step.slots import NUM_SETTINGS
from jaxinfer.nn.context import Pages, Rows

# int32 values, 256 bytes: XLA hands a section to a kernel where it lies, and kernels are compiled
# for arguments that begin at a multiple of 16 bytes (Triton) or 256 (Mosaic): INVALID_ARGUMENT.
# The rows of the page table are padded to it as well, since a kernel may be handed some of them.
ALIGN = 64
NOWHERE = (0, 0, 0)  # no place: see ``pallas_kernels.publish``
NO_SETTINGS = np.zeros((0, NUM_SETTINGS), np.int32)
ROOM = 2**23 // 4  # int32 values, 8 MiB: see ``copied_in``


class DeviceBatch(NamedTuple):
    """What one step computes on; padding rows read and write the last slot and page 0."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]
    seq_lens: jax.Array  # int32[B]: context length, this step's tokens included; 0 of padding
    rows: Rows
    pages: tuple[Pages, ...]  # of each group
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

    @classmethod
    def of(cls, bucket: Bucket, limits: Limits) -> BatchLayout:
        """The layout of a bucket in an engine with these limits."""
        groups = (GroupTable(limits.most_pages(window), window) for window in limits.windows)
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
    for first, rows in ((0, plan.decodes), (layout.bucket.num_decodes, plan.prefills)):
        span = slice(first, first + len(rows))
        wire.seq_slots[span] = [row.slot for row in rows]
        wire.seq_lens[span] = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        wire.samples[span] = [row.samples for row in rows]
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
    history: jax.Array,  # int32[S + 1, max_model_len + 1]: SlotState.token_ids
) -> DeviceBatch:
    """The batch of a flat array; traced inside the step."""
    wire, bucket = layout.split(flat), layout.bucket
    d = bucket.num_decodes
    seq_lens, starts = wire.seq_lens, wire.query_start_loc
    rows = jnp.arange(d, dtype=jnp.int32)
    positions = jnp.maximum(seq_lens[:d] - 1, 0)
    begins = positions  # where each row's tokens begin in its context
    token_ids = history[wire.seq_slots[:d], positions]
    real = seq_lens[:d] > 0
    last = rows
    if bucket.num_prefill_tokens:
        row, position, in_row = _prefill_tokens(bucket, seq_lens[d:], starts)
        begins = jnp.concatenate((begins, seq_lens[d:] - (starts[1:] - starts[:-1])))
        rows, positions, token_ids, real, last = (
            jnp.concatenate(parts)
            for parts in (
                (rows, d + row),
                (positions, position),
                (token_ids, wire.token_ids),
                (real, in_row),
                (last, d + jnp.maximum(starts[1:] - 1, 0)),
            )
        )
    pages = []
    for group, table in zip(layout.groups, layout.tables(wire.page_tables), strict=True):
        if bucket.num_prefills:
            # A section that a kernel of Mosaic's reads becomes part of its call in XLA, and such a
            # call is recorded at every step, 10 us of the host a layer. Linked calls are few.
            table = lax.optimization_barrier(table)
        pages.append(
            _pages(group, table, seq_lens, begins, rows, positions, real, layout.page_size)
        )
    return DeviceBatch(
        token_ids=token_ids,
        positions=positions,
        seq_lens=seq_lens,
        rows=Rows(rows, real, wire.seq_slots, begins, last, starts),
        pages=tuple(pages),
        settings=wire.settings.reshape(-1, NUM_SETTINGS),
        samples=wire.samples > 0,
        place=wire.place,
    )


def _pages(
    group: GroupTable,
    table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    begins: jax.Array,  # int32[B]: position of each row's first token
    rows: jax.Array,  # int32[T]
    positions: jax.Array,  # int32[T]
    real: jax.Array,  # bool[T]
    page_size: int,
) -> Pages:
    """Where a group finds the context of each row, in a table that begins with the first page that
    the row's tokens look at (``core.shapes.first_page``).
    """
    page = positions // page_size
    if group.window is not None:
        first = jnp.maximum(begins + 1 - group.window, 0) // page_size
        seq_lens, page = seq_lens - first * page_size, page - first[rows]
    slot_mapping = table[rows, page] * page_size + positions % page_size
    return Pages(jnp.where(real, slot_mapping, 0), table, seq_lens)


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
