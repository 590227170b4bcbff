"""Quantises matrices of floats: to fp8, int8 or int4, weights only, without calibration data.

    fp8     e4m3, a float32 scale for each output, which maps its largest magnitude to 448
    int8    -127 ... 127, a float32 scale for each output
    int4    -8 ... 7, a bfloat16 scale for 128 inputs, or 64 or 32 where those divide

An int4 scale is the one of a few candidates with the least squared error (``_LARGEST_INT4``).
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
from pallas_kernels.quantised import MIDDLE, Form, Quantised, pack_nibbles

SCHEMES = ("fp8", "int8", "int4")
GROUPS = (128, 64, 32)
_TINY = np.finfo(np.float32).tiny  # the least number whose inverse is finite
_LARGEST_FP8, _LARGEST_INT8 = 448.0, 127.0
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

    Rows are quantised by ``threads`` threads (None: one for each CPU core), with the same result
    for any number. Raises ValueError for a size that ``form_for`` does not allow, or values that
    are not finite.
    """
    form = form_for(scheme, matrix.shape)
    if form is None:
        raise ValueError(f"a matrix of shape {matrix.shape} cannot be quantised to {scheme}")
    arrays = form.arrays(*matrix.shape)
    values, scales = (np.empty(*arrays[name]) for name in (scheme, "scales"))
    group = matrix.shape[1] // scales.shape[1]

    def run(rows: slice) -> None:
        grouped = matrix[rows].astype(np.float32).reshape(-1, scales.shape[1], group)
        largest = np.abs(grouped).max(2)
        if not np.isfinite(largest).all():
            raise ValueError("values are not finite")
        values[rows], scales[rows] = _SCHEMES[scheme](grouped, largest)

    _run(run, row_chunks(*matrix.shape), threads)
    return Quantised(scheme, values, scales)


def _run(run: Callable[[slice], None], chunks: Iterable[slice], threads: int | None) -> None:
    if threads == 1:
        for rows in chunks:
            run(rows)
        return
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in pool.map(run, chunks):
            pass


def _scales(largest: np.ndarray, steps: float, dtype: Any = np.float32) -> np.ndarray:  # float32
    """Scales, rounded to a dtype; 1 where all values are 0, or so small that they become 0."""
    scales = (largest / np.float32(steps)).astype(dtype).astype(np.float32)
    scales[scales < _TINY] = 1
    return scales


def _fp8(
    grouped: np.ndarray,  # float32[O, 1, K], overwritten
    largest: np.ndarray,  # float32[O, 1]: of the magnitudes
) -> tuple[np.ndarray, np.ndarray]:  # float8_e4m3fn[O, K], float32[O, 1]
    scales = _scales(largest, _LARGEST_FP8)
    grouped /= scales[..., None]
    np.clip(grouped, -_LARGEST_FP8, _LARGEST_FP8, out=grouped)
    return grouped[:, 0].astype(ml_dtypes.float8_e4m3fn), scales


def _int8(
    grouped: np.ndarray,  # float32[O, 1, K], overwritten
    largest: np.ndarray,  # float32[O, 1]
) -> tuple[np.ndarray, np.ndarray]:  # int8[O, K], float32[O, 1]
    scales = _scales(largest, _LARGEST_INT8)
    grouped /= scales[..., None]
    np.rint(grouped, out=grouped)
    return grouped[:, 0].astype(np.int8), scales


def _int4(
    grouped: np.ndarray,  # float32[O, G, group]
    largest: np.ndarray,  # float32[O, G]
) -> tuple[np.ndarray, np.ndarray]:  # uint8[O, K / 2], bfloat16[O, G]
    steps, error = np.empty_like(grouped), np.empty_like(grouped)
    least = np.full(largest.shape, np.inf, np.float32)
    best = np.ones(largest.shape, np.float32)
    for candidate in _LARGEST_INT4:  # errors are of scales as they are stored
        scale = _scales(largest, candidate, ml_dtypes.bfloat16)
        _nearest(grouped, scale, steps)
        np.multiply(steps, scale[..., None], out=error)
        error -= grouped
        squares = np.einsum("ogi,ogi->og", error, error)
        best = np.where(squares < least, scale, best)
        least = np.minimum(squares, least)
    _nearest(grouped, best, steps)
    steps += MIDDLE
    packed = pack_nibbles(steps.reshape(len(steps), -1))
    return packed, best.astype(ml_dtypes.bfloat16)


def _nearest(grouped: np.ndarray, scale: np.ndarray, steps: np.ndarray) -> None:
    """The nearest values, in steps of the scale."""
    np.multiply(grouped, (1 / scale)[..., None], out=steps)
    np.rint(steps, out=steps)
    np.clip(steps, -MIDDLE, MIDDLE - 1, out=steps)


_SCHEMES = MappingProxyType({"fp8": _fp8, "int8": _int8, "int4": _int4})
