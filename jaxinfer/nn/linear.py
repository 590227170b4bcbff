"""The products of a layer: what is multiplied, and what is fused with it.

A block's result joins the residual stream at the norm that follows, in the same kernel. Until then
the stream is a pair (``Stream``), whose second part may still be split-K partial sums.

Owns: ``Stream``, ``Norm``, and every matrix product of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxinfer.nn.context import StepContext
from jaxinfer.nn.layers import layer_norm, take_rows
from pallas_kernels.norm_gemm.api import norm_gemm
from pallas_kernels.numerics import add_partials
from pallas_kernels.residual_norm.api import residual_norm
from pallas_kernels.skinny_gemm.api import skinny_gemm


class Stream(NamedTuple):
    """The residual stream, and what the last block adds to it."""

    x: jax.Array  # [T, D]
    delta: jax.Array | None = None  # [T, D], or float32[S, T, D]: partial sums; None at the start

    def total(self) -> jax.Array:  # [T, D]
        """Their sum."""
        return self.x if self.delta is None else add_partials(self.x, self.delta)

    def take(self, tokens: jax.Array) -> jax.Array:  # [B, D]
        """The stream of some tokens, whose delta has been added."""
        assert self.delta is None, "a pending delta would be lost"
        return take_rows(self.x, tokens)


@dataclass(frozen=True)
class Norm:
    """One of a layer's norms: row ``row`` of ``weights``; "layer" has its bias in the next row."""

    weights: jax.Array  # [W, D]
    row: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"


def normalised(stream: Stream, norm: Norm, ctx: StepContext) -> tuple[Stream, jax.Array]:
    """The stream with its delta added, and its norm [T, D]."""
    if norm.kind == "layer":
        x = stream.total()
        weight, bias = norm.weights[norm.row], norm.weights[norm.row + 1]
        return Stream(x), layer_norm(x, weight, bias, norm.eps)
    impl = ctx.pinned("residual_norm")
    x, h = residual_norm(*stream, norm.weights, row=norm.row, eps=norm.eps, impl=impl)
    return Stream(x), h


def linear_of_norm(
    stream: Stream,
    norm: Norm,
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    ctx: StepContext,
    *,
    bias: jax.Array | None = None,  # [O]
    swiglu: bool = False,
) -> tuple[Stream, jax.Array]:  # and [T, O]
    """The stream with its delta added, and the product of its norm with ``w``.

    With ``swiglu`` the result is SiLU of the gate times the up, in the same kernel.
    """
    if norm.kind == "layer":
        assert not swiglu, "no kernel has a layer norm and SwiGLU in one"
        stream, h = normalised(stream, norm, ctx)
        return stream, linear(h, w, ctx, bias=bias)
    x, y = norm_gemm(
        *stream, norm.weights, w, row=norm.row, eps=norm.eps, swiglu=swiglu, pins=ctx.pins
    )
    return Stream(x), y if bias is None else y + bias


def linear(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]
    ctx: StepContext,
    *,
    bias: jax.Array | None = None,  # [O]
    partial: bool = False,
) -> jax.Array:  # [T, O], or with partial perhaps float32[S, T, O]
    """``x @ w``. A ``partial`` product joins the residual stream. It may be the partial sums of a
    split-K kernel, which the next norm adds up; a bias needs the whole sum. On a mesh each device
    has a share of ``x``'s columns and ``w``'s rows, and the devices' products are added here.
    """
    split = partial and bias is None and ctx.axis is None
    y = skinny_gemm(x, w, split=split, impl=ctx.pinned("skinny_gemm"))
    if partial and ctx.axis is not None:
        y = jax.lax.psum(y, ctx.axis)
    return y if bias is None else y + bias
