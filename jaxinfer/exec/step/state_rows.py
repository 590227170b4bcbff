"""The state rows in a batch: where a row's layer state is read, and where states are saved.

For a model with state for each sequence whose engine has snapshots (``sched.snapshots``). Each
prefill row has ``NUM_STATE_ROWS`` integers: the state row that it reads, the tokens after which it
saves, and the state rows of these. Each decode row has one, in a section of its own: where its
state goes besides its slot, or its slot. Rows of snapshots follow those of slots and of the padding
sink. Every row also stores its last state in its slot, which is another section of the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.step import MAX_SAVES, StepPlan
from jaxinfer.nn.context import Rows, Saves

NUM_STATE_ROWS = 1 + 2 * MAX_SAVES


def pack_state_rows(
    section: np.ndarray,  # int32[R * NUM_STATE_ROWS], zeros
    kept: np.ndarray,  # int32[D]
    plan: StepPlan,
    sink: int,
) -> None:
    """Write the state rows of a plan; padding reads and writes the sink."""
    table = section.reshape(-1, NUM_STATE_ROWS)
    first = sink + 1
    table[:, 0] = table[:, 1 + MAX_SAVES :] = kept[:] = sink
    for index, row in enumerate(plan.decodes):
        kept[index] = first + row.saves[0][1] if row.saves else row.slot
    for own, row in zip(table, plan.prefills, strict=False):
        own[0] = row.slot if row.reads is None else first + row.reads
        for number, (count, snapshot) in enumerate(row.saves, 1):
            own[number], own[number + MAX_SAVES] = count, first + snapshot


def with_state_rows(
    rows: Rows,
    section: jax.Array,  # int32[R * NUM_STATE_ROWS]
    kept: jax.Array,  # int32[D]
) -> Rows:
    """``rows`` with what they read and save; decode rows read their slots."""
    if len(kept):
        rows = rows._replace(keeps=kept)
    table = section.reshape(-1, NUM_STATE_ROWS)
    if not len(table):
        return rows
    return rows._replace(
        reads=jnp.concatenate((rows.slots[: len(kept)], table[:, 0])),
        saves=Saves(table[:, 1 : 1 + MAX_SAVES], table[:, 1 + MAX_SAVES :]),
    )
