"""Residual streams that blocks read through gates: see ``GatedResidual``.

Parameters of each use of n streams of width D:

    norm float32[n * D]   down [n * D, R]   up [R, n * D]
    inject [n * D, n]: the weights of a block's output; not outside the layers
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.linear import Stream
from jaxinfer.nn.residual import Add
from jaxinfer.nn.residual_spec import GatedResidual
from jaxinfer.nn.weight import param, take_rows
from pallas_kernels.lib.numerics import rms_norm

_MAGNITUDE = 2.0  # of the weights of outputs


class Gated(nn.Module):
    """How a block, or the decoder, uses the streams: see ``nn.residual.Plain``."""

    config: GatedResidual

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The streams that embeddings begin."""
        return Stream(jnp.tile(x, (1, self.config.num_streams)))

    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``nn.residual.Plain``."""
        total = stream.total()
        normed = self._normed(total)
        logits = self._product(normed, "inject") / self.config.num_streams
        ways = _MAGNITUDE * jax.nn.sigmoid(logits)  # float32[T, n]
        if only is not None:
            total, ways = take_rows(total, only), take_rows(ways, only)

        def add(x: jax.Array, delta: Any) -> Stream:
            made = Stream(jnp.zeros_like(x), delta).total().astype(jnp.float32)
            kept = self._split(total).astype(jnp.float32)
            added = kept + ways[..., None] * made[:, None]
            return Stream(added.astype(x.dtype).reshape(total.shape))

        return self._mean(normed), add

    def end(self, stream: Stream) -> Stream:
        """The gated mean of the streams."""
        return self._mean(self._normed(stream.total()))

    def _normed(self, total: jax.Array) -> jax.Array:  # [T, n * D]
        """The streams after the norm of each."""
        weights = param(self, "norm").reshape(self.config.num_streams, -1)
        return rms_norm(self._split(total), weights, self.config.norm_eps).reshape(total.shape)

    def _mean(self, normed: jax.Array) -> Stream:  # of [T, D]
        """The mean of the normalised streams times their gates."""
        inner = jax.nn.silu(self._product(normed, "down") / self.config.num_streams)
        gates = jax.nn.sigmoid(self._product(inner.astype(normed.dtype), "up"))
        gated = self._split(gates * normed.astype(jnp.float32))
        return Stream(jnp.mean(gated, axis=1).astype(normed.dtype))

    def _product(self, x: jax.Array, name: str) -> jax.Array:  # float32[T, O]
        return jnp.matmul(x, param(self, name), preferred_element_type=jnp.float32)

    def _split(self, total: jax.Array) -> jax.Array:  # [T, n, D]
        return total.reshape(len(total), self.config.num_streams, -1)
