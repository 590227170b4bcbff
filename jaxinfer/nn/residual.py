"""The residual stream: blocks read it, or a sum of several, and their outputs are added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.nn.linear import BlockOutput, Outputs, Stream, whole
from jaxinfer.nn.residual_spec import BlendedResidual, HyperResidual, MixedResidual
from jaxinfer.nn.weight import param, take_rows
from pallas_kernels.lib.numerics import rms_norm

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


class Blended(nn.Module):
    """How a block uses the stream: see ``BlendedResidual``. Parameters in float32:

    gate [D]    scale [D] of the outputs of networks
    """

    config: BlendedResidual
    weighs: bool

    @nn.compact
    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``Plain``."""
        del only
        c, scale = self.config, param(self, "scale") if self.weighs else None
        gate = param(self, "gate") / c.temperature
        own, kept = jax.nn.sigmoid(gate), jax.nn.sigmoid(-gate)
        kept = jnp.sqrt(jnp.maximum(kept * (1 + own), c.least))

        def add(x: jax.Array, delta: Any) -> Stream:
            made = Stream(jnp.zeros_like(x), delta).total()
            if scale is not None:
                made = (made.astype(jnp.float32) * scale).astype(x.dtype)
            made = rms_norm(made, jnp.ones_like(gate), c.norm_eps).astype(jnp.float32)
            return Stream((kept * x.astype(jnp.float32) + own * made).astype(x.dtype))

        return stream, add


class Hyper(nn.Module):
    """How a block, or the decoder, uses n streams: see ``HyperResidual``. Parameters in float32:

    ways [n * D, 2n]   base [2n]   scale [2]: of reading, of adding
      outside the layers [n * D, n], [n], [1], of the end
      and of ``Mixed`` in layers [n * D, (2 + n) * n], [(2 + n) * n], [3]: of the mixture, too
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
        n = c.num_streams
        into, out = jnp.split(jax.nn.sigmoid(self._found(total, (n, n))), 2, axis=1)
        return self._summed(total, into), self._adding(total, c.magnitude * out + c.eps, None, only)

    def end(self, stream: Stream) -> Stream:
        """The weighted sum of the streams."""
        total = stream.total()
        found = self._found(total, (self.config.num_streams,))
        return self._summed(total, jax.nn.sigmoid(found))

    def _found(
        self, total: jax.Array, sizes: tuple[int, ...]
    ) -> jax.Array:  # float32[T, sum(sizes)]
        """The projections of a token's streams, each of which has its scale, with their bases."""
        flat = total.astype(jnp.float32)
        square = jnp.mean(jnp.square(flat), axis=1, keepdims=True)
        found = jnp.matmul(flat, param(self, "ways"), precision=jax.lax.Precision.HIGHEST)
        found = found * jax.lax.rsqrt(square + self.config.norm_eps)
        scale = jnp.repeat(param(self, "scale"), np.array(sizes), total_repeat_length=sum(sizes))
        return found * scale + param(self, "base")

    def _adding(
        self,
        total: jax.Array,  # [T, n * D]
        out: jax.Array,  # float32[T, n]
        mixture: jax.Array | None,  # float32[T, n, n]
        only: jax.Array | None,  # int32[B]
    ) -> Add:
        """How a block's output is added to the streams, or to a mixture of them."""
        if only is not None:
            total, out = take_rows(total, only), take_rows(out, only)
            mixture = None if mixture is None else mixture[only]

        def add(x: jax.Array, delta: Any) -> Stream:
            made = Stream(jnp.zeros_like(x), delta).total().astype(jnp.float32)
            kept = self._split(total).astype(jnp.float32)
            if mixture is not None:  # as products and sums, which no device rounds to TF32
                kept = jnp.sum(mixture[..., None] * kept[:, :, None], axis=1)
            added = out[..., None] * made[:, None] + kept
            return Stream(added.astype(x.dtype).reshape(total.shape))

        return add

    def _summed(self, total: jax.Array, ways: jax.Array) -> Stream:
        """The streams times their weights float32[T, n]."""
        own = (ways + self.config.eps)[..., None] * self._split(total).astype(jnp.float32)
        return Stream(jnp.sum(own, axis=1).astype(total.dtype))

    def _split(self, total: jax.Array) -> jax.Array:  # [T, n, D]
        return total.reshape(len(total), self.config.num_streams, -1)


class Mixed(Hyper):
    """How a block uses streams that it mixes: see ``MixedResidual``."""

    config: MixedResidual

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``Plain``."""
        c, total = self.config, stream.total()
        n = c.num_streams
        into, out, mixture = jnp.split(self._found(total, (n, n, n * n)), (n, 2 * n), axis=1)
        out = c.magnitude * jax.nn.sigmoid(out)
        adding = self._adding(total, out, self._mixture(mixture.reshape(-1, n, n)), only)
        return self._summed(total, jax.nn.sigmoid(into)), adding

    def end(self, stream: Stream) -> Stream:
        """The weighted sum of the streams, or their mean."""
        if not self.config.mean:
            return super().end(stream)
        total = stream.total()
        mean = jnp.mean(self._split(total).astype(jnp.float32), axis=1)
        return Stream(mean.astype(total.dtype))

    def _mixture(self, logits: jax.Array) -> jax.Array:  # float32[T, n, n]
        """The doubly stochastic matrices that Sinkhorn's iterations approach."""
        eps = self.config.eps
        made = jax.nn.softmax(logits, axis=2) + eps

        def divided(made: jax.Array, axis: int) -> jax.Array:
            return made / (jnp.sum(made, axis=axis, keepdims=True) + eps)

        def round_of(_: int, made: jax.Array) -> jax.Array:
            return divided(divided(made, 2), 1)

        # a loop: unrolled, 8 blocks took 10 s longer to compile
        return jax.lax.fori_loop(0, self.config.rounds - 1, round_of, divided(made, 1))


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
