"""The causal convolution of single channels over the last tokens, for the tokens of prompts.

Its state is the last W inputs of a sequence: that of position p is at place p % W. So a decode row
replaces one place, and kernels of several heads need no order among them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows


class ConvInputs(NamedTuple):
    """The inputs of the rows of a step, and for each row the W - 1 inputs before its first one."""

    all: jax.Array  # [R * (W - 1) + T, C]: those before, of each row in turn, then the step's
    first: jax.Array  # int32[R]: the index in ``all`` of each row's first token
    row: jax.Array  # int32[T]: the row of each token
    within: jax.Array  # int32[T]: its number within the row
    width: int  # W

    def at(self, row: jax.Array, number: jax.Array) -> jax.Array:
        """Inputs by their number within a row, from -(W - 1) on: [..., C]."""
        before = row * (self.width - 1) + self.width - 1 + number
        return self.all[jnp.where(number < 0, before, self.first[row] + number)]


def conv_inputs(
    x: jax.Array,  # [T, C]
    kept: jax.Array,  # [P, W, C]
    prompts: Rows,
) -> ConvInputs:
    """The inputs of prompt rows; ``kept`` is the state."""
    width, num_rows = kept.shape[1], len(prompts.slots)
    positions = prompts.begins[:, None] - jnp.arange(width - 1, 0, -1)  # [R, W - 1]
    reads = prompts.slots if prompts.reads is None else prompts.reads
    before = kept[reads[:, None], positions % width]
    before = jnp.where((positions >= 0)[..., None], before, 0).reshape(-1, x.shape[1])
    starts = prompts.query_start_loc[:-1]
    first = starts + num_rows * (width - 1)
    within = jnp.arange(len(x), dtype=jnp.int32) - starts[prompts.of_token]
    inputs = jnp.concatenate((before.astype(x.dtype), x))
    return ConvInputs(inputs, first, prompts.of_token, within, width)


def convolved(inputs: ConvInputs, weights: jax.Array) -> jax.Array:  # [W, C] -> float32[T, C]
    """The convolution at each token; the last tap is of the token itself."""
    taps = (
        weights[tap].astype(jnp.float32)
        * inputs.at(inputs.row, inputs.within - (inputs.width - 1 - tap)).astype(jnp.float32)
        for tap in range(inputs.width)
    )
    total = next(taps)
    for tap in taps:
        total = total + tap
    return total


def kept_inputs(inputs: ConvInputs, kept: jax.Array, prompts: Rows) -> jax.Array:  # [P, W, C]
    """The state with the last inputs of each row, and those after the tokens that rows save."""
    starts = prompts.query_start_loc
    rows = jnp.arange(len(prompts.slots), dtype=jnp.int32)
    kept = kept.at[prompts.slots].set(_last(inputs, prompts, rows, starts[1:] - starts[:-1]))
    if prompts.saves is None:
        return kept
    counts, to = prompts.saves
    return kept.at[to].set(
        _last(inputs, prompts, jnp.broadcast_to(rows[:, None], counts.shape), counts)
    )


def _last(
    inputs: ConvInputs,
    prompts: Rows,
    rows: jax.Array,  # int32[...]
    counts: jax.Array,  # int32[...]
) -> jax.Array:  # [..., W, C]
    """The state of rows after so many of their tokens."""
    newest = (prompts.begins[rows] + counts - 1)[..., None]
    positions = newest - (newest - jnp.arange(inputs.width)) % inputs.width
    numbers = positions - prompts.begins[rows][..., None]
    least = -(inputs.width - 1)  # without tokens, which only padding has, there is no newest one
    return inputs.at(rows[..., None], jnp.maximum(numbers, least))
