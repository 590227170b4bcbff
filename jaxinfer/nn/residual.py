"""The residual stream: blocks read it, or a sum of several, and their outputs are added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.linear import BlockOutput, Outputs, Stream, whole
from jaxinfer.nn.residual_spec import HyperResidual
from jaxinfer.nn.weight import param, take_rows

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


class Hyper(nn.Module):
    """How a block, or the decoder, uses n streams: see ``HyperResidual``. Parameters in float32:

    ways [n * D, 2n]   base [2n]   scale [2]: of reading, of adding
      outside the layers [n * D, n], [n], [1], of the end
    """

    config: HyperResidual

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The streams that embeddings begin."""
        return Stream(jnp.tile(x, (1, self.config.num_streams)))

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``Plain``."""
        c, total = self.config, stream.total()
        into, out = self._ways(total)
        out = c.magnitude * out + c.eps
        kept, out = (total, out) if only is None else (take_rows(total, only), take_rows(out, only))

        def add(x: jax.Array, delta: Any) -> Stream:
            made = Stream(jnp.zeros_like(x), delta).total().astype(jnp.float32)
            added = out[..., None] * made[:, None] + self._split(kept).astype(jnp.float32)
            return Stream(added.astype(x.dtype).reshape(kept.shape))

        return self._summed(total, into), add

    def end(self, stream: Stream) -> Stream:
        """The weighted sum of the streams."""
        total = stream.total()
        return self._summed(total, *self._ways(total))

    def _ways(self, total: jax.Array) -> list[jax.Array]:  # float32[T, n] each
        """The sigmoids of a token, for reading and for adding."""
        flat, n = total.astype(jnp.float32), self.config.num_streams
        square = jnp.mean(jnp.square(flat), axis=1, keepdims=True)
        found = jnp.matmul(flat, param(self, "ways"), precision=jax.lax.Precision.HIGHEST)
        found = found * jax.lax.rsqrt(square + self.config.norm_eps)
        scale = jnp.repeat(param(self, "scale"), n)
        found = jax.nn.sigmoid(found * scale + param(self, "base"))
        return jnp.split(found, found.shape[1] // n, axis=1)

    def _summed(self, total: jax.Array, ways: jax.Array) -> Stream:
        """The streams times their weights float32[T, n]."""
        own = (ways + self.config.eps)[..., None] * self._split(total).astype(jnp.float32)
        return Stream(jnp.sum(own, axis=1).astype(total.dtype))

    def _split(self, total: jax.Array) -> jax.Array:  # [T, n, D]
        return total.reshape(len(total), self.config.num_streams, -1)


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
