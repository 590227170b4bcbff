"""Conversion of values from users and files to plain numbers, and to words of a message.

Python's and numpy's numbers are accepted, a bool or a string never is.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def as_int(value: Any) -> int | None:
    """``value`` as an int, or None if it is not an integer; 2.0 is not one."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """``value`` as a float (infinities and NaN included), or None if it is not a real number."""
    if type(value) is float:  # the usual case; the check against Real takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer larger than every float
        return None


def short(value: object, most: int = 60) -> str:
    """A value as a message shows it: its ``repr``, cut off after ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
