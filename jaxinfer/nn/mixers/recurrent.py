"""Parts of mixers with a state for each sequence: rows of a step, convolutions, saved states."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows, StepContext
from jaxinfer.nn.state import LayerArrays, LayerState
from pallas_kernels.short_conv.api import ShortConvArgs, short_conv
from pallas_kernels.short_conv.xla import short_conv_decode


def whole_sequence(num_tokens: int) -> Rows:
    """One new sequence of so many tokens, whose state is row 0: the dense form."""
    zero = jnp.zeros(1, jnp.int32)
    return Rows(
        of_token=jnp.zeros(num_tokens, jnp.int32),
        is_token=jnp.ones(num_tokens, bool),
        slots=zero,
        begins=zero,
        last_tokens=zero + num_tokens - 1,
        query_start_loc=jnp.asarray((0, num_tokens), jnp.int32),
    )


def empty_state(state: LayerState) -> LayerArrays:
    """The state of one sequence, for the dense form."""
    return {entry.name: jnp.zeros((1, *entry.shape), entry.dtype) for entry in state.per_slot}


class _HasState(Protocol):
    """A mixer's config."""

    def state(self, dtype: jnp.dtype) -> LayerState: ...


def started(
    config: _HasState,
    state: LayerArrays | None,
    x: jax.Array,  # [T, ...]
    ctx: StepContext,
) -> tuple[LayerArrays, Rows]:
    """The state and the rows of a step, or, without state, those of the dense form."""
    if state is None:
        return empty_state(config.state(x.dtype)), whole_sequence(len(x))
    assert ctx.rows is not None
    return state, ctx.rows


class PromptRows(NamedTuple):
    """The indices that ops for prompts take (``pallas_kernels.lib.chunk_scan.RowIndices``)."""

    query_start_loc: jax.Array  # int32[R + 1]
    begins: jax.Array  # int32[R]
    reads: jax.Array  # int32[R]
    writes: jax.Array  # int32[R]
    save_tokens: jax.Array | None  # int32[R, N]
    save_rows: jax.Array | None  # int32[R, N]

    @classmethod
    def of(cls, rows: Rows) -> PromptRows:
        """Those of prefill rows alone (``Rows.prompts``)."""
        saves = rows.saves
        return cls(
            rows.query_start_loc,
            rows.begins,
            rows.slots if rows.reads is None else rows.reads,
            rows.slots,
            None if saves is None else saves.num_tokens,
            None if saves is None else saves.state_rows,
        )


def with_kept(array: jax.Array, rows: Rows, num_decodes: int) -> jax.Array:
    """An array with an entry for each sequence, after decode rows stored theirs in their slots:
    with those that they save. Few steps save any, and a scatter moves all states.
    """
    if rows.keeps is None:
        return array
    slots, keeps = rows.slots[:num_decodes], rows.keeps

    def kept(array: jax.Array) -> jax.Array:
        return array.at[keeps].set(array[slots])

    return jax.lax.cond(jnp.any(keeps != slots), kept, lambda array: array, array)


def convolved(
    x: jax.Array,  # [T, C]
    weights: jax.Array,  # [W, C]
    bias: jax.Array | None,  # [C]
    kept: jax.Array,  # [P, W, C]: the last inputs, as ``short_conv`` keeps them
    rows: Rows,
    ctx: StepContext,
    *,
    silu: bool,
) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """The causal convolution of a step's tokens, those of decode rows first, and the new inputs.

    ``rows`` are those of the context, or ``whole_sequence``.
    """
    d, parts = ctx.num_decodes, []
    if d:
        positions, slots = ctx.positions[:d], rows.slots[:d]
        out, kept = short_conv_decode(x[:d], weights, bias, kept, positions, slots, silu=silu)
        kept = with_kept(kept, rows, d)
        parts.append(out.astype(x.dtype))
    if len(x) > d:
        out, kept = convolved_prompts(x[d:], weights, bias, kept, rows.prompts(d), ctx, silu=silu)
        parts.append(out)
    return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), kept


def convolved_prompts(
    x: jax.Array,  # [T, C]
    weights: jax.Array,  # [W, C]
    bias: jax.Array | None,  # [C]
    kept: jax.Array,  # [P, W, C]
    prompts: Rows,
    ctx: StepContext,
    *,
    silu: bool,
) -> tuple[jax.Array, jax.Array]:  # [T, C], [P, W, C]
    """``convolved`` for the tokens of prompts, whose rows are ``Rows.prompts``."""
    args = ShortConvArgs(
        x=x,
        weights=weights,
        bias=bias,
        kept=kept,
        silu=silu,
        **PromptRows.of(prompts)._asdict(),
    )
    return short_conv(args, ctx.pinned("short_conv"))
