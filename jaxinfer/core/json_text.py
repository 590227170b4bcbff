"""Reads JSON of a model's files: what these files never hold is an error, as damage or an attack.

That are keys that occur twice, of which Python would take the last, and values that are nested so
deep that later code (a comparison, a message) would exceed Python's stack.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64  # published files have up to 8 levels


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises ``ValueError``, whose text says what is wrong, for anything else, a key that an object
    has twice, and more than ``MAX_DEPTH`` levels.
    """
    try:
        value = json.loads(content, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    _check_depth(value)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"the key {twice[:60]!r} is there twice")
    return made


def _check_depth(value: Any) -> None:
    """Raise ``ValueError`` for too many levels, one level after the other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"its values are nested more than {MAX_DEPTH} levels deep")
