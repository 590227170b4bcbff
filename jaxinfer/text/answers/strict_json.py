"""JSON as the standard has it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import regex


def strict_json(text: str, *, raw_controls: bool = False) -> Any:
    """The value of JSON text; raises ``ValueError``, also for NaN and too deep nesting.
    ``raw_controls``: strings may have control characters, such as newlines, that are not escaped.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, strict=not raw_controls)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# characters and whole escapes; of a surrogate pair both halves
_STRING = regex.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?!d[89ab])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}'
    r"(?:\\u[0-9a-f]{4}|(?=\\[^u])|(?!\\|\Z)))*+",
    regex.IGNORECASE,
)


class JsonStringReader:
    """The text of a JSON string that arrives in pieces, after its opening quote.

    A closing quote ends it; what follows is left out. An escape is read once it is complete, half
    of a surrogate pair as U+FFFD.
    """

    def __init__(self) -> None:
        self._rest = ""  # the beginning of an escape
        self._is_over = False

    def feed(self, piece: str) -> str:
        """The text that this piece completes."""
        if self._is_over:
            return ""
        given = self._rest + piece
        end = _STRING.match(given)
        assert end is not None  # the pattern matches an empty text
        inner, self._rest = end[0], given[end.end() :]
        self._is_over = self._rest.startswith('"')
        text = json.loads(f'"{inner}"', strict=False)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
