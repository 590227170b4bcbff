"""Patterns and formats of JSON schemas as regular expressions of a whole text, in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from jaxinfer.text.grammar.library import load_llguidance

ANY_TEXT = r"/(.|\n)*/"
_ASCII = "dw"  # \d and \w are ASCII in JSON schemas, as in ECMAScript
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HEX = r"[0-9a-fA-F]"
_DATE = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([zZ]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-\/=?^_`{|}~]+"
_PATH = r"[a-zA-Z0-9\-._~!$&'()*+,;=:@\/]|%[0-9a-fA-F]{2}"
_CLOCK = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
# The formats that llguidance knows in JSON (``json/formats.rs``), for texts that are not quoted:
# texts of RFC 3339, 5321, 1123, 4291, 4122 and 3986, of which some have further ones.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date-time": f"{_DATE}[tT]{_TIME}",
        "date": _DATE,
        "time": _TIME,
        "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
        "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*",
        "hostname": rf"{_LABEL}(\.{_LABEL})*",
        "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
        "ipv6": "|".join(
            (
                rf"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
                *(
                    rf"({_HEX}{{1,4}}:){{{n}}}(:{_HEX}{{1,4}}){{1,{7 - n}}}"
                    if n
                    else rf":(:{_HEX}{{1,4}}){{1,7}}"
                    for n in range(7)
                ),
                "::",
            )
        ),
        "uuid": rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:({_PATH})+(\?({_PATH}|\?)*)?(#({_PATH}|\?)*)?",
    }
)
KNOWN_FORMATS = frozenset({*FORMATS, "unknown"})  # llguidance refuses all others


def format_expression(name: str) -> str:
    """The texts of a format."""
    return f"/{FORMATS[name]}/"


def search_expression(pattern: str) -> str:
    """The texts in which a pattern is found; raises ``ValueError`` for a pattern with anchors that
    are not at the ends of its choices.
    """
    choices: list[str] = []
    for choice in _choices(pattern):
        body = choice.removeprefix("^")
        begin = "" if len(body) < len(choice) else r"(.|\n)*"
        ends = re.search(r"(?<!\\)(\\\\)*\$\Z", body) is not None
        body = body.removesuffix("$") if ends else body
        if _has_anchor(body):
            raise ValueError(f"the pattern {pattern!r:.80} has ^ or $ within it")
        choices.append(f"{begin}({body}){'' if ends else r'(.|\n)*'}")
    return f"/{load_llguidance().regex_to_lark('|'.join(choices), _ASCII)}/"


_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression


def _choices(pattern: str) -> list[str]:
    """A pattern at its outermost ``|``."""
    found, depth = [""], 0
    for part in _PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append("")
        else:
            found[-1] += part
    return found


def _has_anchor(pattern: str) -> bool:
    return any(part in ("^", "$", r"\A", r"\z", r"\Z") for part in _PART.findall(pattern))


def literal(text: str) -> str:
    """A text."""
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    """The texts of one of several expressions."""
    return f"({' | '.join(expressions)})"


def containing(texts: Iterable[str]) -> str:
    """The texts with one of these in them."""
    return f"({ANY_TEXT} {either(map(literal, texts))} {ANY_TEXT})"


def _matcher(expression: str) -> Any:
    """An llguidance.LLMatcher of a text; raises ``ValueError`` if it cannot be compiled."""
    library = load_llguidance()
    source = library.LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {expression}")
    matcher = library.LLMatcher(_bytes(), source, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error().partition("\n")[0])
    return matcher


@cache
def _bytes() -> Any:
    """The vocabulary of bytes, for questions about expressions."""
    return load_llguidance().LLTokenizer("byte")


def is_empty(expression: str) -> bool:
    """True if no text fits; raises ``ValueError`` if it cannot be compiled."""
    matcher = _matcher(expression)
    return not any(matcher.compute_bitmask()) or matcher.is_error()


def fits(expression: str, text: str) -> bool:
    """True if a text fits; raises ``ValueError`` if the expression cannot be compiled."""
    matcher = _matcher(expression)
    return all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()


def is_pattern(pattern: str) -> bool:
    """True if llguidance can follow a pattern."""
    library = load_llguidance()
    schema = json.dumps({"type": "string", "pattern": pattern})
    source = library.LLMatcher.grammar_from_json_schema(schema)
    return not library.LLMatcher(_bytes(), source, log_level=0).is_error()
