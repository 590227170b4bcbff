"""GGUF's quantised blocks in the internal form of quantised matrices, without loss.

Five and six bits become 8. Source of the layouts: ``ggml-quants.c`` and ``ggml-common.h`` of
llama.cpp; the ``gguf`` package's ``dequantize`` is the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.gguf.types import BLOCK_SIZES
from jaxinfer.weights.gguf.types import TensorType as Type
from jaxinfer.weights.quantised.layouts import powers_of_2
from pallas_kernels.lib.quantised import Form, Quantised, nibble_block
from pallas_kernels.native import library

_SMALL, _SUPER = 32, 256  # inputs of a block
FORMS: Mapping[Type, Form] = MappingProxyType(
    {
        Type.Q4_0: Form("int4", _SMALL, "float16"),
        Type.Q4_1: Form("int4", _SMALL, "float16", offsets=True),
        Type.Q5_0: Form("int8", _SMALL, "float16"),
        Type.Q5_1: Form("int8", _SMALL, "float16", offsets=True),
        Type.Q8_0: Form("int8", _SMALL, "float16"),
        Type.Q4_K: Form("int4", _SMALL, "uint8", offsets=True, super_group=_SUPER),
        Type.Q5_K: Form("int8", _SMALL, "uint8", offsets=True, super_group=_SUPER),
        Type.Q6_K: Form("int8", 16, "int8", super_group=_SUPER),
        Type.MXFP4: Form("fp4", _SMALL, "bfloat16"),
    }
)


def convert(
    kind: Type,
    rows: np.ndarray,  # uint8[O, bytes of a row]
    made: Mapping[str, np.ndarray],  # of ``Quantised.tree``, contiguous
) -> None:
    """Convert rows of a tensor's bytes into the arrays of a matrix, natively if that is built."""
    if library.from_blocks(kind.value, rows, rows.size // BLOCK_SIZES[kind][1], made):
        return
    for part, values in from_blocks(kind, rows).tree().items():
        made[part][:] = values


def from_blocks(kind: Type, rows: np.ndarray) -> Quantised:  # uint8[O, bytes of a row]
    """The matrix of a tensor's bytes; ``kind`` is one of ``FORMS``."""
    return _READERS[kind](rows)


def _blocks(rows: np.ndarray, nbytes: int) -> np.ndarray:  # uint8[O, B, nbytes]
    return rows.reshape(len(rows), -1, nbytes)


def _halves(blocks: np.ndarray) -> np.ndarray:  # uint8[O, B, 2 or more] -> float16[O, B, ...]
    return np.ascontiguousarray(blocks).view(np.float16)


def _small_nibbles(packed: np.ndarray) -> np.ndarray:  # uint8[O, B, 16] -> uint8[O, K / 2]
    """Byte j of a block holds inputs j and j + 16; two blocks make one of ours."""
    num_outputs, count, _ = packed.shape
    if nibble_block(count * _SMALL) == _SMALL:
        return packed.reshape(num_outputs, -1)
    first, second = packed[:, 0::2], packed[:, 1::2]
    made = np.empty((num_outputs, count // 2, 32), np.uint8)
    np.bitwise_or(first & 15, second << 4, out=made[..., :16])
    np.bitwise_or(first >> 4, second & 240, out=made[..., 16:])
    return made.reshape(num_outputs, -1)


def _q4_0(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 18)
    return Quantised("int4", _small_nibbles(blocks[..., 2:]), _halves(blocks[..., :2])[..., 0])


def _q4_1(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 20)
    factors = _halves(blocks[..., :4])
    scales, offsets = (np.ascontiguousarray(factors[..., i]) for i in range(2))
    return Quantised("int4", _small_nibbles(blocks[..., 4:]), scales, offsets=offsets)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:  # uint8[O, B, 4], [O, B, 16]
    """Values int8[O, B, 32] of their fifth bits and nibbles."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    nibbles = np.concatenate([low & 15, low >> 4], axis=-1)
    return (nibbles | fifth << 4).view(np.int8)


def _q5_0(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 22)
    values = _five_bits(blocks[..., 2:6], blocks[..., 6:]) - np.int8(16)
    return Quantised("int8", values.reshape(len(rows), -1), _halves(blocks[..., :2])[..., 0])


def _q5_1(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 24)
    factors = _halves(blocks[..., :4])
    values = _five_bits(blocks[..., 4:8], blocks[..., 8:]).reshape(len(rows), -1)
    scales, offsets = (np.ascontiguousarray(factors[..., i]) for i in range(2))
    return Quantised("int8", values, scales, offsets=offsets)


def _q8_0(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 34)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(rows), -1)
    return Quantised("int8", values, _halves(blocks[..., :2])[..., 0])


def _mxfp4(rows: np.ndarray) -> Quantised:
    """GGML doubles the values and halves the scales of OCP's MX formats; the codes are the same."""
    blocks = _blocks(rows, 17)
    return Quantised("fp4", _small_nibbles(blocks[..., 1:]), powers_of_2(blocks[..., 0]))


def _k_factors(
    blocks: np.ndarray,  # uint8[O, B, 16 or more]: d, dmin, 12 bytes of scales and minima
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales and offsets uint8[O, 8 * B], and supers float16[O, B, 2]: d and -dmin."""
    supers = _halves(blocks[..., :4]).copy()
    np.negative(supers[..., 1], out=supers[..., 1])
    first, second, third = np.split(blocks[..., 4:16], 3, axis=-1)  # [O, B, 4] each
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=-1)
    return scales.reshape(len(blocks), -1), minima.reshape(len(blocks), -1), supers


def _q4_k(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 144)
    scales, minima, supers = _k_factors(blocks)
    values = blocks[..., 16:].reshape(len(rows), -1)  # already in blocks of 64
    return Quantised("int4", values, scales, None, minima, supers)


def _q5_k(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 176)
    scales, minima, supers = _k_factors(blocks)
    low = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=3)  # [O, B, 4, 2, 32]
    bits = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    fifth = blocks[..., None, None, 16:48] >> bits & 1
    values = (nibbles | fifth << 4).view(np.int8).reshape(len(rows), -1)
    return Quantised("int8", values, scales, None, minima, supers)


def _q6_k(rows: np.ndarray) -> Quantised:
    blocks = _blocks(rows, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=3)  # [O, B, 2, 2, 64]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1)
    upper = (high >> shifts & 3) << 4  # [O, B, 2, 4, 32]
    values = nibbles.reshape(upper.shape) | upper
    signed = values.view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(rows), -1)
    supers = _halves(blocks[..., 208:])
    return Quantised("int8", signed.reshape(len(rows), -1), scales, supers=supers)


_READERS: Mapping[Type, Callable[[np.ndarray], Quantised]] = MappingProxyType(
    {
        Type.Q4_0: _q4_0,
        Type.Q4_1: _q4_1,
        Type.Q5_0: _q5_0,
        Type.Q5_1: _q5_1,
        Type.Q8_0: _q8_0,
        Type.Q4_K: _q4_k,
        Type.Q5_K: _q5_k,
        Type.Q6_K: _q6_k,
        Type.MXFP4: _mxfp4,
    }
)
