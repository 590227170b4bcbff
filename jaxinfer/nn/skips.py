"""Connections over several layers: copies of the stream that later layers average with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.residual import Add
from jaxinfer.nn.skips_spec import SkipsEndConfig
from jaxinfer.nn.weight import take_rows


@dataclass(frozen=True)
class WithCopies:
    """How blocks use a ``SkipsResidual``: see ``nn.residual.Plain``."""

    kept: int

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream that embeddings begin; the copies are zeros."""
        return Stream(jnp.pad(x, ((0, 0), (0, self.kept * x.shape[1]))))

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """The input [T, D] of a block, and how its output is added."""
        x, copies = self._split(stream)
        copies = copies if only is None else take_rows(copies, only)

        def add(x: jax.Array, delta: Any) -> Stream:
            return Stream(jnp.concatenate((Stream(x, delta).total(), copies), axis=1))

        return Stream(x), add

    def end(self, stream: Stream) -> Stream:
        """The input [T, D] of the final norm."""
        return Stream(self._split(stream)[0])

    def _split(self, stream: Stream) -> tuple[jax.Array, jax.Array]:  # [T, D], [T, kept * D]
        total = stream.total()
        width = total.shape[1] // (1 + self.kept)
        return total[:, :width], total[:, width:]


class SkipsEnd(nn.Module):
    """The end of a layer, without parameters."""

    config: SkipsEndConfig

    def __call__(self, stream: Stream, eps: float, ctx: StepContext) -> Stream:
        """The stream after it and the copies."""
        del eps
        c = self.config
        x, *copies = jnp.split(stream.total(ctx.pins), 1 + c.count, axis=1)
        for one in c.keeps:
            copies[one] = x
        for one in c.reads:
            share = jnp.asarray(c.share, x.dtype)
            x = copies[one] * share + x * (1 - share)
        return Stream(jnp.concatenate((x, *copies), axis=1))
