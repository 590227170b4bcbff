"""Quantised weight matrices: the arrays that hold one, its values, and the packing of nibbles.

A matrix has O outputs and K inputs and is stored as [O, K], as checkpoints are: one output's inputs
are contiguous. In the params tree it is a dict of arrays. The name of its values is its kind:

    int4   uint8[O, K / 2]           two unsigned values a byte, see ``pack_nibbles``
    int8   int8[O, K]
    fp8    float8_e4m3fn[O, K]
    fp4    uint8[O, K / 2]           e2m1 (OCP MX formats 1.0), packed as int4

Besides it there are ``scales`` and perhaps one of ``zeros`` and ``offsets``, [O, G] each: inputs
are divided into G groups of equal length. With ``supers`` [O, S, 1 or 2] scales (and offsets) are
integers that these floats multiply (GGUF's K forms). The weight of a stored value v is

    scale * (v - zero) + offset      zero: ``zeros``; else 8 for int4 without ``offsets``; else 0

An fp8 matrix with scales alone may have [O / B, G] of them: each is that of a block of B outputs.

A kernel may read the arrays in another order: see ``arrangements``. The kind then has the name of
the order behind it, such as ``int4_tiles``. A matrix with supers in tiles is one array of records
(``quantised_gemm.tiled.records``), and the rest of its form is in the array's name, such as
``int4_tiles_32_256_uint8_offsets``: group, super_group, dtype of scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC

KINDS = ("int4", "int8", "fp8", "fp4")
PACKED = ("int4", "fp4")  # two values a byte
MIDDLE = 8  # the zero of int4 without zeros and offsets
# e2m1: the magnitudes of the lowest three bits; the fourth bit is the sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# the dtypes of values that are not packed
_WIDE = MappingProxyType({"int8": "int8", "fp8": "float8_e4m3fn"})
_PARTS = ("scales", "zeros", "offsets", "supers")


@dataclass(frozen=True)
class Form:
    """How a matrix is quantised: everything but its size. Matrices of one form can be joined."""

    kind: str  # one of KINDS
    group: int | None  # inputs that share a scale; None: all of a row
    scale_dtype: str
    zeros: bool = False
    offsets: bool = False  # in the dtype of the scales
    super_group: int | None = None  # inputs that share a super, float16
    block_outputs: int = 1  # outputs that share scales; more only in fp8 with scales alone

    def arrays(self, num_outputs: int, num_inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of ``Quantised.tree``.

        Raises ValueError if groups do not divide the inputs, or blocks the outputs.
        """
        o, k, group = num_outputs, num_inputs, self.group or num_inputs
        for length in (group, self.super_group or group, 32 if self.kind in PACKED else 1):
            if k % length:
                raise ValueError(f"{k} inputs are not a multiple of {length}")
        if o % self.block_outputs:
            raise ValueError(f"{o} outputs are not a multiple of {self.block_outputs}")
        groups = (o // self.block_outputs, k // group)
        made: dict[str, tuple[tuple[int, ...], str]] = {
            self.kind: ((o, k // 2), "uint8")
            if self.kind in PACKED
            else ((o, k), _WIDE[self.kind]),
            "scales": (groups, self.scale_dtype),
        }
        if self.zeros:
            made["zeros"] = (groups, "uint8")
        if self.offsets:
            made["offsets"] = (groups, self.scale_dtype)
        if self.super_group is not None:
            made["supers"] = ((o, k // self.super_group, 1 + self.offsets), "float16")
        return made

    def ordered(self, order: np.ndarray) -> Form:
        """The form of a matrix with its outputs in this order, ``Quantised.rows``.

        Each output has scales of its own if some leave the block with which they share them.
        """
        block = self.block_outputs
        if block == 1 or whole_blocks(order, block) is not None:
            return self
        return replace(self, block_outputs=1)

    def __str__(self) -> str:
        """The form as users see it, such as "int4 g128" or "fp8 128x128"."""
        groups = "per row" if self.group is None else f"g{self.group}"
        if self.block_outputs > 1:
            groups = f"{self.block_outputs}x{self.group}"
        parts = [self.kind, groups]
        parts += ["zeros"] * self.zeros + ["offsets"] * self.offsets
        parts += ["supers"] * (self.super_group is not None)
        return " ".join(parts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """The arrays of a quantised matrix, or of a stack of equal ones: each array is then [E, ...].

    A stack that is arranged is the same as its matrices arranged one by one.
    """

    # one of KINDS, with the name of the arrangement behind it if it has one
    kind: str = field(metadata=STATIC)
    values: Any  # [O, K], or uint8[O, K / 2]; of a recorded matrix int32[O / 64, S, rows, 64]
    scales: Any = None  # [O, G], or of blocks of outputs [O / B, G]
    zeros: Any = None  # uint8[O, G]
    offsets: Any = None  # [O, G]
    supers: Any = None  # [O, S, 1 or 2]
    # of a matrix that is records
    recorded: Form | None = field(default=None, metadata=STATIC, kw_only=True)

    @property
    def base(self) -> str:
        """The kind without an arrangement."""
        return self.kind.partition("_")[0]

    @property
    def num_outputs(self) -> int:
        """O."""
        if self.recorded is not None:
            return self.values.shape[-4] * self.values.shape[-1]
        return self.values.shape[-2]

    @property
    def num_inputs(self) -> int:
        """K."""
        if self.recorded is not None:
            return self.values.shape[-3] * (self.recorded.super_group or 0)
        return self.values.shape[-1] * (2 if self.base in PACKED else 1)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        if self.recorded is not None:
            return self.recorded.group or 0
        return self.num_inputs // self.scales.shape[-1]

    @property
    def block_outputs(self) -> int:
        """Outputs that share scales."""
        if self.recorded is not None:
            return 1
        return self.num_outputs // self.scales.shape[-2]

    @property
    def is_stack(self) -> bool:
        """True for several matrices."""
        return self.values.ndim > (2 if self.recorded is None else 4)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Values, scales, zeros, offsets and supers; None where the form has none."""
        return self.values, self.scales, self.zeros, self.offsets, self.supers

    @property
    def form(self) -> Form:
        """The form; one scale a row has no group."""
        if self.recorded is not None:
            return self.recorded
        return Form(
            kind=self.kind,
            group=None if self.scales.shape[-1] == 1 else self.group,
            scale_dtype=str(self.scales.dtype),
            zeros=self.zeros is not None,
            offsets=self.offsets is not None,
            super_group=None if self.supers is None else self.num_inputs // self.supers.shape[-2],
            block_outputs=self.block_outputs,
        )

    def rows(self, order: np.ndarray) -> Quantised:
        """The matrix with its outputs in this order, in the form ``Form.ordered``."""
        block = self.block_outputs
        if block > 1:
            blocks = whole_blocks(order, block)
            scales = self.scales[order // block if blocks is None else blocks]
            return replace(self, values=self.values[order], scales=scales)
        return Quantised(
            self.kind, *(None if part is None else part[order] for part in self.arrays)
        )

    def tree(self) -> dict[str, Any]:
        """The dict that ``quantised`` reads."""
        parts = {name: getattr(self, name) for name in _PARTS}
        name = self.kind if self.recorded is None else recorded_name(self.kind, self.recorded)
        return {name: self.values} | {n: part for n, part in parts.items() if part is not None}


def whole_blocks(order: np.ndarray, block: int) -> np.ndarray | None:  # int[O / block]
    """The order of blocks, if an order of outputs keeps those of a block together; else None."""
    owners = order.reshape(-1, block) // block
    return owners[:, 0] if (owners == owners[:, :1]).all() else None


def is_matrix(tree: Mapping[str, Any]) -> bool:
    """True for the arrays of one quantised matrix, False for a dict of something else."""
    return any(name.partition("_")[0] in KINDS for name in tree)


def quantised(tree: Mapping[str, Any]) -> Quantised:
    """The quantised matrix of a parameter's dict of arrays."""
    (name,) = (name for name in tree if name.partition("_")[0] in KINDS)
    kind, recorded = kind_and_form(name)
    parts = {part: tree[part] for part in _PARTS if part in tree}
    return Quantised(kind, tree[name], **parts, recorded=recorded)


def recorded_name(kind: str, form: Form) -> str:
    """The name of the array of a recorded matrix of this arranged kind."""
    parts = (kind, str(form.group), str(form.super_group), form.scale_dtype)
    return "_".join((*parts, *("offsets",) * form.offsets))


def kind_and_form(name: str) -> tuple[str, Form | None]:
    """The kind, arranged or not, of an array of values by its name; also the form if it is that of
    a recorded matrix.
    """
    base, *rest = name.split("_")
    if base not in KINDS or len(rest) < 2:
        return name, None
    order, group, super_group, dtype, *offsets = rest
    form = Form(base, int(group), dtype, offsets=bool(offsets), super_group=int(super_group))
    return f"{base}_{order}", form


def joined(parts: Sequence[Quantised]) -> Quantised:
    """Matrices of one form, in host memory, joined along their outputs. One is not copied."""
    if len(parts) == 1:
        return parts[0]
    arrays = (
        None if members[0] is None else np.concatenate(members)
        for members in zip(*(part.arrays for part in parts), strict=True)
    )
    return Quantised(parts[0].kind, *arrays)


def common_form(forms: Sequence[Form | None]) -> Form | None:
    """A form with groups in which matrices of several forms with supers have the same weights.

    None where one of them is none of GGUF's K forms, whose values have at most eight bits and
    whose unsigned scales have six.
    """
    known = [form for form in forms if form is not None and form.super_group is not None]
    plain = all(form.kind in ("int4", "int8") and not form.zeros for form in known)
    if not known or len(known) < len(forms) or not plain:
        return None
    groups = [form.group or 0 for form in known]
    supers = {form.super_group for form in known}
    if len(supers) > 1 or any(group % min(groups) for group in groups):
        return None
    signs = {form.scale_dtype for form in known}
    offsets = any(form.offsets for form in known)
    scale_dtype = signs.pop() if len(signs) == 1 else "int8"
    return Form("int8", min(groups), scale_dtype, offsets=offsets, super_group=supers.pop())


def in_form(w: Quantised, form: Form) -> Quantised:  # numpy arrays
    """The matrix in a ``common_form`` of its own form and others.

    Raises ValueError if a scale does not fit.
    """
    values, shape = w.values, (w.num_outputs, w.num_inputs)
    if w.kind in PACKED:
        half = nibble_block(shape[1]) // 2
        blocks = values.reshape(shape[0], -1, 1, half)
        values = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(shape).view(np.int8)
        values = values if w.offsets is not None else values - np.int8(MIDDLE)

    def repeated(part: np.ndarray) -> np.ndarray:
        found = np.repeat(part, w.group // (form.group or 1), axis=1).astype(form.scale_dtype)
        if not np.array_equal(found[:, :: w.group // (form.group or 1)], part):
            raise ValueError(f"factors of {w.form} do not fit {form.scale_dtype}")
        return found

    scales, supers, offsets = repeated(w.scales), w.supers, None
    if form.offsets and w.offsets is None:
        offsets = np.zeros_like(scales)
        supers = np.concatenate([supers, np.zeros_like(supers)], axis=2)
    elif w.offsets is not None:
        offsets = repeated(w.offsets)
    return Quantised("int8", values, scales, None, offsets, supers)


def nibble_block(num_inputs: int) -> int:
    """Inputs of a block of nibbles: 64, or 32 for a row that 64 does not divide."""
    return 64 if num_inputs % 64 == 0 else 32


def pack_nibbles(values: np.ndarray) -> np.ndarray:  # [O, K] below 16 -> uint8[O, K / 2]
    """Two values a byte: byte j of a block of 64 holds inputs j (low bits) and j + 32.

    So both halves of 32 bytes are 32 consecutive inputs, without a shuffle. K must be a multiple
    of 32.
    """
    block = nibble_block(values.shape[1])
    low, high = np.split(values.astype(np.uint8).reshape(len(values), -1, 2, block // 2), 2, axis=2)
    return (low | high << 4).reshape(len(values), -1)


def unpack_nibbles(packed: jax.Array) -> jax.Array:  # uint8[O, K / 2] -> uint8[O, K]
    """The inverse of ``pack_nibbles``."""
    half = nibble_block(2 * packed.shape[1]) // 2
    blocks = packed.reshape(packed.shape[0], -1, 1, half)
    return jnp.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(packed.shape[0], -1)


def dequantised(w: Quantised) -> jax.Array:  # float32[O, K]
    """The matrix in float32, if it is not arranged; the definition of every form."""
    assert w.kind == w.base, f"{w.kind} is arranged"
    values = w.values
    if w.kind in PACKED:
        values = unpack_nibbles(jnp.asarray(values))
    if w.kind == "fp4":
        magnitude = jnp.asarray(E2M1, jnp.float32)[values & 7]
        values = jnp.where(values & 8, -magnitude, magnitude)
    scales, offsets = group_factors(w)
    grouped = values.astype(jnp.float32).reshape(*scales.shape, -1)  # [O, G, group]
    if w.zeros is not None:
        grouped = grouped - w.zeros.astype(jnp.float32)[..., None]
    elif w.kind == "int4" and offsets is None:
        grouped = grouped - MIDDLE
    out = grouped * scales[..., None]
    if offsets is not None:
        out = out + offsets[..., None]
    return out.reshape(w.num_outputs, w.num_inputs)


def group_factors(w: Quantised) -> tuple[jax.Array, jax.Array | None]:  # float32[O, G] each
    """The scale and the offset of each group, with their supers multiplied in."""

    def factors(part: Any, index: int) -> jax.Array:
        small = jnp.asarray(part).astype(jnp.float32)
        if w.block_outputs > 1:
            small = jnp.repeat(small, w.block_outputs, axis=0)
        if w.supers is None:
            return small
        large = w.supers[..., index].astype(jnp.float32)  # [O, S]
        return (small.reshape(*large.shape, -1) * large[..., None]).reshape(small.shape)

    return factors(w.scales, 0), None if w.offsets is None else factors(w.offsets, 1)
