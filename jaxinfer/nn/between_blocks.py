"""The points between a decoder's blocks: the residual stream, and blocks' outputs with norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Carried, Norm, Outputs, Stream, normalised, outputs_of, whole
from jaxinfer.nn.weight import take_rows


def at_point(point: str, stream: Stream, ctx: StepContext) -> Stream:
    """The stream at a point; it stays as it is unless it is replaced.

    A shift is added to the output that is still to be added, so that for tokens without one the
    next kernel adds what it adds without points, in its own order.
    """
    if not ctx.uses(point):
        return stream
    if stream.delta is None or isinstance(stream.delta, Outputs):
        stream = Stream(ctx.shifted(point, stream.total(ctx.pins)))
    else:
        stream = Stream(stream.x, ctx.shifted(point, whole(stream.delta)))
    total = stream.total()
    new = ctx.seen(point, total)
    return stream if new is total else Stream(new)


def without_block(
    point: str,
    stream: Stream,
    ctx: StepContext,
    only: jax.Array | None = None,  # int32[B]
) -> Stream:
    """The stream after a block that the layer does not have, whose output is zeros."""
    if only is not None:
        stream = Stream(take_rows(stream.total(ctx.pins), only))
    if not ctx.uses(point):
        return stream
    x = stream.total(ctx.pins)
    return Stream(x, output(point, x, jnp.zeros_like(x), None, ctx))


def output(point: str, x: jax.Array, delta: Any, post: Norm | None, ctx: StepContext) -> Any:
    """A block's output with the block's post norm if there is one; ``x`` is its input."""
    if isinstance(delta, Carried):
        return replace(delta, output=output(point, x, delta.output, post, ctx))
    if post is not None and post.kind == "rms":
        delta = outputs_of(delta, post)
    elif post is not None:
        _, delta = normalised(Stream(jnp.zeros_like(x), delta), post, ctx)
    if isinstance(delta, Outputs):
        delta = delta.alone(x, ctx) if ctx.uses(point) else delta
    if isinstance(delta, Outputs) or not ctx.uses(point):
        return delta
    delta = ctx.shifted(point, whole(delta))
    total = Stream(jnp.zeros_like(x), delta).total()
    new = ctx.seen(point, total)
    return delta if new is total else new
