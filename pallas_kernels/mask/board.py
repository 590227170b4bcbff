"""The layout of the masks of a step: int32[S] numbers of the slots, then int32[S, W] bits."""

from __future__ import annotations


def mask_words(vocab: int) -> int:
    """W: the int32 words of a slot's bits."""
    return -(-vocab // 32)


def board_words(num_slots: int, vocab: int) -> int:
    """The int32 words of a step."""
    return num_slots * (1 + mask_words(vocab))
