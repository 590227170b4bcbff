"""Axis letters used in every shape comment, and the arithmetic on them.

Legend: T tokens of a step, B rows of the bucket (its first rows decode, R prefill rows follow),
S slots, M pages per sequence, P pages of the pool, L layers, N query heads, K kv heads,
H head_dim, D model width, F feed-forward width, E experts, V vocabulary.
"""


def cdiv(numerator: int, denominator: int) -> int:
    """Ceiling of an integer division."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return cdiv(value, multiple) * multiple


def ladder(start: int, limit: int, factor: int) -> tuple[int, ...]:
    """start, start * factor, ... below ``limit``, then ``limit`` itself."""
    rungs: list[int] = []
    while start < limit:
        rungs.append(start)
        start *= factor
    return (*rungs, limit)
