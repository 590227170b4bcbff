"""The GEMMs of a decoder with the operations fused with them, norms, embedding and head.

A block's output is added to the residual stream by the kernel of the next norm. Until then the
stream is a pair (``Stream``), whose second part may still be split-K partials. Statistics of norms
and logits are float32 for every dtype; other results keep the input's dtype.

A weight is an array [I, O], the dict of arrays of a quantised matrix
(``pallas_kernels.quantised``), or a dict of such parts with consecutive outputs: see ``Weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.context import StepContext
from pallas_kernels.arrangements import rows_of
from pallas_kernels.norm_gemm.api import NormGemmArgs, norm_gemm
from pallas_kernels.numerics import add_partials
from pallas_kernels.pins import Pins
from pallas_kernels.quantised import is_matrix, quantised
from pallas_kernels.quantised_gemm.api import QuantisedGemmArgs, quantised_gemm
from pallas_kernels.quantised_mlp.api import MlpArgs, quantised_mlp
from pallas_kernels.residual_norm.api import NormArgs, residual_norm
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm

if TYPE_CHECKING:
    import flax.linen as nn  # slow to import, and compiled engines do not need it

# [I, O], or the arrays of a quantised matrix by name, or parts of it: "part_0", "part_1", ...
type Weight = jax.Array | Mapping[str, Any]
_INIT = jax.nn.initializers.normal(0.02)


def weight(module: nn.Module, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Weight:
    """A module's weight as it is stored; a new one is an array of this shape."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, _INIT, shape, dtype)  # type: ignore[no-any-return]


def dense_weight(
    w: Weight, dtype: jnp.dtype, *, rows: bool = False
) -> jax.Array:  # [I, O], or with rows [O, I]
    """A weight as one array, dequantised to ``dtype`` if it is quantised.

    ``rows``: the weight is an embedding, which is stored [O, I] also if it is not quantised. So are
    the matrices of a stack of experts, which is [E, O, I].
    """
    if not isinstance(w, Mapping):
        return w
    if "part_0" in w:
        parts = [dense_weight(w[f"part_{i}"], dtype, rows=rows) for i in range(len(w))]
        return jnp.concatenate(parts, axis=0 if rows else 1)
    matrix = quantised(w)
    if matrix.values.ndim == 3:  # one matrix after the other, which takes less memory
        return jax.lax.map(lambda one: dense_weight(one, dtype, rows=True), dict(w))
    found = rows_of(matrix, jnp.arange(matrix.num_outputs, dtype=jnp.int32)).astype(dtype)
    return found if rows else found.T


def added(
    a: jax.Array, b: jax.Array
) -> jax.Array:  # [T, D] or float32[S, T, D] each -> [T, D] or float32[S, T, D]
    """The sum of two deltas of a ``Stream``, in float32."""
    if a.ndim == b.ndim == 2:
        return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)
    both = (one if one.ndim == 3 else one[None].astype(jnp.float32) for one in (a, b))
    return jnp.concatenate([*both])


class Stream(NamedTuple):
    """The residual stream, and the last block's output, which has not been added yet."""

    x: jax.Array  # [T, D]
    delta: jax.Array | None = None  # [T, D], or split-K partials float32[S, T, D]; None at first

    def total(self) -> jax.Array:  # [T, D]
        """The sum of both."""
        return self.x if self.delta is None else add_partials(self.x, self.delta)

    def take(self, tokens: jax.Array) -> jax.Array:  # [B, D]
        """The stream for a subset of the tokens; the delta must have been added."""
        assert self.delta is None, "a pending delta would be lost"
        return take_rows(self.x, tokens)


@dataclass(frozen=True)
class Norm:
    """One of a layer's norms: row ``row`` of ``weights``; "layer" has its bias in the next row.

    "none" stands for the norm before a block that has none; it changes nothing.
    """

    weights: jax.Array  # [W, D]
    row: int
    eps: float
    kind: Literal["rms", "layer", "none"] = "rms"


def normalised(stream: Stream, norm: Norm, ctx: StepContext) -> tuple[Stream, jax.Array]:
    """The stream with its delta added, and its norm [T, D]."""
    if norm.kind == "none":
        return Stream(x := stream.total()), x
    if norm.kind == "layer":
        x = stream.total()
        weight, bias = norm.weights[norm.row], norm.weights[norm.row + 1]
        return Stream(x), layer_norm(x, weight, bias, norm.eps)
    args = NormArgs(
        x=stream.x, partials=stream.delta, weights=norm.weights, row=norm.row, eps=norm.eps
    )
    x, h = residual_norm(args, ctx.pinned("residual_norm"))
    return Stream(x), h


def linear_of_norm(
    stream: Stream,
    norm: Norm,
    w: Weight,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    ctx: StepContext,
    *,
    bias: jax.Array | None = None,  # [O]
    swiglu: bool = False,
) -> tuple[Stream, jax.Array]:  # and [T, O]
    """The stream with its delta added, and its norm multiplied by ``w``.

    With ``swiglu`` the result is SiLU(gate) * up, in the same kernel.
    """
    if norm.kind != "rms" or (isinstance(w, Mapping) and "part_0" in w):
        stream, h = normalised(stream, norm, ctx)
        y = product(h, w, ctx, swiglu=swiglu)
        return stream, y if bias is None else y + bias
    matrix = quantised(w) if isinstance(w, Mapping) else w
    before = NormArgs(
        x=stream.x, partials=stream.delta, weights=norm.weights, row=norm.row, eps=norm.eps
    )
    x, y = norm_gemm(NormGemmArgs(norm=before, w=matrix, swiglu=swiglu, pins=ctx.pins))
    return Stream(x), y if bias is None else y + bias


def swiglu_mlp(
    stream: Stream,
    norm: Norm,
    gate_up: Weight,  # [D, 2 * F]
    down: Weight,  # [F, D]
    ctx: StepContext,
) -> tuple[Stream, jax.Array]:  # and [T, D] or float32[S, T, D]
    """The stream with its delta added, and SwiGLU of its norm times ``down``, a ``partial`` result
    of ``linear``.
    """
    matrices = [quantised(w) for w in (gate_up, down) if isinstance(w, Mapping) and is_matrix(w)]
    if len(matrices) < 2 or len(stream.x) == 1:  # for one token ``norm_gemm`` has a kernel
        stream, hidden = linear_of_norm(stream, norm, gate_up, ctx, swiglu=True)
        return stream, linear(hidden, down, ctx, partial=True)
    stream, h = normalised(stream, norm, ctx)
    first, second = matrices
    y = quantised_mlp(
        MlpArgs(x=h, gate_up=first, down=second, split=ctx.axis is None, pins=ctx.pins)
    )
    return stream, y if ctx.axis is None else jax.lax.psum(y, ctx.axis)


def linear(
    x: jax.Array,  # [T, I]
    w: Weight,  # [I, O]
    ctx: StepContext,
    *,
    bias: jax.Array | None = None,  # [O]
    partial: bool = False,
) -> jax.Array:  # [T, O], or with partial perhaps float32[S, T, O]
    """``x @ w``, plus the bias.

    A ``partial`` result is the delta of a ``Stream``. It may be the partials of a split-K kernel,
    which the next norm adds; with a bias it is the whole sum. On a mesh each device has a part of
    ``x``'s columns and ``w``'s rows, and the devices' partial results are added here.
    """
    split = partial and bias is None and ctx.axis is None
    y = product(x, w, ctx, split=split)
    if partial and ctx.axis is not None:
        y = jax.lax.psum(y, ctx.axis)
    return y if bias is None else y + bias


def product(
    x: jax.Array,  # [T, I]
    w: Weight,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    ctx: StepContext,
    *,
    swiglu: bool = False,
    split: bool = False,
) -> jax.Array:  # [T, O], or with split perhaps float32[S, T, O]
    """``x @ w``, with ``swiglu`` SiLU(gate) * up."""
    if not isinstance(w, Mapping):
        if swiglu:
            return swiglu_gemm(GemmArgs(x=x, w=w, swiglu=True), ctx.pinned("swiglu_gemm"))
        return skinny_gemm(GemmArgs(x=x, w=w, split=split), ctx.pinned("skinny_gemm"))
    if "part_0" in w:  # several forms
        parts = (
            w[f"part_{i}"] for i in range(len(w))
        )  # by number, which is not their sorted order
        y = jnp.concatenate([product(x, part, ctx) for part in parts], axis=1)
        if swiglu:
            gate, up = jnp.split(y, 2, axis=1)
            y = jax.nn.silu(gate) * up
        return y
    args = QuantisedGemmArgs(x=x, w=quantised(w), swiglu=swiglu, split=split)
    return quantised_gemm(args, ctx.pinned("quantised_gemm"))


@partial(jax.jit, static_argnames="eps")  # the same bits outside ``jax.jit``
def layer_norm(
    x: jax.Array,  # [..., D]
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
) -> jax.Array:  # [..., D]
    """Layer normalisation over the last axis (Ba, Kiros and Hinton 2016)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    scaled = centred * scale * weight.astype(jnp.float32)
    return (scaled + bias.astype(jnp.float32)).astype(x.dtype)


def take_rows(
    table: Weight,  # [V, D]
    ids: jax.Array,  # int32[T]
    axis: str | None = None,
) -> jax.Array:  # [T, D]
    """Rows of an embedding; those of a quantised one are float32.

    Ids of padding may have any value and are clamped to the table. On a mesh each device has a part
    of the rows, and the rows that others have are added here.
    """
    if axis is None:
        return _rows(table, ids)
    count = quantised(table).num_outputs if isinstance(table, Mapping) else len(table)
    own = ids - jax.lax.axis_index(axis) * count
    rows = _rows(table, own)
    return jax.lax.psum(jnp.where(((own >= 0) & (own < count))[:, None], rows, 0), axis)


def _rows(table: Weight, ids: jax.Array) -> jax.Array:  # [V, D], int32[T] -> [T, D]
    if isinstance(table, Mapping):
        return rows_of(quantised(table), ids)
    return jnp.take(table, ids, axis=0, mode="clip")


def head_logits(
    hidden: jax.Array,  # [..., D]
    head: Weight,  # [D, V]
    pins: Pins,
) -> jax.Array:  # float32[..., V]
    """Logits of an untied head."""
    if isinstance(head, Mapping):
        flat = hidden.reshape(-1, hidden.shape[-1])
        args = QuantisedGemmArgs(x=flat, w=quantised(head), wide=True)
        flat = quantised_gemm(args, pins.of("quantised_gemm"))
        return flat.reshape(*hidden.shape[:-1], -1)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def tied_logits(
    hidden: jax.Array,  # [..., D]
    embed: Weight,  # [V, D]
    pins: Pins,
) -> jax.Array:  # float32[..., V]
    """Logits of a head tied to the embedding, which is not transposed."""
    if isinstance(embed, Mapping):  # stored [V, D] in any case
        return head_logits(hidden, embed, pins)
    return jnp.einsum("...D,VD->...V", hidden, embed, preferred_element_type=jnp.float32)
