"""The family of ``mixed_family`` with two residual streams and adapters beside its weights.

Blocks read and write the streams by weights that depend on the token, as in dynamic
hyper-connections (Zhu et al. 2024, arXiv:2409.19606).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.base import Model, ModelFamily, Params
from jaxinfer.models.params import ParamSpec, as_is, nested
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.residual import Add
from jaxinfer.nn.weight import param, stored, take_rows
from kit import mixed_family
from kit.checkpoints import built_arrays
from kit.mixed_family import D, mixed_decoder, mixed_tensors

STREAMS, RANK = 2, 3
ADAPTED = ("qkv", "down", "into")  # of attention and dense network, of the recurrent mixer


@dataclass(frozen=True)
class TwoStreams:
    """Two residual streams."""

    is_invariant: ClassVar[bool] = False
    num_streams: int = STREAMS

    def module(self, name: str) -> Connections:
        return Connections(name=name)


class Connections(nn.Module):
    """How a block, or the decoder, uses the streams [T, 2 * D]."""

    def begin(self, x: jax.Array) -> Stream:
        return Stream(jnp.concatenate((x, x[:, ::-1]), axis=1))

    def read(self, stream: Stream, only: jax.Array | None) -> tuple[Stream, Add]:
        total = stream.total()
        streams = total.reshape(-1, STREAMS, D)
        into, out, across = jnp.split(total @ param(self, "ways"), (STREAMS, 2 * STREAMS), axis=1)
        own = jnp.einsum("TS,TSD->TD", jax.nn.sigmoid(into), streams)
        kept = jax.nn.softmax(across.reshape(-1, STREAMS, STREAMS))
        kept, out = jnp.einsum("TRS,TSD->TRD", kept, streams), jnp.tanh(out)[..., None]

        def add(x: jax.Array, delta: jax.Array) -> Stream:
            made = Stream(jnp.zeros_like(x), delta).total()[:, None]
            before, ways = (
                (kept, out) if only is None else (take_rows(a, only) for a in (kept, out))
            )
            return Stream((before + ways * made).reshape(len(x), -1))

        return Stream(own), add

    def end(self, stream: Stream) -> Stream:
        streams = stream.total().reshape(-1, STREAMS, D)
        return Stream(jnp.einsum("TSD,S->TD", streams, param(self, "end")))


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """Those of ``mixed_family``, with adapters and the weights of streams."""
    specs = [one for spec in mixed_family.param_specs(config) for one in adapted(spec, ADAPTED)]
    ways = (STREAMS * D, 2 * STREAMS + STREAMS**2)
    for i in range(len(config.layers)):
        specs += [_stored(f"layers_{i}/{block}_residual/ways", *ways) for block in ("mixer", "ffn")]
    return (*specs, _stored("residual/end", STREAMS))


def adapted(spec: ParamSpec, names: tuple[str, ...]) -> Iterator[ParamSpec]:
    """The spec, or those of the weight and its adapter if its path ends with one of the names."""
    if not spec.path.endswith(names):
        yield spec
        return
    assert isinstance(spec.arrays, ArraySpec)
    inputs, outputs = spec.arrays.shape
    yield _stored(f"{spec.path}/base", inputs, outputs)
    yield _stored(f"{spec.path}/a", inputs, RANK)
    yield _stored(f"{spec.path}/b", RANK, outputs)


def _stored(path: str, *shape: int) -> ParamSpec:
    return ParamSpec(path, ArraySpec(shape, (None,) * len(shape)), (Source(path, shape),), as_is)


FAMILY = ModelFamily("streams", lambda *_: stream_decoder(), param_specs)


def stream_decoder(*kinds: str) -> DecoderSpec:
    """A decoder; ``kinds`` names the mixer of each layer."""
    return replace(mixed_decoder(*kinds), residual=TwoStreams())


def stream_model(*kinds: str) -> tuple[Model, Params]:
    """A model with these mixers, and random parameters with which every part has an effect."""
    model = Model(FAMILY, "StreamsForTests", stream_decoder(*kinds))
    arrays = built_arrays(model, mixed_tensors(model))
    return model, nested({path: jnp.asarray(array) for path, array in arrays.items()})


def merged(params: Params) -> Params:
    """The parameters with every adapter added to its weight."""

    def each(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "base" in tree:
            return stored(tree).dense(jnp.dtype(jnp.float32))
        return {name: each(one) for name, one in tree.items()}

    return each(params)
