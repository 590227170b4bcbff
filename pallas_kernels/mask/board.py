"""The layout of the masks of a step in host memory: the number of each slot, then its bits."""

from __future__ import annotations

ALIGN = 32  # int32 words, 128 bytes: the numbers are padded to a multiple


def mask_words(vocab: int) -> int:
    """W: the int32 words of a slot's bits."""
    return -(-vocab // 32)


def number_words(num_slots: int) -> int:
    """The int32 words of the numbers, padding included."""
    return -(-num_slots // ALIGN) * ALIGN


def board_words(num_slots: int, vocab: int) -> int:
    """The int32 words of a step."""
    words = number_words(num_slots) + num_slots * mask_words(vocab)
    return -(-words // ALIGN) * ALIGN
