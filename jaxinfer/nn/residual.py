"""One residual stream: blocks read the stream itself, and their outputs are added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.linear import BlockOutput, Outputs, Stream, whole
from jaxinfer.nn.weight import param

# The stream after a block, of the tokens of the block's output: of its input [T, D], and of its
# output [T, D], which may be split-K partials float32[S, T, D] or ``Addends``.
type Add = Callable[[jax.Array, Any], Stream]


@dataclass(frozen=True)
class Plain:
    """One stream. A block's output, times ``scale``, is not added before the next norm: see
    ``Stream``.

    The module of another ``ResidualSpec`` has the same methods. ``begin`` and ``end`` are called
    for the decoder, ``read`` for each block. In between the stream is [T, n * D].
    """

    scale: float | None = None

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream that embeddings begin."""
        return Stream(x)

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """The input [T, D] of a block, and how its output is added: that of all tokens, or ``only``
        of these.
        """
        del only  # the block returns its input with the output of the last block added
        return stream, Stream if self.scale is None else partial(_added, scale=self.scale)

    def end(self, stream: Stream) -> Stream:
        """The input [T, D] of the final norm."""
        return stream


class Weighted(nn.Module):
    """One stream times ``weight`` [D], to which a block's output is added."""

    @nn.compact
    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``Plain``."""
        del only
        own = param(self, "weight")
        return stream, lambda x, delta: Stream(x * own, delta)


def _added(x: jax.Array, delta: BlockOutput, scale: float) -> Stream:
    """The stream with an output times the scale; partials of the output are multiplied alike, and
    of an output with a norm the norm's weight.
    """
    if isinstance(delta, Outputs):
        post = delta.post
        assert post is not None and post.weights is not None, "the outputs have no norm"
        scaled = post.weights[post.row : post.row + 1] * jnp.asarray(scale, post.weights.dtype)
        return Stream(x, replace(delta, post=replace(post, weights=scaled, row=0)))
    return Stream(x, whole(delta) * scale)
