"""The values of quantised matrices in host memory: ``pallas_kernels.lib.quantised`` in numpy."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxinfer.weights.quantised.packing import to_pairs
from pallas_kernels.lib.quantised import E2M1, MIDDLE, Quantised

CHUNK = 1 << 17  # values that are computed at once, so that intermediate results stay in L2


def row_chunks(outputs: int, inputs: int) -> Iterator[slice]:
    """Slices of rows of about ``CHUNK`` values."""
    rows = max(1, CHUNK // max(inputs, 1))
    return (slice(start, start + rows) for start in range(0, outputs, rows))


def dequantised(w: Quantised) -> np.ndarray:  # float32[O, K]
    """The matrix of numpy arrays in float32, as ``lib.quantised.dequantised`` has it."""
    out = np.empty((w.num_outputs, w.num_inputs), np.float32)
    table = _table(w)
    scales, offsets = (_factors(w, part, index) for index, part in enumerate((w.scales, w.offsets)))
    assert scales is not None
    for rows in row_chunks(*out.shape):
        chunk = w.values[rows]
        if w.kind in ("int4", "fp4"):
            pairs = to_pairs(chunk)
            chunk = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(chunk), -1)
        grouped = table[chunk.view(np.uint8)].reshape(len(chunk), scales.shape[1], -1)
        if w.zeros is not None:
            grouped -= w.zeros[rows, :, None]
        grouped *= scales[rows, :, None]
        if offsets is not None:
            grouped += offsets[rows, :, None]
        out[rows] = grouped.reshape(len(chunk), -1)
    return out


def _table(w: Quantised) -> np.ndarray:  # float32[256 or 16]
    """The value that each stored byte or nibble stands for, before zeros."""
    if w.kind == "fp4":
        return np.array([*E2M1, *(-one for one in E2M1)], np.float32)
    if w.kind == "int4":
        middle = MIDDLE if w.zeros is None and w.offsets is None else 0
        return np.arange(16, dtype=np.float32) - middle
    every = np.arange(256, dtype=np.uint8)
    return every.view(np.int8 if w.kind == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)


def _factors(w: Quantised, part: np.ndarray | None, index: int) -> np.ndarray | None:
    """Scales (``index`` 0) or offsets in float32, with their supers."""
    if part is None:
        return None
    small = part.astype(np.float32)
    if w.block_outputs > 1:
        small = small.repeat(w.block_outputs, axis=0)
    if w.supers is None:
        return small
    large = w.supers[..., index].astype(np.float32)
    return (small.reshape(*large.shape, -1) * large[..., None]).reshape(small.shape)
