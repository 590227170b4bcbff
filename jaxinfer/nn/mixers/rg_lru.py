"""The gated linear recurrence of Griffin. Parameters of ``RgLru``, with I channels, which are G
groups of H, and W taps:

into [D, 2I]: gates, inputs       into_bias [2I]
conv [W, I]                       conv_bias [I]
input_gate [G, H, H]              decay_gate [G, H, H]
decay float32[3, I]: the rates of the decays, biases of input_gate and of decay_gate
o    [I, D]                       o_bias    [D]

A token with the decay a and the input x changes a channel's state s to a s + sqrt(1 - a^2) x, and
the first token of a sequence makes it x. Within a chunk an associative scan combines these maps.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.recurrent import (
    PromptRows,
    convolved,
    started,
    with_kept,
)
from jaxinfer.nn.mixers.rg_lru_spec import RgLruConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.chunk_scan import RowIndices, by_token, chunks_of, scan_chunks

_POWER = 8.0  # of the decay, Griffin's c


class RgLru(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: RgLruConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``attention.Attention``."""
        c, is_dense = self.config, state is None
        w, bias = weight(self, "into"), param(self, "into_bias")
        y, stream, _ = linear(stream, w, ctx, norm=norm, bias=bias)
        state, rows = started(c, state, y, ctx)
        gate, x = jnp.split(y, 2, axis=1)
        taps, conv_bias = param(self, "conv"), param(self, "conv_bias")
        x, kept = convolved(x, taps, conv_bias, state["conv"], rows, ctx, silu=False)
        out, states = self._mixed(x, state["lru"], rows, ctx)
        own = stream.x
        if only is not None:
            own, out, gate = stream.take(only), take_rows(out, only), take_rows(gate, only)
        out = out.astype(y.dtype) * ACTIVATIONS[c.activation](gate)
        out = ctx.at("z", out[:, None])[:, 0]
        delta = block_output(out, weight(self, "o"), ctx, bias=param(self, "o_bias"))
        return own, delta, None if is_dense else {"lru": states, "conv": kept}

    def _maps(self, x: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array]:  # [T, I]
        """The logarithm of the factor, and the addend, of the state at each token."""
        rates, *biases = param(self, "decay")
        x32 = x.astype(jnp.float32)
        groups = x32.reshape(len(x), self.config.heads, -1)
        gates = [
            jax.nn.sigmoid(
                jnp.einsum(
                    "TGI,GIO->TGO",
                    groups,
                    param(self, name).astype(jnp.float32),
                    precision="highest",
                ).reshape(x.shape)
                + one
            )
            for name, one in zip(("input_gate", "decay_gate"), biases, strict=True)
        ]
        log_decay = -_POWER * gates[1] * jax.nn.softplus(rates)
        is_first = (ctx.positions == 0)[:, None]
        factor = jnp.where(is_first, 1.0, jnp.sqrt(-jnp.expm1(2 * log_decay)))
        return log_decay, x32 * gates[0] * factor

    def _mixed(
        self,
        x: jax.Array,  # [T, I]
        states: jax.Array,  # float32[S, I]
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I]
        """The outputs of decode rows, then of prompts, and the new states."""
        d, parts = ctx.num_decodes, []
        log_decay, addend = self._maps(x, ctx)
        if d:
            slots = rows.slots[:d]
            found = jnp.where((ctx.positions[:d] == 0)[:, None], 0, states[slots])
            out = found * jnp.exp(log_decay[:d]) + addend[:d]
            states = with_kept(states.at[slots].set(out), rows, d)
            parts.append(out)
        if len(x) > d:
            prompts = PromptRows.of(rows.prompts(d))
            out, states = _prefill(log_decay[d:], addend[d:], states, prompts)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), states


@jax.jit  # one trace serves every layer
def _prefill(
    log_decay: jax.Array,  # float32[T, I]
    addend: jax.Array,  # float32[T, I]
    states: jax.Array,  # float32[S, I]
    rows: RowIndices,
) -> tuple[jax.Array, jax.Array]:  # float32[T, I], float32[S, I]
    """The tokens of prompts; where there is no token, both are 0, so that nothing changes."""
    chunks = chunks_of(rows.query_start_loc, len(addend))

    def advance(
        state: jax.Array, one: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:  # [I], [I, CHUNK]
        since, own = jax.lax.associative_scan(_after, (jnp.exp(one[0]), one[1]))
        all_states = own + since * state
        return all_states[-1], all_states.T

    each = (chunks.take(log_decay), chunks.take(addend))
    out, states = scan_chunks(rows, states, chunks, advance, each)
    return by_token(out, rows.query_start_loc, chunks, len(addend)), states


def _after(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """One map, then another one."""
    return first[0] * second[0], first[1] * second[0] + second[1]
