"""Packed values of published formats in the order of ``pallas_kernels.lib.quantised``.

Nibbles are moved without making a byte of each. In a *pair* order byte j of a row holds inputs 2j
(low bits) and 2j + 1; here byte j of a block of 64 holds inputs j and j + 32 (``nibble_block``).
All arrays are little-endian, as in safetensors.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.lib.quantised import nibble_block

# AWQ's int32 has eight outputs; its nibble p, from the lowest, is of output AWQ_ORDER[p]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_pairs(pairs: np.ndarray) -> np.ndarray:  # uint8[O, K / 2] -> uint8[O, K / 2]
    """Nibbles in pair order, in blocks."""
    outputs, width = pairs.shape
    half = nibble_block(2 * width) // 2
    blocks = pairs.reshape(outputs, -1, 2, half // 2)
    first, second = blocks[:, :, 0], blocks[:, :, 1]
    packed = np.empty((outputs, width // half, half), np.uint8)
    packed[..., 0::2] = (first & 15) | (second << 4)
    packed[..., 1::2] = (first >> 4) | (second & 0xF0)
    return packed.reshape(outputs, width)


def to_pairs(packed: np.ndarray) -> np.ndarray:  # uint8[O, K / 2] -> uint8[O, K / 2]
    """The inverse of ``from_pairs``."""
    outputs, width = packed.shape
    half = nibble_block(2 * width) // 2
    blocks = packed.reshape(outputs, -1, half)
    even, odd = blocks[..., 0::2], blocks[..., 1::2]
    pairs = np.empty((outputs, width // half, 2, half // 2), np.uint8)
    pairs[:, :, 0] = (even & 15) | (odd << 4)
    pairs[:, :, 1] = (even >> 4) | (odd & 0xF0)
    return pairs.reshape(outputs, width)


def from_awq(qweight: np.ndarray) -> np.ndarray:  # int32[K, O / 8] -> uint8[O, K / 2]
    """AWQ's nibbles, whose int32 has eight outputs of an input, in blocks."""
    inputs, words = qweight.shape
    half = nibble_block(inputs) // 2
    rows = np.ascontiguousarray(qweight).view(np.uint8).reshape(-1, 2, half, words, 4)
    first, second = rows[:, 0], rows[:, 1]  # [K / block, half, O / 8, 4]
    low, high = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    packed = np.empty((words, 8, inputs // 2), np.uint8)
    for place, output in enumerate(AWQ_ORDER):
        members = (high if place % 2 else low)[..., place // 2]
        packed[:, output] = members.reshape(inputs // 2, words).T
    return packed.reshape(words * 8, inputs // 2)


def words_to_bytes(words: np.ndarray) -> np.ndarray:  # int32[R, W] -> uint8[R, 4 W]
    """The bytes of each row."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)


def unpack_words(words: np.ndarray, kind: str) -> np.ndarray:  # int32[R, W] -> uint8[R, W * n]
    """The 8 (int4) or 4 (int8) values of each int32, the lowest bits first: zero points."""
    octets = words_to_bytes(words)
    if kind == "int8":
        return octets
    return np.stack([octets & 15, octets >> 4], axis=2).reshape(len(words), -1)


def signed(values: np.ndarray) -> np.ndarray:  # uint8 -> int8
    """Values that are stored plus 128."""
    return (values ^ np.uint8(128)).view(np.int8)


def unsigned(values: np.ndarray) -> np.ndarray:  # int8 -> uint8
    """The inverse of ``signed``."""
    return values.view(np.uint8) ^ np.uint8(128)
