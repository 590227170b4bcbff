"""Values that came from outside, made plain numbers.

Owns: what counts as a number: Python's and numpy's, never a bool or a string.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def as_int(value: Any) -> int | None:
    """The whole number that ``value`` is, or None; 2.0 is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """The real number that ``value`` is (infinities and NaN included), or None."""
    if type(value) is float:  # nearly always, and asking for a Real takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return None
