"""The gated delta rule: a state for each head that every token decays and corrects.

Parameters of ``Delta``, with K key heads of width Dk, V value heads of width Dv and W taps:

    qkvz [D, 2K * Dk + 2V * Dv]: queries, keys, values, the gate of the output
    ba   [D, 2V]: the gates of the correction and of the decay
    conv [W, 2K * Dk + V * Dv]   decay float32[2, V]: logarithm of the rate, bias of its step
    head_norm [Dv]               o [V * Dv, D]
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, linear
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param, take_rows, weight
from pallas_kernels.delta_decode.api import DeltaDecodeArgs, delta_decode
from pallas_kernels.delta_decode.xla import betas_and_decays, gated_norm, unit
from pallas_kernels.delta_prefill.api import DeltaPrefillArgs, delta_prefill
from pallas_kernels.short_conv.api import ShortConvArgs, short_conv


class Delta(nn.Module):
    """The mixer of a layer, with the norm before it."""

    config: DeltaConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        """See ``attention.Attention``."""
        c, w = self.config, weight(self, "qkvz")
        # both products are of the normalised token, as quantised files keep the small one in floats
        qkvz, stream, h = linear(stream, w, ctx, norm=norm, keep=True)
        gates = linear(h, weight(self, "ba"), ctx).y
        if state is None:
            out, _ = self._prompts(qkvz, gates, _empty(c, qkvz.dtype), _whole(len(qkvz)), ctx)
        else:
            out, state = self._step(qkvz, gates, state, ctx)
        out = ctx.at("z", out.reshape(-1, c.num_v_heads, c.v_dim)).reshape(out.shape)
        x = stream.x
        if only is not None:
            x, out = stream.take(only), take_rows(out, only)
        return x, linear(out, weight(self, "o"), ctx, partial=True).y, state

    def _step(
        self,
        qkvz: jax.Array,  # [T, C + V * Dv]
        gates: jax.Array,  # [T, 2V]
        state: LayerArrays,
        ctx: StepContext,
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """The outputs of decode rows, then of prompts, and the new state."""
        assert ctx.rows is not None
        c, d, parts = self.config, ctx.num_decodes, []
        if d:
            qkv, z = self._split(qkvz[:d])
            args = DeltaDecodeArgs(
                qkv=qkv,
                gates=gates[:d],
                z=z,
                conv=param(self, "conv"),
                decay=param(self, "decay"),
                norm=param(self, "head_norm"),
                states=state["delta"],
                convs=state["conv"],
                positions=ctx.positions[:d],
                rows=ctx.rows.slots[:d],
                keeps=ctx.rows.keeps,
                eps=c.norm_eps,
            )
            out, states, convs = delta_decode(args, ctx.pinned("delta_decode"))
            state = {"delta": states, "conv": convs}
            parts.append(out)
        if len(qkvz) > d:
            rows = ctx.rows.prompts(d)
            out, state = self._prompts(qkvz[d:], gates[d:], state, rows, ctx)
            parts.append(out)
        return (jnp.concatenate(parts) if len(parts) > 1 else parts[0]), state

    def _prompts(
        self,
        qkvz: jax.Array,  # [T, C + V * Dv]
        gates: jax.Array,  # [T, 2V]
        state: LayerArrays,
        rows: Rows,
        ctx: StepContext,
    ) -> tuple[jax.Array, LayerArrays]:  # [T, V * Dv]
        """The outputs of the tokens of prompts, and the new state."""
        c, tokens, saves = self.config, len(qkvz), rows.saves
        indices = {
            "query_start_loc": rows.query_start_loc,
            "begins": rows.begins,
            "reads": rows.slots if rows.reads is None else rows.reads,
            "writes": rows.slots,
            "save_tokens": None if saves is None else saves.num_tokens,
            "save_rows": None if saves is None else saves.state_rows,
        }
        conv = ShortConvArgs(x=qkvz, weights=param(self, "conv"), kept=state["conv"], **indices)
        mixed, convs = short_conv(conv, ctx.pinned("short_conv"))
        q, k, v = jnp.split(mixed, (c.keys, 2 * c.keys), axis=1)
        beta, log_decay = betas_and_decays(gates, param(self, "decay"))
        args = DeltaPrefillArgs(
            q=(unit(q.reshape(tokens, -1, c.k_dim)) * c.k_dim**-0.5).astype(qkvz.dtype),
            k=unit(k.reshape(tokens, -1, c.k_dim)).astype(qkvz.dtype),
            v=v.reshape(tokens, -1, c.v_dim),
            log_decay=log_decay,
            beta=beta,
            states=state["delta"],
            **indices,
        )
        out, states = delta_prefill(args, ctx.pinned("delta_prefill"))
        _, z = self._split(qkvz)
        out = gated_norm(
            out.astype(jnp.float32), z.reshape(out.shape), param(self, "head_norm"), c.norm_eps
        )
        out = out.reshape(tokens, -1).astype(qkvz.dtype)
        return out, {"delta": states, "conv": convs}

    def _split(self, qkvz: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, C], [T, V * Dv]
        """The channels of the convolution, and the gate."""
        channels = sum(self.config.channels.widths)
        return qkvz[:, :channels], qkvz[:, channels:]


def _whole(num_tokens: int) -> Rows:
    """One new sequence of so many tokens, whose state is row 0."""
    zero = jnp.zeros(1, jnp.int32)
    return Rows(
        of_token=jnp.zeros(num_tokens, jnp.int32),
        is_token=jnp.ones(num_tokens, bool),
        slots=zero,
        begins=zero,
        last_tokens=zero + num_tokens - 1,
        query_start_loc=jnp.asarray((0, num_tokens), jnp.int32),
    )


def _empty(config: DeltaConfig, dtype: jnp.dtype) -> LayerArrays:
    """The state of one sequence, for the dense form."""
    entries = config.state(dtype).per_slot
    return {entry.name: jnp.zeros((1, *entry.shape), entry.dtype) for entry in entries}
