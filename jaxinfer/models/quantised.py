"""Parameter specs of weights that stay quantised in memory.

A family declares its matrices as if they were not quantised. ``keep_quantised`` replaces the specs
of those whose checkpoint tensors are quantised. Tensors of one form, such as q, k and v, become one
matrix; with several forms the parameter is a dict of parts, each with consecutive outputs (see
``nn.weight``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.division import own_bytes
from jaxinfer.models.params import ParamSpec, gates_first, join_outputs
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.placement import Axes, Axis, Fused, is_divided, name_of
from jaxinfer.nn.weight import is_quantised, tree_of_parts
from pallas_kernels.lib.arrangements import TILES, Arrangement, arrangement_of
from pallas_kernels.lib.quantised import (
    Form,
    Quantised,
    common_form,
    in_form,
    joined,
    quantised,
)
from pallas_kernels.quantised_gemm.tiled import records

# What a parameter of several forms may take more as one matrix: a launch takes as long as these.
MAX_COMMON_BYTES = 16 << 20
RECORD_AXES = 4  # of the array of a matrix that is records

# consecutive sources of one form, each with the outputs and inputs of a device's part
type Part = tuple[Form | None, tuple[tuple[Source, tuple[int, int]], ...]]


def keep_quantised(
    specs: Sequence[ParamSpec], forms: Mapping[str, Form], arrangement: Arrangement | None = None
) -> tuple[ParamSpec, ...]:
    """The specs, with those of quantised matrices replaced.

    ``forms`` has the forms of checkpoint tensors by their names in the specs. Matrices of products
    are arranged, if they fit. Raises ``CheckpointError`` for a form that does not divide its
    matrix, naming the tensor.
    """
    untied = any(spec.path == "lm_head" for spec in specs)  # the embedding is in no product
    return tuple(
        _kept(spec, forms, None if spec.matrix == "rows" and untied else arrangement)
        for spec in specs
    )


class Size(NamedTuple):
    """Parameters as the checkpoint counts them, and bytes in memory."""

    count: int
    nbytes: int


def sizes_by_form(specs: Sequence[ParamSpec], plain: np.dtype) -> dict[str, Size]:
    """The size of a model's weights of each form: "int4 g128", or a dtype for plain arrays.

    ``plain`` is the model's dtype. Bytes of a divided model are those on a device.
    """
    sizes: dict[str, Size] = {}
    for form, size in (pair for spec in specs for pair in _sizes(spec, plain)):
        before = sizes.get(form, Size(0, 0))
        sizes[form] = Size(before.count + size.count, before.nbytes + size.nbytes)
    return sizes


def _sizes(spec: ParamSpec, plain: np.dtype) -> Iterator[tuple[str, Size]]:
    """The size of each source of a quantised parameter, or of each array of another one.

    The bytes are those of a device's part.
    """
    if all(source.form is None for source in spec.sources):
        for array, declared in zip(spec.leaves.values(), spec.wholes.values(), strict=True):
            own = replace(array, dtype=np.dtype(array.dtype or plain))
            size = Size(math.prod(declared.shape), own_bytes(own, spec.devices))
            yield np.dtype(own.dtype).name, size
        return
    count = spec.sources_per_piece
    known: dict[tuple[Form | None, ...], list[tuple[str, int]]] = {}  # pieces are mostly alike
    for piece in range(spec.pieces or 1):
        own, is_own = spec.sources[piece * count : (piece + 1) * count], 0 in spec.ranks_of(piece)
        forms = tuple([source.form for source in own])
        if forms not in known:
            known[forms] = list(_bytes_by_form(spec, own, plain))
        for source, (name, num_bytes) in zip(own, known[forms], strict=True):
            yield name, Size(math.prod(source.own_shape), num_bytes * is_own)


def _bytes_by_form(
    spec: ParamSpec, sources: Sequence[Source], plain: np.dtype
) -> Iterator[tuple[str, int]]:
    """The form and the bytes of a device's part of each source, of a parameter or a piece."""
    parts = zip(sources, spec.own_sizes(sources), spec.own_forms(sources), strict=True)
    for source, size, form in parts:
        num_bytes = math.prod(size) * plain.itemsize
        if form is not None:
            num_bytes = _num_bytes(form, size)
        yield plain.name if source.form is None else str(source.form), num_bytes


def _num_bytes(form: Form, size: tuple[int, int]) -> int:
    """Bytes of a matrix of so many outputs and inputs."""
    arrays = form.arrays(*size).values()
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)


def _kept(spec: ParamSpec, forms: Mapping[str, Form], arrangement: Arrangement | None) -> ParamSpec:
    if spec.matrix is None or not any(source.name in forms for source in spec.sources):
        return spec
    assert isinstance(spec.arrays, ArraySpec), spec.path
    if spec.pieces is not None:
        return _kept_stack(spec, forms, arrangement)
    spec = replace(
        spec, sources=tuple(_with_form(source, forms.get(source.name)) for source in spec.sources)
    )
    parts, common = _parts(spec), None
    if arrangement is TILES and (common := _common_form(parts)) is not None:
        parts = [(common, tuple(source for _, members in parts for source in members))]
    outputs, inputs = _axes_of(spec)
    axes = _axes_of_parts(outputs, [sum(outs for _, (outs, _) in own) for _, own in parts])
    arrays = [
        _arrays(part, axis, inputs, arrangement, spec)
        for part, axis in zip(parts, axes, strict=True)
    ]
    build = partial(join_parts, arrangement=arrangement, common=common)
    finish = arranged_on_device if arrangement is not None and arrangement.is_on_device else None
    return replace(spec, arrays=tree_of_parts(arrays), build=build, finish=finish)


def _parts(spec: ParamSpec) -> list[Part]:
    """The sources of a parameter or a piece, by the forms of the parts that a device has."""
    own = spec.sources[: spec.sources_per_piece]
    made = zip(own, spec.own_sizes(own), spec.own_forms(own), strict=True)
    return [
        (form, tuple((source, size) for source, size, _ in group))
        for form, group in groupby(made, lambda one: one[2])
    ]


def _common_form(parts: Sequence[Part]) -> Form | None:
    """The form in which a parameter of several forms is one matrix, so that one kernel multiplies
    it; None if there is none, or if it takes much more memory.
    """
    common = common_form([form for form, _ in parts]) if len(parts) > 1 else None
    if common is None:
        return None

    try:
        more = 0
        for form, members in parts:
            assert form is not None  # of a common form
            for _, size in members:
                more += _num_bytes(common, size) - _num_bytes(form, size)
    except ValueError:  # ``_arrays`` names the tensor
        return None
    return common if more <= MAX_COMMON_BYTES else None


def _axes_of(spec: ParamSpec) -> tuple[Axis, Axis]:
    """The axes of outputs and inputs; of a divided matrix names."""
    outputs, inputs = spec.matrix_axes
    return (outputs, inputs) if spec.division is None else (name_of(outputs), name_of(inputs))


def _with_form(source: Source, form: Form | None) -> Source:
    """The source in a form, or with ``rows`` in that of its ordered outputs."""
    if form is not None and source.rows is not None:
        form = form.ordered(source.rows.order(source.shape[0]))
    return source._replace(form=form)


def _kept_stack(
    spec: ParamSpec, forms: Mapping[str, Form], arrangement: Arrangement | None
) -> ParamSpec:
    """A stack of matrices that are all of one form; each piece is arranged by itself."""
    assert isinstance(spec.arrays, ArraySpec), spec.path
    arrangement = None if arrangement is None else arrangement.of_stacks
    found = {source.name: forms.get(source.name) for source in spec.sources}
    first, form = next(iter(found.items()))
    if other := next((name for name, one in found.items() if one != form), None):
        raise CheckpointError(
            f"tensor {first} is {form or 'not quantised'} and {other} is "
            f"{found[other] or 'not quantised'}; a layer's experts must be quantised alike; "
            "use another checkpoint of this model"
        )
    sources = tuple(source._replace(form=form) for source in spec.sources)
    (part,) = _parts(spec := replace(spec, sources=sources))
    outputs, inputs = (None, None) if spec.division is None else _axes_of(spec)
    made = _arrays(part, outputs, inputs, arrangement, spec)
    assert isinstance(spec.arrays, ArraySpec)
    first_axis = spec.arrays.axes[0]
    stacked = {
        name: replace(array, shape=(spec.pieces, *array.shape), axes=(first_axis, *array.axes))
        for name, array in made.items()
    }
    build = partial(join_parts, arrangement=arrangement, interleaved=spec.interleaved)
    finish = arranged_on_device if arrangement is not None and arrangement.is_on_device else None
    return replace(spec, arrays=stacked, build=build, finish=finish)


def _arrays(
    part: Part, outputs: Axis, inputs: Axis, arrangement: Arrangement | None, spec: ParamSpec
) -> Any:
    """The arrays of one part: a matrix [I, O], or the arrays of a quantised one."""
    form, members = part
    total, width = sum(size for _, (size, _) in members), members[0][1][1]
    if form is None:
        return _of_all(ArraySpec((width, total), (inputs, outputs)), spec)
    try:
        made = form.arrays(total, width)
    except ValueError as error:
        on = f" on {spec.devices} devices" if spec.devices > 1 else ""
        raise CheckpointError(
            f"tensor {members[0][0].name} cannot be kept as {form}{on}: {error}; use a checkpoint "
            f"with other groups{' or fewer devices' * bool(on)}"
        ) from error
    if arrangement is not None and arrangement.fits(form, total, width):
        made = arrangement.arrays(form, total, width)

    def axes(shape: tuple[int, ...]) -> Axes:
        block, first = total // shape[0], outputs
        if len(shape) == RECORD_AXES:  # only a checkpoint can be divided into them
            first = name_of(outputs)
        elif isinstance(outputs, Fused):
            first = Fused(outputs.name, tuple(width // block for width in outputs.widths))
        return (first, inputs, None, None)[: len(shape)]

    return {
        name: _of_all(ArraySpec(shape, axes(shape), np.dtype(dtype)), spec)
        for name, (shape, dtype) in made.items()
    }


def _of_all(own: ArraySpec, spec: ParamSpec) -> ArraySpec:
    """The array of all devices, of a device's part."""
    if spec.division is None:
        return own
    counts = (spec.devices if is_divided(axis) else 1 for axis in own.axes)
    axes = tuple(axis if is_divided(axis) else None for axis in own.axes)
    shape = tuple(size * count for size, count in zip(own.shape, counts, strict=True))
    return replace(own, shape=shape, axes=axes)


def _axes_of_parts(axis: Axis, totals: Sequence[int]) -> list[Axis]:
    """The logical axis of the outputs of each part, which has so many."""
    if not isinstance(axis, Fused) or len(totals) == 1:
        return [axis] * len(totals)
    widths, axes = list(axis.widths), []
    for total in totals:
        own: list[int] = []
        while sum(own) < total:  # a source may have several of the axis's widths
            own.append(widths.pop(0))
        assert sum(own) == total, f"a part of {total} outputs of {axis}"
        axes.append(Fused(axis.name, tuple(own)))
    return axes


def join_parts(
    *tensors: Quantised | np.ndarray,
    arrangement: Arrangement | None = None,
    interleaved: bool = False,
    common: Form | None = None,
) -> Any:
    """Tensors of one form joined along their outputs; of several forms a dict of such parts, but
    one matrix in a ``common`` form.

    ``interleaved``: see ``ParamSpec``.
    """
    if common is not None:
        tensors = tuple(in_form(cast("Quantised", tensor), common) for tensor in tensors)
    if interleaved:
        (matrix,) = tensors
        assert isinstance(matrix, Quantised) and matrix.block_outputs == 1
        parts = (None if part is None else gates_first(part) for part in matrix.arrays)
        tensors = (Quantised(matrix.kind, *parts),)
    groups = [list(members) for _, members in groupby(tensors, _form_of)]
    return tree_of_parts([_joined(members, arrangement) for members in groups])


def _joined(members: Sequence[Any], arrangement: Arrangement | None) -> Any:
    """Join matrices along their outputs; they are all quantised, or all arrays [O_i, I]."""
    if not isinstance(members[0], Quantised):
        return join_outputs(*members)
    w = joined(members)
    if arrangement is not None and arrangement.fits(w.form, w.num_outputs, w.num_inputs):
        if not arrangement.is_on_device:
            w = arrangement.arrange(w)
        else:  # values by rows under the arranged name, until ``arranged_on_device``
            values = w.values.view(np.uint8) if w.kind == "int8" else w.values
            is_recorded = arrangement.is_recorded(w.form)
            w = replace(w, kind=arrangement.kind(w.kind), values=values)
            w = records.recorded(w) if is_recorded else w
    return w.tree()


@jax.jit
def arranged_on_device(tree: Any) -> Any:
    """A placed parameter, or a piece of a stack, whose quantised matrices are still by rows,
    arranged as they are named.
    """
    return jax.tree.map(_arranged, tree, is_leaf=is_quantised)


def _arranged(leaf: Any) -> Any:
    if not is_quantised(leaf):
        return leaf
    w = quantised(leaf)
    arrangement = arrangement_of(w.kind)
    if arrangement is None or arrangement.on_device is None:
        return leaf
    parts, values = w.arrays[1:], w.values
    if w.recorded is not None:
        scales, offsets, supers = records.factors_of(w)
        parts, values = (scales, None, offsets, supers), records.values_of(w)
    values = values.view(jnp.int8) if w.base == "int8" else values
    return arrangement.on_device(Quantised(w.base, values, *parts)).tree()


def _form_of(tensor: Quantised | np.ndarray) -> Form | None:
    return tensor.form if isinstance(tensor, Quantised) else None
