"""Checkpoint tensors of several residual streams, for the families that have them."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from jaxinfer.models.params import ParamSpec, as_is, transposed
from jaxinfer.models.sources import ArraySpec, Source


def stream_specs(
    path: str, source: str, *, width: int, count: int, uses: int
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.residual.Hyper`` or ``Mixed``, with ``count`` weights of so many uses
    of streams that have ``width`` components together.
    """
    wide = jnp.dtype(jnp.float32)
    ways = Source(f"{source}fn", (count, width))
    array = ArraySpec((width, count), (None, None), wide)
    yield ParamSpec(f"{path}ways", array, (ways,), transposed)
    for name, size in (("base", count), ("scale", uses)):
        own = (Source(source + name, (size,)),)
        yield ParamSpec(path + name, ArraySpec((size,), (None,), wide), own, as_is)
