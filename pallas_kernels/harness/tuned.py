"""Tuned choices: the fastest configuration found for a case on a device, as data next to the op.

Owns: the files ``<op>/tuned/<device>.json``, {case name: {field: value}}, written by
``bench/tune.py``. If two implementations of an op are tuned, the files of the second are in
``<op>/tuned/<impl>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from pallas_kernels.harness.registry import OP_NAMES, Case, all_ops
from pallas_kernels.lib.device import current_device

NAMES = (*OP_NAMES, "append_decode/mosaic")  # of tunable kernels: an op, or op/implementation

type Choices = dict[str, dict[str, Any]]


def tuned_file(name: str, device_kind: str) -> Traversable:
    """The path of the choices for a kind of device; the file need not exist."""
    op, _, impl = name.partition("/")
    slug = device_kind.lower().replace(" ", "_")
    folder = files("pallas_kernels") / op / "tuned"
    return (folder / impl if impl else folder) / f"{slug}.json"


@cache
def read_choices(file: Traversable) -> Choices:
    """The choices in a file by case name; empty when the file does not exist."""
    return json.loads(file.read_text()) if file.is_file() else {}


def check_choices() -> None:
    """Check the files of the current device before any step is traced.

    Raises ValueError with the file's name when it is not a JSON object or names an unknown case.
    """
    cases_of = {op.name: op.cases for op in all_ops()}
    for name in NAMES:
        file = tuned_file(name, current_device().kind)
        try:
            choices = read_choices(file)
            if not isinstance(choices, dict):
                raise ValueError("it is not a JSON object")
            _refuse_unknown(choices, cases_of[name.partition("/")[0]])
        except ValueError as error:
            raise ValueError(f"{file} cannot be used: {error}; tune {name} again") from error


def _refuse_unknown(choices: Choices, cases: Sequence[Case]) -> None:
    if unknown := sorted(choices.keys() - {case.name for case in cases}):
        raise ValueError(f"tuned choices name {unknown[0]!r}, which is not a case")


def by_shapes[C: Case](
    choices: Choices, cases: Sequence[C], shapes_of: Callable[[C], Hashable]
) -> dict[Hashable, dict[str, Any]]:
    """The choices keyed by the shapes of a call.

    Raises ValueError for an unknown case name, and for two tuned cases of the same shapes.
    """
    _refuse_unknown(choices, cases)
    known = {case.name: case for case in cases}
    found: dict[Hashable, dict[str, Any]] = {}
    for name, choice in choices.items():
        shapes = shapes_of(known[name])
        if shapes in found:
            raise ValueError(f"tuned choices name {name!r} and another case of the same shapes")
        found[shapes] = choice
    return found


def lookup[C: Case](
    name: str, cases: Sequence[C], shapes_of: Callable[[C], Hashable], shapes: Hashable
) -> dict[str, Any] | None:
    """The tuned choice for a call of these shapes on the current device, or None."""
    file = tuned_file(name, current_device().kind)
    return by_shapes(read_choices(file), cases, shapes_of).get(shapes)
