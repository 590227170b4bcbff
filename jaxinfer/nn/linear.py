"""The residual stream, its norms, and its GEMMs with the operations fused with them.

A block's output is added to the residual stream by the kernel of the next norm. Until then the
stream is a pair (``Stream``), whose second part may still be split-K partials, what each device has
of it (``Addends``), or outputs that are normalised before they are added (``Outputs``). Statistics
of norms are float32 for every dtype; results keep the input's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Addends, PlainOutput, StepContext
from jaxinfer.nn.layer_spec import NormKind
from jaxinfer.nn.weight import Matmul, Weight, take_rows
from pallas_kernels.all_reduce.api import Peers
from pallas_kernels.all_reduce_norm.api import AllReduceNormArgs, all_reduce_norm, is_fused
from pallas_kernels.harness.pins import ALL_XLA, Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.numerics import add_partials, mean_last, rms_norm
from pallas_kernels.norm_gemm.api import NormGemmArgs, norm_gemm
from pallas_kernels.residual_norm.api import NormArgs, residual_norm
from pallas_kernels.sandwich_norm.api import SandwichArgs, sandwich_norm
from pallas_kernels.sandwich_norm.ref import NormRow


def whole(output: PlainOutput) -> jax.Array:  # [T, D] or float32[S, T, D]
    """A block's output, of all devices if each has a part of it."""
    return output.summed() if isinstance(output, Addends) else output


def added(a: PlainOutput, b: PlainOutput) -> PlainOutput:
    """The sum of two deltas of a ``Stream``.

    If each device has a part of both, these are added first, so that there is one sum over devices.
    """
    if isinstance(a, Addends) and isinstance(b, Addends):
        return replace(a, partials=added_partials(a.partials, b.partials))
    return added_partials(whole(a), whole(b))


def scaled(output: PlainOutput, factor: float) -> PlainOutput:
    """A block's output times a factor; what each device has of it is multiplied alike."""
    if factor == 1.0:
        return output
    if isinstance(output, Addends):
        return replace(output, partials=output.partials * factor)
    return output * factor


def added_partials(
    a: jax.Array, b: jax.Array
) -> jax.Array:  # [T, D] or float32[S, T, D] each -> [T, D] or float32[S, T, D]
    """The sum of two blocks' outputs, in float32."""
    if a.ndim == b.ndim == 2:
        return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)
    both = (one if one.ndim == 3 else one[None].astype(jnp.float32) for one in (a, b))
    return jnp.concatenate([*both])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """One of a layer's norms: row ``row`` of ``weights``; "layer" has its bias in the next row.

    "layer_plain" has no weights. "none" also stands for the norm before a block that has none.
    """

    weights: jax.Array | None  # [W, D]
    row: int = field(metadata=STATIC)
    eps: float = field(metadata=STATIC)
    kind: NormKind = field(default="rms", metadata=STATIC)
    groups: int = field(default=1, metadata=STATIC)

    def args(self, stream: Stream) -> NormArgs:
        """An RMS norm of a stream as the argument of its kernels; makes the sum over devices."""
        assert not isinstance(stream.delta, Outputs)
        return self._of(stream.x, None if stream.delta is None else whole(stream.delta))

    def fused_args(self, stream: Stream, *, before_gemm: bool = True) -> AllReduceNormArgs | None:
        """The same with the sum over devices, if a kernel does both; else None."""
        if self.kind != "rms" or not isinstance(own := stream.delta, Addends):
            return None
        args = AllReduceNormArgs(
            norm=self._of(stream.x, own.partials),
            peers=own.peers,
            axis=own.axis,
            before_gemm=before_gemm,
            pins=own.pins,
        )
        return args if is_fused(args) else None

    def joins_gemm(self, stream: Stream) -> bool:
        """True if ``norm_gemm`` is to add, normalise and multiply, rather than kernels in turn."""
        plain = self.kind == "rms" and not isinstance(stream.delta, Outputs)
        return plain and self.fused_args(stream) is None

    def _of(self, x: jax.Array, partials: jax.Array | None) -> NormArgs:
        assert self.weights is not None, "of an RMS norm"
        return NormArgs(x=x, partials=partials, weights=self.weights, row=self.row, eps=self.eps)

    def as_none(self) -> Norm:
        """The norm before a block whose input has been normalised."""
        return replace(self, kind="none")

    def affine(self) -> tuple[jax.Array | None, jax.Array | None]:  # [D] each
        """The weight and the bias of a LayerNorm."""
        if self.weights is None:
            return None, None
        has_bias = self.kind == "layer"
        return self.weights[self.row], self.weights[self.row + 1] if has_bias else None

    @property
    def place(self) -> NormRow:
        """An RMS norm's row as kernels take it."""
        assert self.weights is not None
        return NormRow(self.weights, self.row)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """Outputs of one or two blocks, with RMS norms that are applied before they are added.

    ``norms`` are those of each output, ``post`` is that of their sum. The stream with their sum is
    multiplied by ``factor``.
    """

    parts: tuple[jax.Array, ...]  # [T, D], or split-K partials float32[S, T, D]
    norms: tuple[Norm | None, ...]
    post: Norm | None = None
    factor: jax.Array | None = None  # [1]

    def added_to(self, x: jax.Array, norms: Sequence[Norm], pins: Pins) -> SandwichArgs:
        """The arguments of ``sandwich_norm`` for the stream ``x`` and the norms of the sum."""
        of_parts = tuple([norm and norm.place for norm in self.norms])
        (output_eps,) = {norm.eps for norm in (*self.norms, self.post) if norm is not None}
        (eps,) = {norm.eps for norm in norms} or {output_eps}
        return SandwichArgs(
            x=x,
            outputs=self.parts,
            output_norms=of_parts,
            post=self.post and self.post.place,
            factor=self.factor,
            norms=tuple([norm.place for norm in norms]),
            eps=eps,
            output_eps=output_eps,
            pins=pins,
        )

    def alone(self, x: jax.Array, ctx: StepContext) -> jax.Array:  # [T, D]
        """The sum of the outputs after their norms; ``x`` is the stream, to which it is added."""
        assert self.factor is None, "it is that of the stream"
        return sandwich_norm(self.added_to(jnp.zeros_like(x), (), ctx.pins))[0]


# A block's output: [T, D], split-K partials float32[S, T, D], of several devices, or with norms
type BlockOutput = PlainOutput | Outputs


@dataclass(frozen=True)
class Carried:
    """A block's output, and one that a later block adds to the stream: see ``nn.ffn.shortcut``."""

    output: BlockOutput
    later: jax.Array  # [T, D]


def outputs_of(delta: BlockOutput, post: Norm) -> Outputs:
    """A block's output with this norm after those that it has."""
    if isinstance(delta, Outputs):
        assert delta.post is None, "a block's output has one post norm"
        return replace(delta, post=post)
    return Outputs((whole(delta),), (None,), post)


class Stream(NamedTuple):
    """The residual stream, and the last block's output, which has not been added yet."""

    x: jax.Array  # [T, D]
    delta: BlockOutput | None = None  # None at first

    def with_peers(self, peers: Peers | None) -> Stream:
        """The stream whose sum over the devices is to be made in this exchange memory.

        A compiled function can have the Ref in ``peers`` as one argument, and cannot return it.
        """
        if not isinstance(own := self.delta, Addends):
            return self
        return self._replace(delta=replace(own, peers=peers))

    def total(self, pins: Pins = ALL_XLA) -> jax.Array:  # [T, D]
        """The sum of both; ``pins`` count for ``Outputs``."""
        if self.delta is None:
            return self.x
        if not isinstance(self.delta, Outputs):
            return add_partials(self.x, whole(self.delta))
        return sandwich_norm(self.delta.added_to(self.x, (), pins))[0]

    def take(self, tokens: jax.Array) -> jax.Array:  # [B, D]
        """The stream for a subset of the tokens; the delta must have been added."""
        assert self.delta is None, "a pending delta would be lost"
        return take_rows(self.x, tokens)


def normalised(
    stream: Stream, norm: Norm | None, ctx: StepContext, *, before_gemm: bool = True
) -> tuple[Stream, jax.Array]:  # and [T, D]
    """The stream with its delta added, and its norm, or with no norm itself.

    ``before_gemm``: a kernel that multiplies it by a weight is next, not a router.
    """
    if norm is None or norm.kind == "none":
        return Stream(x := stream.total(ctx.pins)), x
    if isinstance(stream.delta, Outputs) and norm.kind == "rms":
        stream, (h,) = normalised_by(stream, (norm,), ctx)
        return stream, h
    if norm.kind == "rms_groups":
        x = stream.total(ctx.pins)
        return Stream(x), _group_norm(x, norm, fixed=ctx.pins.invariant)
    if norm.kind != "rms":
        x = stream.total(ctx.pins)
        return Stream(x), layer_norm(x, *norm.affine(), norm.eps, fixed=ctx.pins.invariant)
    if (args := norm.fused_args(stream, before_gemm=before_gemm)) is not None:
        x, h = all_reduce_norm(args)
    else:
        x, h = residual_norm(norm.args(stream), ctx.pinned("residual_norm"))
    return Stream(x), h


def _group_norm(x: jax.Array, norm: Norm, *, fixed: bool) -> jax.Array:  # [T, D] -> [T, D]
    """An RMS norm of each of ``norm.groups`` groups of adjacent components."""
    assert norm.weights is not None, "of an RMS norm"
    parts = x.reshape(len(x), norm.groups, -1)
    weights = norm.weights[norm.row].reshape(norm.groups, -1)
    return rms_norm(parts, weights, norm.eps, fixed=fixed).reshape(x.shape)


def normalised_by(
    stream: Stream, norms: Sequence[Norm], ctx: StepContext
) -> tuple[Stream, tuple[jax.Array, ...]]:  # and [T, D] each
    """The stream with its delta added, and its RMS norms; in one kernel if it has ``Outputs``."""
    if isinstance(stream.delta, Outputs):
        total, found = sandwich_norm(stream.delta.added_to(stream.x, norms, ctx.pins))
        return Stream(total), found
    found = []
    for norm in norms:
        stream, h = normalised(stream, norm, ctx)
        found.append(h)
    return stream, tuple(found)


class Result(NamedTuple):
    """The results of ``linear``."""

    y: jax.Array  # [T, O]; a partial result may be float32[S, T, O]
    stream: Stream  # with its delta added
    h: Any = None  # [T, I]: the tokens that were multiplied, if they were to be kept


def linear(
    x: Stream | jax.Array,  # [T, I]
    w: Weight,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    ctx: StepContext,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,  # [O]
    swiglu: bool = False,
    gelu: bool = False,
    partial: bool = False,
    keep: bool = False,
) -> Result:
    """``x`` times the weight, plus the bias; with a norm, the norm of ``x`` times the weight.

    With ``swiglu`` the result is SiLU(gate) * up, in the same kernel, and with ``gelu`` as well
    GELU(gate) * up, of a dense weight. ``keep`` returns the
    normalised tokens, too, which is a kernel more.

    A ``partial`` result may be the partials of a split-K kernel, which the caller adds.
    """
    stream, h = x if isinstance(x, Stream) else Stream(x), None
    inside = None if swiglu else bias  # of the GEMM
    if norm is not None and w.matrix is not None and not keep and norm.joins_gemm(stream):
        args = NormGemmArgs(
            norm=norm.args(stream),
            w=w.matrix,
            bias=inside,
            swiglu=swiglu,
            gelu=gelu,
            pins=ctx.pins,
        )
        total, y = norm_gemm(args)
        stream = Stream(total)
    else:
        stream, h = normalised(stream, norm, ctx)
        split = partial and ctx.splits
        how = Matmul(ctx.pins, swiglu=swiglu, gelu=gelu, split=split, bias=inside)
        y = w.matmul(h, how)
    if inside is None and bias is not None:
        y = y + bias
    return Result(y, stream, h if keep else None)


def block_output(
    x: jax.Array,  # [T, I]
    w: Weight,  # [I, D]
    ctx: StepContext,
    *,
    bias: jax.Array | None = None,  # [D]
) -> PlainOutput:  # [T, D] or float32[S, T, D]
    """``x`` times a block's last weight, plus the bias: the delta of a ``Stream``.

    It may be the partials of a split-K kernel, which the next norm adds. On a mesh each device has
    a part of ``x``'s columns and of the weight's inputs; with a bias it is then the whole sum.
    """
    if bias is not None and ctx.axis is not None:
        return ctx.across(linear(x, w, ctx).y) + bias
    return ctx.addends(linear(x, w, ctx, bias=bias, partial=True).y)


def divided_rms_norm(
    x: jax.Array,  # [T, D]
    weight: jax.Array,  # [D]
    eps: float,
    ctx: StepContext,
) -> jax.Array:  # [T, D]
    """An RMS norm of columns of which each device has an equal part; see ``StepContext.axis``."""
    return divided_rms_norms((x,), (weight,), eps, ctx)[0]


def divided_rms_norms(
    parts: Sequence[jax.Array],  # [T, D] each
    weights: Sequence[jax.Array],  # [D] each
    eps: float,
    ctx: StepContext,
) -> list[jax.Array]:  # [T, D] each
    """``divided_rms_norm`` of several arrays, with one sum over the devices."""
    wide = [x.astype(jnp.float32) for x in parts]
    means = [mean_last(jnp.square(x), fixed=ctx.pins.invariant) for x in wide]
    if ctx.axis is not None:
        means = jnp.split(ctx.mean_across(jnp.concatenate(means, axis=1)), len(means), axis=1)
    scaled = [x * jax.lax.rsqrt(mean + eps) for x, mean in zip(wide, means, strict=True)]
    given = zip(scaled, weights, parts, strict=True)
    return [(x * weight.astype(jnp.float32)).astype(own.dtype) for x, weight, own in given]


def above_cutoff(x: jax.Array, cutoff: float, ctx: StepContext) -> jax.Array:  # [T, F]
    """The part above the mean plus ``cutoff`` standard deviations, and else 0; several devices have
    equal parts of the columns.
    """

    def mean_of(y: jax.Array) -> jax.Array:  # [T, 1]
        return ctx.mean_across(mean_last(y, fixed=ctx.pins.invariant))

    x32 = x.astype(jnp.float32)
    mean = mean_of(x32)
    deviation = jnp.sqrt(mean_of(jnp.square(x32 - mean)))
    return jax.nn.relu(x32 - (mean + deviation * cutoff)).astype(x.dtype)


@partial(jax.jit, static_argnames=("eps", "fixed"))  # the same bits outside ``jax.jit``
def layer_norm(
    x: jax.Array,  # [..., D]
    weight: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [D]
    eps: float,
    *,
    fixed: bool = False,  # see ``numerics.sum_last``
) -> jax.Array:  # [..., D]
    """Layer normalisation over the last axis (Ba, Kiros and Hinton 2016); the weight, the bias or
    both may be absent.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - mean_last(x32, fixed=fixed)
    scale = jax.lax.rsqrt(mean_last(jnp.square(centred), fixed=fixed) + eps)
    y = centred * scale
    y = y if weight is None else y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
