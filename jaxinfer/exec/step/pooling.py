"""The vector of a prompt, from the hidden states of its tokens, chunk by chunk.

``last``: the state of the last token. ``cls``: that of the first. ``mean``: the mean of all. A
prompt may be computed in several steps, so its slot keeps the first state or the sum of the states
so far; a row that begins at position 0 starts anew, also after a preemption. A prefix from the
cache has no hidden states, so engines with ``mean`` and ``cls`` reuse none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.exec.step.batch import DeviceBatch


def pooled(
    kind: str,  # one of ``core.pooling.KINDS``
    hidden: jax.Array,  # [T, D] of a step with prompts only; for last [R, D]
    batch: DeviceBatch,
    kept: jax.Array,  # float32[S + 1, D]: see ``SlotState.drawn_from``
) -> tuple[jax.Array, jax.Array]:  # float32[S + 1, D], float32[R, D]
    """The values that slots keep after this step, and each row's vector up to here."""
    rows, hidden = batch.rows, hidden.astype(jnp.float32)
    if kind == "last":
        return kept, hidden
    before = kept[rows.slots]
    starts = (rows.begins == 0)[:, None]
    if kind == "cls":
        vectors = jnp.where(starts, hidden[rows.query_start_loc[:-1]], before)
        return kept.at[rows.slots].set(vectors), vectors
    assert kind == "mean", kind
    states = jnp.where(rows.is_token[:, None], hidden, 0.0)
    sums = jax.ops.segment_sum(states, rows.of_token, num_segments=len(rows.slots))
    sums += jnp.where(starts, 0.0, before)
    counts = jnp.maximum(batch.seq_lens, 1).astype(jnp.float32)
    return kept.at[rows.slots].set(sums), sums / counts[:, None]
