"""Formats of large numbers."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Decimal units with three digits: ``98.1 MB``."""
    return format_count(count, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: float, units: tuple[str, ...] = ("", "K", "M", "B", "T")) -> str:
    """A large number with three digits: ``135 M``."""
    step = 0
    while count >= 999.5 and step < len(units) - 1:
        count /= 1000
        step += 1
    return f"{count:.3g} {units[step]}".rstrip()
