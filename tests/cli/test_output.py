"""Formats of numbers."""

import pytest

from jaxinfer.cli.output import format_bytes, format_count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_144_000, "98.1 MB"), (2.5e15, "2.5e+03 TB")],
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (134_515_008, "135 M"), (999_999, "1 M")])
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text
