"""Grammars of clients, in Lark's syntax or GBNF, and GBNF as llguidance's reader takes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)  # Lark has no such line
_PART = re.compile(
    r'(?P<comment>\#[^\n]*)|(?P<literal>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])'
    r"|(?P<name>[\w-]+)|(?P<next>\s*\n\s*(?=\|))|.",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_LONG_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\U([0-9a-fA-F]{8})")
_KEPT = 'nrt"\\[]'  # escapes of one character that llguidance reads
_LAST_CHARACTER = 0x10FFFF


def grammar_as_lark(text: str, of_gbnf: Callable[[str], str]) -> str:
    """A client's grammar in Lark's syntax. Raises ``ValueError`` for GBNF that is wrong.

    ``of_gbnf``: llguidance's reader of GBNF, whose escapes, rules named ``start`` and ends of lines
    before ``|`` it does not read; they are llama.cpp's and xgrammar's.
    """
    if not _RULE.search(text):
        return _LONG_ESCAPE.sub(lambda found: found[1] + _character(int(found[2], 16)), text)
    try:
        return of_gbnf("".join(_readable(text)))
    except Exception as error:
        raise ValueError(f"Failed to convert the grammar from GBNF to Lark: {error}") from None


def _readable(text: str) -> Iterator[str]:
    """The parts of GBNF, as llguidance reads them."""
    parts = list(_PART.finditer(text))
    names = _new_names(part["name"] for part in parts if part["name"])
    for part in parts:
        if part["literal"] or part["class"]:
            yield _ESCAPE.sub(_escaped, part[0])
        elif part["name"]:
            yield names[part[0]]
        else:
            yield " " if part["next"] else part[0]


def _new_names(names: Iterator[str]) -> dict[str, str]:
    """Names that stay different in llguidance, which changes case and hyphens, and needs start."""
    found: dict[str, str] = {}
    taken = {"start"}
    for name in dict.fromkeys(names):
        new = name
        while name != "root" and _folded(new) in taken:
            new += "-x"
        taken.add(_folded(new))
        found[name] = new
    return found


def _folded(name: str) -> str:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def _escaped(found: re.Match[str]) -> str:
    """An escape sequence, in a text or between brackets."""
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return _character(int(code[1:], 16))
    if code in _KEPT or code.isalnum():
        return found[0]
    return f"\\x{ord(code):02x}" if ord(code) < 128 else code


def _character(code: int) -> str:
    """A character, as an escape sequence where it may have a meaning of its own."""
    if code > _LAST_CHARACTER or 0xD800 <= code < 0xE000:
        raise ValueError(f"{code:x} is the number of no character")
    return f"\\x{code:02x}" if code < 128 else chr(code)
