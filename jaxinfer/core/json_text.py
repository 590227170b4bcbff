"""Reads JSON of a model's files. What such files never hold is an error, as damage or an attack.

That are keys that an object has twice, of which Python would take the last, values that are nested
so deep that later code (a comparison, a message) would exceed Python's stack, halves of surrogate
pairs, which no output takes, and files that are larger than any published one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

MAX_BYTES = 64 << 20  # the largest published file, a tokenizer.json, has 33 MB
MAX_JSON_BYTES = 32 << 20  # of a config or an index; objects in memory take up to 30 times as much
MAX_DEPTH = 64  # published files have up to 8 levels
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file, whose lines end with a line feed.

    Raises ``OSError``, or ``ValueError`` that says what is wrong with it.
    """
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size} bytes, and at most {most} are read")
    return _decoded(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises as ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path, MAX_JSON_BYTES))


def parse_json(content: bytes | str, parse_int: Callable[[str], int] = int) -> Any:
    """The value of a JSON text in UTF-8.

    Raises ``ValueError``, which says what is wrong, for anything else, and for what the module's
    docstring names.
    """
    text = content if isinstance(content, str) else _decoded(content)
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_int=parse_int)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    _check_depth(value)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair, which is no character") from None
    return value


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:60]!r} is there twice")
            seen.add(key)
    return made


def _check_depth(value: Any) -> None:
    """Raise ``ValueError`` for too many levels; goes through one level after the other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inner(one) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(f"its values are nested more than {MAX_DEPTH} levels deep")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []
