"""The state rows in a batch: where each prefill row's layer state is read, and where it is saved.

For a model with state for each sequence whose engine has snapshots (``sched.snapshots``). Each row
has ``NUM_STATE_ROWS`` integers: the state row that it reads, the tokens after which it saves, and
the state rows of these. Rows of snapshots follow those of slots and of the padding sink. Every row
also stores its last state in its slot, which is another section of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.step import MAX_SAVES, ScheduledSeq
from jaxinfer.nn.context import Rows, Saves

NUM_STATE_ROWS = 1 + 2 * MAX_SAVES


def pack_state_rows(
    section: np.ndarray,  # int32[R * NUM_STATE_ROWS], zeros
    prefills: Sequence[ScheduledSeq],
    sink: int,
) -> None:
    """Write the state rows of a plan; padding reads and writes the sink."""
    table, first = section.reshape(-1, NUM_STATE_ROWS), sink + 1
    table[:, 0] = table[:, 1 + MAX_SAVES :] = sink
    for own, row in zip(table, prefills, strict=False):
        own[0] = row.slot if row.reads is None else first + row.reads
        for number, (count, snapshot) in enumerate(row.saves, 1):
            own[number], own[number + MAX_SAVES] = count, first + snapshot


def with_state_rows(
    rows: Rows,
    section: jax.Array,  # int32[R * NUM_STATE_ROWS]
) -> Rows:
    """``rows`` with what they read and save; decode rows read their slots."""
    table = section.reshape(-1, NUM_STATE_ROWS)
    num_decodes = len(rows.slots) - len(table)
    return rows._replace(
        reads=jnp.concatenate((rows.slots[:num_decodes], table[:, 0])),
        saves=Saves(table[:, 1 : 1 + MAX_SAVES], table[:, 1 + MAX_SAVES :]),
    )
