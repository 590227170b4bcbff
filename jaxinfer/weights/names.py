"""The name of a model, from the reference that the user gives. Imports little: a command needs it
before the engine's process begins.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from jaxinfer.weights.catalog import known_models
from jaxinfer.weights.wheel import PREFIX, parse_reference

# the name of a part of a split GGUF, as llama.cpp writes it
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})", re.DOTALL)


class Part(NamedTuple):
    """One of the files of a split GGUF: the name of the whole, its number from 1, their count."""

    name: str
    number: int
    count: int


def part_of(stem: str) -> Part | None:
    """The part of a split GGUF that a file's name, without its suffix, gives, if it is one."""
    found = _PART.fullmatch(stem)
    return Part(found[1], int(found[2]), int(found[3])) if found else None


def model_name(reference: str) -> str:
    """The name in the API: of a path that of its file or folder, else the reference itself."""
    if reference.startswith(PREFIX):
        return name_of_file(parse_reference(reference).file)
    try:
        path = Path(reference).expanduser()
        is_path = reference not in known_models() and path.exists()
    except (OSError, RuntimeError, ValueError):  # no path, which is an error once it is read
        return reference
    return name_of_path(path) if is_path else reference


def name_of_path(path: Path) -> str:
    """``coder`` for ``/x/coder.gguf``, ``/x/coder-00001-of-00003.gguf``, the folder ``/x/coder``
    and its ``config.json``. Links have names of their own.
    """
    path = Path(os.path.abspath(path))
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else name_of_file(path.name)


def name_of_file(file: str) -> str:
    """The name without folders, the suffix, and the number of a part."""
    stem = Path(file).stem
    part = part_of(stem)
    return part.name if part else stem
