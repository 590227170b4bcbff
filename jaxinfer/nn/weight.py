"""Weights as modules use them: one array, a quantised matrix, parts of several forms, an adapter.

The params tree holds arrays and dicts of arrays. ``stored`` alone decides what they are:

    Dense            an array [I, O]; an embedding is [O, I], a stack of experts [E, O, I]
    QuantisedWeight  the dict of a quantised matrix or stack (``pallas_kernels.lib.quantised``)
    Parts            {"part_0": ..., "part_1": ...}: weights with consecutive outputs
    Adapted          {"base": ..., "a": [I, R], "b": [R, O]}: a weight plus ``a @ b`` (LoRA: Hu et
                     al. 2021, arXiv:2106.09685)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.core.errors import ArgumentError
from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.arrangements import rows_of
from pallas_kernels.lib.quantised import Quantised, is_matrix, quantised
from pallas_kernels.quantised_gemm.api import QuantisedGemmArgs, quantised_gemm
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm

if TYPE_CHECKING:
    import flax.linen as nn  # slow to import, and compiled engines do not need it

    from jaxinfer.nn.context import StepContext


class Matmul(NamedTuple):
    """How a weight multiplies."""

    pins: Pins
    swiglu: bool = False  # outputs are gates, then ups; the result is SiLU(gate) * up [T, O / 2]
    gelu: bool = False  # with swiglu, of a dense weight: GELU by tanh instead of SiLU
    split: bool = False  # the result may be split-K partials float32[S, T, O]
    wide: bool = False  # the result is float32[..., O], for logits
    bias: jax.Array | None = None  # [O], added to the result; not with swiglu or wide


class Weight(ABC):
    """A matrix of I inputs and O outputs, and what modules do with it."""

    # what the kernels take that fuse other operations with the GEMM; None if it is several arrays
    matrix: Any = None
    by_output: bool = False  # its dense form is [O, I], as it is an embedding

    @abstractmethod
    def matmul(
        self,
        x: jax.Array,  # [T, I]; if it is wide [..., I]
        how: Matmul,
    ) -> jax.Array:  # [T, O], but see ``Matmul``
        """``x`` times the matrix, in the dtype of ``x``, accumulated in float32."""

    @property
    def is_dense(self) -> bool:
        """True of one array of floats."""
        return self.matrix is not None and not isinstance(self.matrix, Quantised)

    @property
    def num_outputs(self) -> int:
        """O; known of embeddings, which are one tensor."""
        raise NotImplementedError

    def take(self, ids: jax.Array) -> jax.Array:  # int32[T] -> [T, I]
        """Rows of an embedding, of ids that are clamped to it. Those of a quantised one are
        float32.
        """
        raise NotImplementedError

    def take_of(self, ids: jax.Array, ctx: StepContext) -> jax.Array:
        """``take`` on a mesh, where each device has a part of the rows: those that others have are
        added here.
        """
        if ctx.axis is None:
            return self.take(ids)
        own = ids - jax.lax.axis_index(ctx.axis) * self.num_outputs
        is_own = ((own >= 0) & (own < self.num_outputs))[:, None]
        return ctx.across(jnp.where(is_own, self.take(own), 0))

    @abstractmethod
    def dense(self, dtype: jnp.dtype) -> jax.Array:  # [I, O], or of an embedding [O, I]
        """The weight as one array; it has this dtype if it was quantised."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Weight):
    """One array, stored as ``by_output`` says."""

    matrix: Any
    by_output: bool = field(default=False, metadata=STATIC)

    @property
    def num_outputs(self) -> int:
        """See ``Weight``."""
        return self.matrix.shape[0 if self.by_output else -1]

    def matmul(self, x: jax.Array, how: Matmul) -> jax.Array:
        """See ``Weight``; XLA makes logits, unless a token's bits are fixed."""
        if how.wide and how.pins.invariant:
            flat = x.reshape(-1, x.shape[-1])
            args = GemmArgs(x=flat, w=self.matrix, by_output=self.by_output, wide=True)
            y = skinny_gemm(args, how.pins.of("skinny_gemm"))
            return y.reshape(*x.shape[:-1], -1)
        if how.wide:
            equation = "...D,VD->...V" if self.by_output else "...D,DV->...V"
            return jnp.einsum(equation, x, self.matrix, preferred_element_type=jnp.float32)
        assert not self.by_output, "an embedding is only multiplied for logits"
        static = {"swiglu": how.swiglu, "gelu": how.gelu, "split": how.split}
        args = GemmArgs(x=x, w=self.matrix, bias=how.bias, **static)
        if how.swiglu:
            return swiglu_gemm(args, how.pins.of("swiglu_gemm"))
        return skinny_gemm(args, how.pins.of("skinny_gemm"))

    def take(self, ids: jax.Array) -> jax.Array:
        """See ``Weight``."""
        assert self.by_output
        return take_rows(self.matrix, ids)

    def dense(self, dtype: jnp.dtype) -> jax.Array:
        """See ``Weight``."""
        del dtype
        return self.matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight(Weight):
    """A quantised matrix, or a stack of them, which is always stored [O, I]."""

    matrix: Quantised
    by_output: bool = field(default=False, metadata=STATIC)

    @property
    def num_outputs(self) -> int:
        """See ``Weight``."""
        return self.matrix.num_outputs

    def matmul(self, x: jax.Array, how: Matmul) -> jax.Array:
        """See ``Weight``."""
        flat = x.reshape(-1, x.shape[-1]) if how.wide else x
        split = how.split and how.bias is None  # these kernels add it to whole sums
        static = {"swiglu": how.swiglu, "split": split, "wide": how.wide}
        args = QuantisedGemmArgs(x=flat, w=self.matrix, bias=how.bias, **static)
        y = quantised_gemm(args, how.pins.of("quantised_gemm"))
        return y.reshape(*x.shape[:-1], -1) if how.wide else y

    def take(self, ids: jax.Array) -> jax.Array:
        """See ``Weight``."""
        return rows_of(self.matrix, ids)

    def dense(self, dtype: jnp.dtype) -> jax.Array:
        """See ``Weight``; a stack is dequantised matrix by matrix, which takes less memory."""

        def rows(one: Quantised) -> jax.Array:
            return rows_of(one, jnp.arange(one.num_outputs, dtype=jnp.int32)).astype(dtype)

        if self.matrix.is_stack:
            return jax.lax.map(rows, self.matrix)
        return rows(self.matrix) if self.by_output else rows(self.matrix).T


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts(Weight):
    """Weights with consecutive outputs, of several forms."""

    parts: tuple[Weight, ...]

    def matmul(self, x: jax.Array, how: Matmul) -> jax.Array:
        """See ``Weight``; parts multiply one by one, and their result is not split."""
        own = how._replace(swiglu=False, split=False, bias=None)
        y = jnp.concatenate([part.matmul(x, own) for part in self.parts], axis=-1)
        y = y if how.bias is None else y + how.bias
        return _swiglu(y) if how.swiglu else y

    def dense(self, dtype: jnp.dtype) -> jax.Array:
        """See ``Weight``."""
        axis = 0 if self.parts[0].by_output else 1
        return jnp.concatenate([part.dense(dtype) for part in self.parts], axis=axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted(Weight):
    """A weight with an addend of low rank; the adapter's scale is part of ``b``."""

    base: Weight
    a: jax.Array  # [I, R]
    b: jax.Array  # [R, O]

    @property
    def num_outputs(self) -> int:
        """See ``Weight``."""
        return self.base.num_outputs

    def matmul(self, x: jax.Array, how: Matmul) -> jax.Array:
        """See ``Weight``; the addend is one more of split-K partials, and else added in float32."""
        y = self.base.matmul(x, how._replace(swiglu=False))
        if how.pins.invariant:
            of_b = Matmul(how.pins, wide=True)
            addend = Dense(self.b).matmul(Dense(self.a).matmul(x, Matmul(how.pins)), of_b)
        else:
            addend = jnp.matmul(x @ self.a, self.b, preferred_element_type=jnp.float32)
        if y.ndim > x.ndim:
            return jnp.concatenate([y, addend[None]])
        y = (y.astype(jnp.float32) + addend).astype(y.dtype)
        return _swiglu(y) if how.swiglu else y

    def take(self, ids: jax.Array) -> jax.Array:
        """See ``Weight``."""
        return self.base.take(ids) + take_rows(self.b.T, ids) @ self.a.T

    def dense(self, dtype: jnp.dtype) -> jax.Array:
        """See ``Weight``."""
        addend = self.a @ self.b
        return self.base.dense(dtype) + (addend.T if self.base.by_output else addend).astype(dtype)


def stored(tree: Any, *, by_output: bool = False) -> Weight:
    """The weight that is stored so; ``by_output`` says that it is an embedding."""
    if not isinstance(tree, Mapping):
        return Dense(tree, by_output)
    if is_matrix(tree):
        return QuantisedWeight(quantised(tree), by_output)
    if "base" in tree:
        return Adapted(stored(tree["base"], by_output=by_output), tree["a"], tree["b"])
    names = [f"part_{i}" for i in range(len(tree))]  # by number, which is not their sorted order
    return Parts(tuple([stored(tree[name], by_output=by_output) for name in names]))


def tree_of_parts(parts: Sequence[Any]) -> Any:
    """The stored form of parts; that of a single one is its own."""
    return parts[0] if len(parts) == 1 else {f"part_{i}": part for i, part in enumerate(parts)}


def is_quantised(tree: Any) -> bool:
    """True for the stored form of one quantised matrix, or of a stack: a leaf of the params tree
    for functions of whole matrices.
    """
    return isinstance(tree, Mapping) and is_matrix(tree)


def matrices(params: Any) -> list[Any]:
    """All arrays of a params tree, those of a quantised matrix or stack as one ``Quantised``."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return [quantised(leaf) if is_quantised(leaf) else leaf for leaf in leaves]


def param(module: nn.Module, name: str) -> Any:
    """A module's parameter as it is stored. Modules declare no shapes: ``models`` does.

    Raises ``ArgumentError`` if the params tree has no such parameter.
    """
    if not module.has_variable("params", name):
        path = "/".join((*module.path, name))
        raise ArgumentError(f"params have no {path}; give the whole tree of parameters")
    return module.get_variable("params", name)


def weight(module: nn.Module, name: str, *, by_output: bool = False) -> Weight:
    """A module's weight; ``by_output`` says that it is an embedding."""
    return stored(param(module, name), by_output=by_output)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:  # [V, ...], int32[T] -> [T, ...]
    """Rows of an array; ids of padding may have any value and are clamped to it."""
    return jnp.take(table, ids, axis=0, mode="clip")


def _swiglu(y: jax.Array) -> jax.Array:  # [T, 2 * O]: gate, up -> [T, O]
    gate, up = jnp.split(y, 2, axis=1)
    return jax.nn.silu(gate) * up
