"""Tuned choices: which launch was fastest for a case on a device, as data beside the op.

Owns: the files ``<op>/tuned/<device>.json``, {case name: {choice: value}}, which ``bench/tune.py``
writes; where two implementations of an op are tuned, the second's lie in ``<op>/tuned/<impl>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from pallas_kernels.device import current_device
from pallas_kernels.registry import OP_NAMES, Case, all_ops

NAMES = (*OP_NAMES, "append_decode/mosaic")  # of all that may be tuned: an op, or op/implementation

type Choices = dict[str, dict[str, Any]]


def tuned_file(name: str, device_kind: str) -> Traversable:
    """Where the choices for a kind of device lie, whether or not there are any."""
    op, _, impl = name.partition("/")
    slug = device_kind.lower().replace(" ", "_")
    folder = files("pallas_kernels") / op / "tuned"
    return (folder / impl if impl else folder) / f"{slug}.json"


@cache
def read_choices(file: Traversable) -> Choices:
    """The choices of a file by case name; none when there is no such file."""
    return json.loads(file.read_text()) if file.is_file() else {}


def check_choices() -> None:
    """Raise ValueError, with the file's name, for one of the current device that is no JSON object
    or names what is no case of its op. Calls tell otherwise, when steps are traced.
    """
    cases_of = {op.name: op.cases for op in all_ops()}
    for name in NAMES:
        file = tuned_file(name, current_device().kind)
        try:
            choices = read_choices(file)
            if not isinstance(choices, dict):
                raise ValueError("it is no JSON object")
            _refuse_unknown(choices, cases_of[name.partition("/")[0]])
        except ValueError as error:
            raise ValueError(f"{file} cannot be used: {error}; tune {name} again") from error


def _refuse_unknown(choices: Choices, cases: Sequence[Case]) -> None:
    if unknown := sorted(choices.keys() - {case.name for case in cases}):
        raise ValueError(f"tuned choices name {unknown[0]!r}, which is no case")


def by_shapes[C: Case](
    choices: Choices, cases: Sequence[C], shapes_of: Callable[[C], Hashable]
) -> dict[Hashable, dict[str, Any]]:
    """The choices by what a call can be known by, its shapes.

    Raises ValueError for a name that no case has, and for two tuned cases of the same shapes.
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
    """What was tuned for a call of these shapes on the current device, or None."""
    file = tuned_file(name, current_device().kind)
    return by_shapes(read_choices(file), cases, shapes_of).get(shapes)
