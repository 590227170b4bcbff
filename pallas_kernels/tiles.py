"""Sizes of tiles. Owns: ``power_of_two``. Must not know: kernels."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, as tiles of Triton must be."""
    return 1 << (n - 1).bit_length()
