"""Unit vectors in the stream of a normalised transformer: see ``nn.ngpt_spec``.

The stream is [T, 2 * D]: that of the layers, and that with which passes begin. A block has a
parameter ``rate`` [D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.ngpt_spec import NGPTResidual, PassStartConfig
from jaxinfer.nn.residual import Add
from jaxinfer.nn.weight import param, take_rows

EPS = 1e-6  # in transformers of all norms, and no key of config.json


def unit(x: jax.Array) -> jax.Array:  # [..., D]
    """Vectors of length 1."""
    wide = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


def divided_unit(x: jax.Array, width: int, ctx: StepContext) -> jax.Array:  # [T, D]
    """Vectors of length 1 of ``width`` elements, of which each device has an equal part."""
    wide = x.astype(jnp.float32)
    square = ctx.mean_across(jnp.mean(jnp.square(wide), axis=-1, keepdims=True)) * width
    return (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


@dataclass(frozen=True)
class UnitStream:
    """How the decoder uses the stream: see ``nn.residual.Plain``."""

    def begin(self, x: jax.Array) -> Stream:  # [T, D]
        """The stream that embeddings begin."""
        return Stream(jnp.concatenate((x, jnp.zeros_like(x)), axis=1))

    def end(self, stream: Stream) -> Stream:
        """The hidden values, which are unit vectors."""
        return Stream(unit(jnp.split(stream.total(), 2, axis=1)[0]))


class Towards(nn.Module):
    """How a block uses the stream: see ``NGPTResidual``."""

    config: NGPTResidual

    @nn.compact
    def read(
        self,
        stream: Stream,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[Stream, Add]:
        """See ``nn.residual.Plain``."""
        x, kept = jnp.split(stream.total(), 2, axis=1)
        kept = kept if only is None else take_rows(kept, only)
        rate = jnp.abs(param(self, "rate").astype(jnp.float32) * self.config.factor)

        def add(x: jax.Array, delta: Any) -> Stream:
            made = unit(Stream(jnp.zeros_like(x), delta).total()).astype(jnp.float32)
            wide = x.astype(jnp.float32)
            moved = wide + rate * (made - wide)
            return Stream(jnp.concatenate((moved.astype(x.dtype), kept), axis=1))

        return Stream(unit(x)), add


class PassStart(nn.Module):
    """The end of a layer, without parameters."""

    config: PassStartConfig

    def __call__(self, stream: Stream, eps: float, ctx: StepContext) -> Stream:
        """The stream after it."""
        del eps
        x, kept = jnp.split(stream.total(ctx.pins), 2, axis=1)
        x = unit(x)
        kept = x if self.config.first else kept
        return Stream(jnp.concatenate((x + kept, kept), axis=1))
