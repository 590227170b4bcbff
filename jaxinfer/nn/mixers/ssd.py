"""The state space duality of Mamba-2 in a step: the tokens of decode rows, and those of prompts.

(Dao and Gu 2024, arXiv:2405.21060.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows, StepContext
from jaxinfer.nn.mixers.recurrent import PromptRows, convolved_prompts
from pallas_kernels.ssd_decode.api import SsdDecodeArgs, ssd_decode
from pallas_kernels.ssd_prefill.api import SsdPrefillArgs, ssd_prefill
from pallas_kernels.ssd_prefill.ref import NO_LIMIT


class SsdTokens(NamedTuple):
    """The inputs of tokens, as ``ssd_prefill`` takes them."""

    mixed: jax.Array  # [T, C]: inputs, keys, queries, before a convolution
    steps: jax.Array | None  # [T, H]; None: all are 1
    decay: jax.Array  # float32[3, H]
    limits: tuple[float, float] = NO_LIMIT

    def part(self, tokens: slice) -> SsdTokens:
        """Those of some tokens."""
        steps = None if self.steps is None else self.steps[tokens]
        return self._replace(mixed=self.mixed[tokens], steps=steps)


class Conv(NamedTuple):
    """The convolution that tokens pass first, with SiLU."""

    weights: jax.Array  # [W, C]
    bias: jax.Array | None  # [C]
    kept: jax.Array  # [S, W, C]: the last inputs, as ``short_conv`` keeps them


def ssd(
    tokens: SsdTokens,
    conv: Conv | None,
    states: jax.Array,  # float32[S, H, P, N]
    rows: Rows,
    ctx: StepContext,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # [T, H, P], float32[S, H, P, N], [S, W, C]
    """The outputs of a step's tokens, those of decode rows first, the new states, and the new
    inputs of the convolution.

    ``rows`` are those of the context, or ``recurrent.whole_sequence``.
    """
    d, parts = ctx.num_decodes, []
    if d:
        args = SsdDecodeArgs(
            **tokens.part(slice(d))._asdict(),
            states=states,
            positions=ctx.positions[:d],
            rows=rows.slots[:d],
            keeps=rows.keeps,
            conv=None if conv is None else conv.weights,
            conv_bias=None if conv is None else conv.bias,
            convs=None if conv is None else conv.kept,
        )
        out, states, kept = ssd_decode(args, ctx.pinned("ssd_decode"))
        conv = None if conv is None or kept is None else conv._replace(kept=kept)
        parts.append(out)
    if len(tokens.mixed) > d:
        prompts, own = rows.prompts(d), tokens.part(slice(d, None))
        if conv is not None:
            mixed, kept = convolved_prompts(own.mixed, *conv, prompts, ctx, silu=True)
            own, conv = own._replace(mixed=mixed), conv._replace(kept=kept)
        indices = PromptRows.of(prompts)._asdict()
        args = SsdPrefillArgs(**own._asdict(), states=states, **indices)
        out, states = ssd_prefill(args, ctx.pinned("ssd_prefill"))
        parts.append(out)
    out = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return out, states, None if conv is None else conv.kept


def grouped_rms_norm(
    x: jax.Array,  # float32[T, I]
    weight: jax.Array,  # [I]
    groups: int,
    eps: float,
    ctx: StepContext | None,
) -> jax.Array:  # float32[T, I]
    """An RMS norm of each of so many equal parts of the columns.

    With a context each of its devices has an equal part of every group.
    """
    parts = x.reshape(len(x), groups, -1)
    mean = jnp.mean(jnp.square(parts), axis=-1)
    mean = mean if ctx is None else ctx.mean_across(mean)
    parts = parts * jax.lax.rsqrt(mean + eps)[..., None]
    return parts.reshape(x.shape) * weight.astype(jnp.float32)
