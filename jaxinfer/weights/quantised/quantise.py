"""Quantises matrices of floats, weights only, without calibration data: while a model loads, to

    fp8     e4m3, a float32 scale for each output, which maps its largest magnitude to 448
    int8    -127 ... 127, a float32 scale for each output
    int4    -8 ... 7, a bfloat16 scale for 128 inputs, or 64 or 32 where those divide

and new weights of an engine to the form of those that they replace (``quantise_as``).

An int4 scale is the one of a few candidates with the least squared error (``_LARGEST_INT4``), that
of fp4 the better of two powers of 2. With zeros or offsets, a group's least and largest values are
mapped to the ends of the range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.weights.quantised.values import row_chunks
from pallas_kernels.lib.quantised import E2M1, MIDDLE, Form, Quantised, pack_nibbles, quantised

SCHEMES = ("fp8", "int8", "int4")
GROUPS = (128, 64, 32)
_TINY = np.finfo(np.float32).tiny  # the least number whose inverse is finite
_LARGEST = MappingProxyType({"fp8": 448.0, "int8": 127.0})
# the most that integer scales and offsets are: those of GGUF's Q4_K and Q5_K have 6 bits
_MOST_SMALL = MappingProxyType({"uint8": 63, "int8": 127})
_MAGNITUDES = np.array(E2M1, np.float32)
_BETWEEN = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
# The values, in steps, to which int4 scales map a group's largest magnitude; above 7 or 8 it is
# clipped. For normal values in groups of 128 the relative RMS error is 0.1018, with 7.5 alone
# 0.1110, and with 40 candidates between 6.5 and 12 0.1011.
_LARGEST_INT4 = (7.0, 7.5, 8.0, 8.5, 9.0, 10.0)


def form_for(scheme: str, shape: tuple[int, ...]) -> Form | None:
    """The form in which a matrix [O, K] is quantised; None if its size does not allow it."""
    if len(shape) != 2 or not all(shape):
        return None
    if scheme == "int8" and shape[1] % 4:  # compressed-tensors has four values in a word
        return None
    if scheme != "int4":
        return Form(scheme, None, "float32")
    group = next((group for group in GROUPS if shape[1] % group == 0), None)
    if group is None:
        return None
    return Form("int4", None if group == shape[1] else group, "bfloat16")


def quantise(matrix: np.ndarray, scheme: str, threads: int | None = None) -> Quantised:
    """Quantise a matrix [O, K] of floats; ``scheme`` is one of ``SCHEMES``.

    Raises ValueError for a size that ``form_for`` does not allow; see ``quantise_as``.
    """
    form = form_for(scheme, matrix.shape)
    if form is None:
        raise ValueError(f"a matrix of shape {matrix.shape} cannot be quantised to {scheme}")
    return quantise_as(matrix, form, threads)


def quantise_as(matrix: np.ndarray, form: Form, threads: int | None = None) -> Quantised:
    """Quantise a matrix [O, K] of floats to a form that can hold it.

    Rows are quantised by ``threads`` threads (None: one for each CPU core), with the same result
    for any number. Raises ValueError for values that are not finite, or beyond the scales' dtype.
    """
    arrays = {name: np.empty(*one) for name, one in form.arrays(*matrix.shape).items()}
    group = form.group or matrix.shape[1]
    outputs, block = len(matrix), form.block_outputs

    def run(blocks: slice) -> None:
        rows = slice(blocks.start * block, blocks.stop * block)
        grouped = matrix[rows].astype(np.float32).reshape(-1, matrix.shape[1] // group, group)
        if not np.isfinite(grouped).all():
            raise ValueError("values are not finite")
        for name, part in _parts(grouped, form).items():
            arrays[name][blocks if name == "scales" else rows] = part

    _run(run, row_chunks(outputs // block, matrix.shape[1] * block), threads)
    return quantised(arrays)


def _run(run: Callable[[slice], None], chunks: Iterable[slice], threads: int | None) -> None:
    if threads == 1:
        for rows in chunks:
            run(rows)
        return
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in pool.map(run, chunks):
            pass


type Arrays = dict[str, np.ndarray]  # by the names of ``Quantised.tree``


def _parts(grouped: np.ndarray, form: Form) -> Arrays:  # float32[O, G, group], overwritten
    """The arrays of some rows; scales of a block of outputs once for the block."""
    if form.zeros:
        return _with_zeros(grouped, form)
    if form.offsets:
        return _with_offsets(grouped, form)
    largest = np.abs(grouped).max(2)
    if form.block_outputs > 1:
        largest = largest.reshape(-1, form.block_outputs, largest.shape[1]).max(1)
    stored, effective, supers = _stored(_chosen(grouped, largest, form), form, 1)
    factors = effective.repeat(form.block_outputs, axis=0)
    made = {form.kind: _values(grouped, factors, form.kind), "scales": stored}
    return made if supers is None else made | {"supers": supers[..., None]}


def _with_zeros(grouped: np.ndarray, form: Form) -> Arrays:
    assert form.kind == "int4", "zeros of int8 become offsets: see ``stored.form_of``"
    least, most = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    scales = _scales(most - least, 15, form.scale_dtype)
    zeros = np.clip(np.rint(-least / scales), 0, 15)
    grouped /= scales[..., None]
    grouped += zeros[..., None]
    stored = {"scales": scales.astype(form.scale_dtype), "zeros": zeros.astype(np.uint8)}
    return {"int4": _integers(grouped, "int4", 0, 15)} | stored


def _with_offsets(grouped: np.ndarray, form: Form) -> Arrays:
    """int4 counts from the least value; int8 from the middle, or, as files do, from the least
    value where scales are integers.
    """
    least, most = grouped.min(2), grouped.max(2)
    first, last = (0, 15) if form.kind == "int4" else (-127, 127)
    if form.super_group is None:
        scales = _scales(most - least, last - first, form.scale_dtype)
        stored, supers = scales.astype(form.scale_dtype), {}
        origin = least if form.kind == "int4" else (least + most) / 2
        offsets = origin.astype(form.scale_dtype)
        moved = offsets.astype(np.float32)
    else:
        first = 0
        offsets, moved, outer = _stored(np.maximum(-least, 0), form, 0)
        moved = -moved
        spread = np.maximum(most - moved, 0)
        stored, scales, inner = _stored(spread / np.float32(last), form, 1)
        assert outer is not None and inner is not None
        supers = {"supers": np.stack([inner, -outer], axis=2)}
    grouped -= moved[..., None]
    grouped /= scales[..., None]
    values = _integers(grouped, form.kind, first, last)
    return {form.kind: values, "scales": stored, "offsets": offsets} | supers


def _chosen(
    grouped: np.ndarray,  # float32[O, G, group]
    largest: np.ndarray,  # float32[O / B, G]: of the magnitudes
    form: Form,
) -> np.ndarray:  # float32[O / B, G]
    """The scales, those with the least squared error if there are several candidates."""
    dtype = form.scale_dtype
    if form.super_group is not None:
        assert form.kind == "int8", "as in GGUF's Q6_K"
        return largest / np.float32(_LARGEST["int8"])
    if form.kind in ("fp8", "int8"):
        return _scales(largest, _LARGEST[form.kind], dtype)
    if form.kind == "int4":
        candidates = [_scales(largest, steps, dtype) for steps in _LARGEST_INT4]
    else:  # OCP MX formats 1.0: the largest value is between 4 and 8 steps, or 2 and 4
        least = np.ldexp(np.float32(1), np.frexp(largest)[1] - 3)
        candidates = [_scales(np.where(largest, s, 0), 1, dtype) for s in (least, 2 * least)]
    steps, best = np.empty_like(grouped), candidates[0]
    least_error = np.full(largest.shape, np.inf, np.float32)
    for scale in candidates:  # errors are of scales as they are stored
        _nearest(grouped, scale, steps, form.kind)
        steps *= scale[..., None]
        steps -= grouped
        squares = np.einsum("ogi,ogi->og", steps, steps)
        best = np.where(squares < least_error, scale, best)
        least_error = np.minimum(squares, least_error)
    return best


def _stored(
    wanted: np.ndarray, form: Form, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:  # [O, G], float32[O, G], float16[O, S]
    """Factors that are not negative as they are stored, their values, and the supers if those are
    integers, at least ``least``.
    """
    if form.super_group is None or form.group is None:
        stored = wanted.astype(form.scale_dtype)
        return stored, stored.astype(np.float32), None
    most = np.float32(_MOST_SMALL[form.scale_dtype])
    grouped = wanted.reshape(len(wanted), -1, form.super_group // form.group)
    supers = _scales(grouped.max(2), most, np.float16)
    small = np.clip(np.rint(grouped / supers[..., None]), least, most)
    effective = (small * supers[..., None]).reshape(wanted.shape)
    return small.reshape(wanted.shape).astype(form.scale_dtype), effective, supers.astype("float16")


def _scales(largest: np.ndarray, steps: Any, dtype: Any = np.float32) -> np.ndarray:  # float32
    """Scales, rounded to a dtype; 1 where all values are 0, or so small that they become 0."""
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(steps)).astype(dtype).astype(np.float32)
    if not np.isfinite(scales).all():
        raise ValueError(f"values are too large for scales in {np.dtype(dtype)}")
    scales[scales < _TINY] = 1
    return scales


def _values(grouped: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    """Values as they are stored, [O, K] or packed; ``grouped`` float32[O, G, group] is
    overwritten.
    """
    if kind == "fp8":
        grouped /= scales[..., None]
        np.clip(grouped, -_LARGEST["fp8"], _LARGEST["fp8"], out=grouped)
        return grouped.reshape(len(grouped), -1).astype(ml_dtypes.float8_e4m3fn)
    if kind == "int8":
        grouped /= scales[..., None]
        return _integers(grouped, kind, -127, 127)
    _nearest(grouped, scales, grouped, kind)
    if kind == "int4":
        return _integers(grouped + MIDDLE, kind, 0, 15)
    signs = np.signbit(grouped) * np.uint8(8)
    codes = np.searchsorted(_MAGNITUDES, np.abs(grouped)).astype(np.uint8)
    return pack_nibbles((codes | signs).reshape(len(grouped), -1))


def _integers(steps: np.ndarray, kind: str, least: int, most: int) -> np.ndarray:
    """Steps float32[O, G, group] as integers of the range, stored as the kind has them."""
    np.rint(steps, out=steps)
    np.clip(steps, least, most, out=steps)
    flat = steps.reshape(len(steps), -1)
    return pack_nibbles(flat) if kind == "int4" else flat.astype(np.int8)


def _nearest(grouped: np.ndarray, scale: np.ndarray, steps: np.ndarray, kind: str) -> None:
    """The nearest values of int4 or fp4, in steps of the scale."""
    np.multiply(grouped, (1 / scale)[..., None], out=steps)
    if kind == "int4":
        np.rint(steps, out=steps)
        np.clip(steps, -MIDDLE, MIDDLE - 1, out=steps)
        return
    nearest = _MAGNITUDES[np.searchsorted(_BETWEEN, np.abs(steps))]
    np.copysign(nearest, steps, out=steps)
