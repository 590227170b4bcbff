"""The parts of parameters that each of several devices has, and of checkpoint tensors.

A divided array is that of all devices one after the other: of q, k and v on two devices q0 k0 v0
q1 k1 v1. What several devices have, such as a KV head, is in it several times. Matrices are divided
before they are built, so that what depends on a device's size (groups of scales, tiles) is of its
part, and no array holds more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.placement import Axis, is_divided, name_of, positions
from pallas_kernels.lib.quantised import (
    PACKED,
    Form,
    Quantised,
    nibble_block,
    pack_nibbles,
    whole_blocks,
)

_OTHERS = ("scales", "zeros", "offsets", "supers")  # of a ``Quantised``, besides its values
LEAST_GROUP = 32  # inputs that share a scale, where a group is on two devices


def on_devices(whole: ArraySpec, devices: int) -> ArraySpec:
    """The array of all devices, whose axes are names."""
    shape = (
        positions(axis, size, devices).size if is_divided(axis) else size
        for axis, size in zip(whole.axes, whole.shape, strict=True)
    )
    axes = (name_of(axis) if is_divided(axis) else None for axis in whole.axes)
    return replace(whole, shape=tuple(shape), axes=tuple(axes))


def own_part(array: Any, whole: ArraySpec, devices: int, rank: int) -> Any:
    """A device's part of a whole array of floats, numpy's or JAX's."""
    return _taken(array, whole, devices, lambda found: found[rank])


def in_device_order[A](array: A, whole: ArraySpec, devices: int) -> A:
    """The array of all devices, of a whole one."""
    return array if devices == 1 else _taken(array, whole, devices, lambda found: found.ravel())


def in_model_order(array: Any, whole: ArraySpec, devices: int) -> Any:
    """The inverse of ``in_device_order``."""
    for dimension, (axis, size) in enumerate(zip(whole.axes, whole.shape, strict=True)):
        if devices > 1 and is_divided(axis):
            found = positions(axis, size, devices).ravel()
            places = np.empty(size + 1, np.int64)  # the last is of zeros
            places[found] = np.arange(found.size)
            array = array.take(places[:-1], axis=dimension)
    return array


def own_bytes(array: ArraySpec, devices: int) -> int:
    """Bytes of a device's part of an array of all devices, whose dtype is set."""
    return array.nbytes // devices if any(map(is_divided, array.axes)) else array.nbytes


class SourceShare(NamedTuple):
    """The parts of a matrix [O, I] of a checkpoint that each device has; None: all of it.

    Outputs are numbers of rows, -1 for one of zeros; inputs are consecutive.
    """

    outputs: np.ndarray | None  # int[devices, own]
    inputs: np.ndarray | None  # int[devices, own]

    def form(self, form: Form, name: str) -> Form:
        """The form of each device's part of a quantised matrix.

        Outputs that leave the block with which they share scales get scales of their own, and
        groups of inputs that are on two devices become smaller. Raises ``CheckpointError`` for
        groups that would become too small.
        """
        block = form.block_outputs
        if block > 1 and self.outputs is not None and not _keeps_blocks(self.outputs, block):
            form = replace(form, block_outputs=1)
        if self.inputs is None:
            return form
        own = self.inputs.shape[1]
        group = form.group and math.gcd(form.group, own)
        large = form.super_group and math.gcd(form.super_group, own)
        if group is not None and group < min(LEAST_GROUP, form.group or group):
            raise CheckpointError(
                f"tensor {name} has groups of {form.group} inputs with one scale, and each of "
                f"{len(self.inputs)} devices has {own} of its inputs; use fewer devices"
            )
        return replace(form, group=group, super_group=large)

    def size(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Outputs and inputs of each device's part of a matrix of so many."""
        return (
            outputs if self.outputs is None else self.outputs.shape[1],
            inputs if self.inputs is None else self.inputs.shape[1],
        )

    def take(self, tensor: Any, rank: int, form: Form | None, *, by_inputs: bool) -> Any:
        """A device's part of a tensor; ``by_inputs``: an array of floats is [I, O]."""
        outputs = None if self.outputs is None else self.outputs[rank]
        inputs = None if self.inputs is None else self.inputs[rank]
        if isinstance(tensor, Quantised):
            assert form is not None, "the part of a quantised matrix has a form"
            w = tensor if outputs is None else _rows(tensor, outputs, form.block_outputs)
            return w if inputs is None else _columns(w, inputs, form)
        for dimension, found in enumerate((inputs, outputs) if by_inputs else (outputs, inputs)):
            if found is not None:
                tensor = take(tensor, found, dimension)
        return tensor


def source_shares(
    outputs: Axis,
    inputs: Axis,
    sizes: Sequence[tuple[int, int]],
    devices: int,
    *,
    interleaved: bool = False,
) -> tuple[SourceShare, ...]:
    """The parts of tensors of these sizes, whose outputs are joined along an axis.

    ``interleaved``: see ``ParamSpec``.
    """
    of_inputs = positions(inputs, sizes[0][1], devices) if is_divided(inputs) else None
    if not is_divided(outputs):
        return tuple(SourceShare(None, of_inputs) for _ in sizes)
    ends = np.cumsum([size for size, _ in sizes]).tolist()
    found = positions(outputs, ends[-1], devices)
    if interleaved:  # a gate and its up are adjacent in the tensor
        found = np.arange(ends[-1]).reshape(devices, -1)
    if len(sizes) == 1:
        return (SourceShare(found, of_inputs),)
    parts = (
        np.stack([row[(row >= end - size) & (row < end)] for row in found]) - (end - size)
        for end, (size, _) in zip(ends, sizes, strict=True)
    )
    return tuple(SourceShare(part, of_inputs) for part in parts)


def take(array: Any, found: np.ndarray, dimension: int) -> Any:  # int[own]
    """Positions of a dimension of an array, numpy's or JAX's; zeros for -1, which are last.

    Consecutive ones are a view.
    """
    known = found[found >= 0]
    place = (slice(None),) * dimension
    taken = array[(*place, _index(known))]
    if missing := len(found) - len(known):
        module = array.__array_namespace__()
        shape = list(taken.shape)
        shape[dimension] = missing
        taken = module.concat([taken, module.zeros(shape, dtype=array.dtype)], axis=dimension)
    return taken


def _taken(
    array: Any, whole: ArraySpec, devices: int, choose: Callable[[np.ndarray], np.ndarray]
) -> Any:
    for dimension, (axis, size) in enumerate(zip(whole.axes, whole.shape, strict=True)):
        if is_divided(axis):
            array = take(array, choose(positions(axis, size, devices)), dimension)
    return array


def _index(found: np.ndarray) -> np.ndarray | slice:
    if not len(found):
        return slice(0, 0)
    first, last = int(found[0]), int(found[-1])
    is_range = last - first + 1 == len(found) and bool((np.diff(found) == 1).all())
    return slice(first, last + 1) if is_range else found


def _keeps_blocks(outputs: np.ndarray, block: int) -> bool:
    """True if each device has whole blocks of outputs."""
    if outputs.shape[1] % block:
        return False
    known = (row[row >= 0] for row in outputs)
    return all(len(row) % block == 0 and whole_blocks(row, block) is not None for row in known)


def _rows(w: Quantised, found: np.ndarray, block: int) -> Quantised:
    """Outputs of a matrix in host memory, with scales for each block of so many."""
    values = take(w.values, found, 0)
    if w.block_outputs == 1:
        rest = (None if part is None else take(part, found, 0) for part in w.arrays[1:])
        return replace(w, **dict(zip(_OTHERS, rest, strict=True)), values=values)
    owners = np.where(found < 0, -1, found // w.block_outputs)
    return replace(w, values=values, scales=take(w.scales, owners[::block], 0))


def _columns(w: Quantised, found: np.ndarray, form: Form) -> Quantised:
    """Consecutive inputs of a matrix in host memory, in groups of this form."""
    first, end, whole = int(found[0]), int(found[-1]) + 1, w.num_inputs

    def groups(part: Any, before: int | None, after: int | None) -> Any:
        if part is None or before is None or after is None:  # one of the whole row
            return part
        part = np.repeat(part, before // after, axis=1)
        return part[:, first // after : end // after]

    large = None if w.supers is None else whole // w.supers.shape[1]
    before = None if form.group is None else w.group
    return Quantised(
        w.kind,
        _values(w, first, end),
        groups(w.scales, before, form.group),
        groups(w.zeros, before, form.group),
        groups(w.offsets, before, form.group),
        groups(w.supers, large, form.super_group),
    )


def _values(w: Quantised, first: int, end: int) -> np.ndarray:
    if w.kind not in PACKED:
        return w.values[:, first:end]
    block = nibble_block(w.num_inputs)
    if block == nibble_block(end - first) and first % block == 0:
        return w.values[:, first // 2 : end // 2]
    halves = w.values.reshape(len(w.values), -1, 1, block // 2)
    nibbles = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(w.values), -1)
    return pack_nibbles(nibbles[:, first:end])
