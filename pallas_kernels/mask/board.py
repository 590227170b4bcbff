"""The layout of the masks of a step in host memory: the number of each slot, then its bits."""

from __future__ import annotations

# int32 words, 128 bytes, of which the first is a number: a GPU reads such a line of host memory for
# one CTA after the other, which takes 2.7 us each (H100)
NUMBER_WORDS = 32


def mask_words(vocab: int) -> int:
    """W: the int32 words of a slot's bits."""
    return -(-vocab // 32)


def board_words(num_slots: int, vocab: int) -> int:
    """The int32 words of a step, in whole lines."""
    words = num_slots * (NUMBER_WORDS + mask_words(vocab))
    return -(-words // NUMBER_WORDS) * NUMBER_WORDS
