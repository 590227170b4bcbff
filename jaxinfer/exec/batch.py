"""A step's plan as one flat int32 array, and that array as a batch on the device.

Owns: the wire layout between host and device. The host sends what only it knows (lengths, new
pages, prompt tokens) in a single transfer; positions and page slots are derived on the device.
Must not know: the model, sampling parameters (they live in ``SlotState``).
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

from jaxinfer.core.request import Request
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket, StepPlan
from jaxinfer.exec.sampling import Extras
from jaxinfer.exec.slots import ALIGN, SlotState
from jaxinfer.nn.attention import AttentionBatch

ROOM = 2**23 // 4  # int32 values, 8 MiB: see ``copied_in``


class DeviceBatch(NamedTuple):
    """What one step computes on; padding rows read and write the last slot and page 0.

    ``page_tables`` are those of all slots, with the pages in it that decoding rows have now.
    """

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T]
    attention: AttentionBatch
    logits_indices: jax.Array  # int32[B]: the last token of each row
    seq_slots: jax.Array  # int32[B]
    samples: jax.Array  # bool[B]: whether the row's last token draws the next one
    target_ids: jax.Array  # int32[Tp]: the prompt token whose logprob is asked for, else -1
    extras: Extras[jax.Array]
    page_tables: jax.Array  # int32[S + 1, M]: see ``SlotState.page_table``


class Fields[A](NamedTuple):
    """The sections of the flat array, in order: as sizes, numpy views or device arrays."""

    extras: A  # [len(Extras)]
    seq_slots: A  # [B]
    seq_lens: A  # [B]
    samples: A  # [B]
    query_start_loc: A  # [R + 1]
    token_ids: A  # [Tp]
    target_ids: A  # [Tp]
    # [num_decodes]: the page of a decoding row's token, the last it has. All others came with its
    # admission, or as this did: a table for each row would be 1.3 MB of a step of 128 rows, which
    # the device waits for between two steps, as it may not overwrite what the first still reads.
    newest_pages: A


@dataclass(frozen=True)
class BatchLayout:
    """The wire layout of one bucket."""

    bucket: Bucket
    page_size: int
    sink_slot: int

    def sizes(self) -> Fields[int]:
        """Length of each section."""
        b, tp = self.bucket.num_seqs, self.bucket.num_prefill_tokens
        return Fields(
            extras=len(Extras._fields),
            seq_slots=b,
            seq_lens=b,
            samples=b,
            query_start_loc=self.bucket.num_prefills + 1,
            token_ids=tp,
            target_ids=tp,
            newest_pages=self.bucket.num_decodes,
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

    @cached_property
    def _sections(self) -> tuple[slice, ...]:
        pairs = zip(self._starts, self.sizes(), strict=False)
        return tuple(slice(start, start + size) for start, size in pairs)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where each section begins, and the end of the last."""
        return tuple(accumulate((cdiv(size, ALIGN) * ALIGN for size in self.sizes()), initial=0))


def pack(plan: StepPlan, layout: BatchLayout, extras: Extras[bool]) -> np.ndarray:  # int32[...]
    """The flat array of a plan. Work is per row, never per token."""
    flat = layout.empty()
    wire = layout.split(flat)
    wire.extras[:] = extras
    wire.seq_slots[:] = layout.sink_slot
    for first, rows in ((0, plan.decodes), (layout.bucket.num_decodes, plan.prefills)):
        span = slice(first, first + len(rows))
        wire.seq_slots[span] = [row.slot for row in rows]
        wire.seq_lens[span] = [row.num_computed_tokens + row.num_scheduled_tokens for row in rows]
        wire.samples[span] = [row.samples for row in rows]
    wire.newest_pages[: len(plan.decodes)] = [
        row.page_ids[row.num_computed_tokens // layout.page_size] for row in plan.decodes
    ]
    wire.target_ids[:] = -1
    start = 0
    for index, row in enumerate(plan.prefills):
        end = start + row.num_scheduled_tokens
        wire.token_ids[start:end] = row.token_ids
        if row.target_ids is not None:
            wire.target_ids[start:end] = row.target_ids
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
) -> DeviceBatch:
    """The batch of a flat array; traced inside the step."""
    wire, bucket = layout.split(flat), layout.bucket
    d = bucket.num_decodes
    seq_lens, starts = wire.seq_lens, wire.query_start_loc
    rows = jnp.arange(d, dtype=jnp.int32)
    positions = jnp.maximum(seq_lens[:d] - 1, 0)
    token_ids = slots.token_ids[wire.seq_slots[:d], positions]
    page_size = layout.page_size
    tables = slots.page_table
    if d:  # padding writes page 0 to the sink slot
        newest = (wire.seq_slots[:d], positions // page_size)
        # the barrier has rows read where pages were written: XLA would copy the tables for both
        tables = lax.optimization_barrier(tables.at[newest].set(wire.newest_pages))
    real = seq_lens[:d] > 0
    last = rows
    if bucket.num_prefill_tokens:
        row, position, in_row = _prefill_tokens(bucket, seq_lens[d:], starts)
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
    table = tables[wire.seq_slots]
    slot_mapping = table[rows, positions // page_size] * page_size + positions % page_size
    return DeviceBatch(
        token_ids=token_ids,
        positions=positions,
        attention=AttentionBatch(
            slot_mapping=jnp.where(real, slot_mapping, 0),
            page_table=table,
            seq_lens=seq_lens,
            query_start_loc=starts,
        ),
        logits_indices=last,
        seq_slots=wire.seq_slots,
        samples=wire.samples > 0,
        target_ids=wire.target_ids,
        extras=Extras(*(wire.extras > 0)),
        page_tables=tables,
    )


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


def extras_of(requests: Sequence[Request]) -> Extras[bool]:
    """What at least one of these requests asks for beside a token."""
    params = [request.sampling for request in requests]
    return Extras(
        bias=any(p.logit_bias or p.min_tokens for p in params),
        penalties=any(p.has_penalties for p in params),
        logprobs=any(p.logprobs is not None for p in params),
        prompt_logprobs=any(p.prompt_logprobs is not None for p in params),
    )
