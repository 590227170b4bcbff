"""``ResponseTemplate``: the parts of a model's answer, declared as in transformers.

The form is version 1 of transformers' ``response_template`` (docs: chat_response_parsing). A field
is a part of the message; it is opened and closed by texts or patterns, and its content is read by a
named reader. A field without an opening is the text outside all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import regex

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.answers.source import PATTERN_SECONDS
from jaxinfer.text.answers.values import READERS, STREAMED

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CONTENT_FIELD = "content"  # or a name that begins so, for a second form of content
CALLS_FIELD = "tool_calls"  # or a name that begins so, for a second form of calls
CALL_READERS = ("tags", "json-answer")  # of this project's own formats; see ``calls``
# after the results of calls, where a prompt has them within the model's turn: DeepSeek, Mistral,
# Gemma 4, FunctionGemma
_RESULTS_END = regex.compile(
    r"<｜tool▁outputs?▁end｜>|</function_results>|\[/TOOL_RESULTS\]|<tool_response\|>"
    r"|<end_function_response>"
)
_MAX_MARK = 100  # characters of a mark of thoughts
_KEYS = frozenset({"version", "defaults", "start_anchor", "start_anchor_pattern", "fields"})
_FIELD_KEYS = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    }
)


@dataclass(frozen=True)
class Anchor:
    """Where a field begins or ends. ``is_final``: a whole match cannot become longer."""

    pattern: regex.Pattern[str]
    is_final: bool


@dataclass(frozen=True)
class Field:
    """One part of a message. ``close`` None: until the end of the answer."""

    name: str
    open: Anchor | None
    close: Anchor | None
    reader: str
    reader_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    join: str = ""  # between the texts of a field that occurs several times
    transform: Any = None
    transform_each: bool = False
    repeats: bool = False  # of thoughts: they may begin again among the text
    ending: regex.Pattern[str] | None = (
        None  # ``close`` right after a call; brackets may precede it
    )

    @property
    def has_reasoning(self) -> bool:
        """True if its content is the model's thoughts."""
        return self.name in REASONING_FIELDS

    @property
    def has_content(self) -> bool:
        """True if its content is the text for the user."""
        return self.name.startswith(CONTENT_FIELD)

    @property
    def has_calls(self) -> bool:
        """True if its content is tool calls."""
        return self.name.startswith(CALLS_FIELD)

    @property
    def has_named_arguments(self) -> bool:
        """True if its opening has the name of a call, and its content the arguments."""
        entries = self.transform if isinstance(self.transform, Mapping) else {}
        call = cast("Mapping[str, Any]", entries).get("function", entries)
        return isinstance(call, Mapping) and {**cast("Mapping[str, Any]", call)} == {
            "name": "{name}",
            "arguments": "{content}",
        }

    @property
    def is_answer(self) -> bool:
        """True if it can only be the whole answer, after thoughts."""
        return self.reader == "json-answer"

    @property
    def as_content(self) -> Field:
        """The field as content, for text in it that is no call."""
        return replace(self, name=CONTENT_FIELD, reader="text", reader_args={"strip": False})

    @property
    def strips(self) -> bool:
        """True if white space around the text does not belong to it."""
        return bool(self.reader_args.get("strip", True))


@dataclass(frozen=True)
class ResponseTemplate:
    """The fields, and the pattern after whose last occurrence in a prompt the answer begins."""

    start: regex.Pattern[str]
    fields: tuple[Field, ...]
    thinks_first: bool = False  # an answer begins with thoughts, whether or not a mark opens them

    @property
    def implicit(self) -> Field | None:
        """The field of the text outside all others; None: such text is dropped."""
        return next((one for one in self.fields if one.open is None), None)

    def only(self, keep: Callable[[Field], bool]) -> ResponseTemplate:
        """The template with the fields for which ``keep`` is true."""
        return replace(self, fields=tuple(filter(keep, self.fields)))

    def begun_answer(self, prompt: str) -> tuple[str, bool]:
        """The part of a prompt that belongs to the answer, such as an opened ``<think>``; False: it
        may be less, since the pattern does not occur.
        """
        end = None
        for found in self.start.finditer(prompt, timeout=PATTERN_SECONDS):
            end = found.end()
        return (prompt, False) if end is None else (prompt[end:], True)

    def marks_at_end(self, prompt: str) -> str:
        """The marks of thoughts with which a prompt ends, and the white space around them."""
        fields = [one for one in self.fields if one.has_reasoning]
        marks = [one for field in fields for one in (field.open, field.close) if one is not None]
        start = len(prompt)
        while True:
            end = len(prompt[:start].rstrip())
            tail = max(end - _MAX_MARK, 0)
            found = [
                match.start()
                for mark in marks
                for match in mark.pattern.finditer(prompt, tail, end, timeout=PATTERN_SECONDS)
                if match.end() == end > match.start()
            ]
            if not found:
                return prompt[start:]
            start = min(found)

    def after_results(self, begun: str) -> str:
        """The begun answer after the results of its calls, which may contain any mark."""
        return _RESULTS_END.split(begun)[-1]


def read_template(given: Any) -> ResponseTemplate:
    """Check and compile a ``response_template``; raises ``TokenizerError`` naming the entry."""
    if not isinstance(given, Mapping):
        raise _error("it", "must be an object")
    entries = cast("Mapping[str, Any]", given)
    _refuse_others("it", entries, _KEYS)
    if entries.get("version", 1) != 1:
        raise _error("version", f"{entries['version']!r} is not supported; 1 is")
    fields = entries.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise _error("fields", "must be an object that is not empty")
    start = _anchor("start_anchor", entries, "start_anchor")
    if start is None:
        raise _error("start_anchor", "or start_anchor_pattern is required")
    made = tuple(_field(name, one) for name, one in cast("Mapping[str, Any]", fields).items())
    if sum(one.open is None for one in made) > 1:
        raise _error("fields", "may have only one field without open or open_pattern")
    return ResponseTemplate(start.pattern, made)


def _field(name: str, given: Any) -> Field:
    where = f"fields.{name}"
    if not isinstance(given, Mapping):
        raise _error(where, "must be an object")
    entries = cast("Mapping[str, Any]", given)
    _refuse_others(where, entries, _FIELD_KEYS)
    reader = entries.get("content", "text")
    if reader not in READERS and reader not in CALL_READERS:
        raise _error(f"{where}.content", f"{reader!r} is unknown; use one of {', '.join(READERS)}")
    if reader not in STREAMED and (name.startswith(CONTENT_FIELD) or name in REASONING_FIELDS):
        raise _error(f"{where}.content", "must be text, since it is streamed")
    join = entries.get("join") or ""
    if not isinstance(join, str):
        raise _error(f"{where}.join", "must be text")
    close = _anchor(where, entries, "close")
    return Field(
        name,
        _anchor(where, entries, "open"),
        close,
        reader,
        entries.get("content_args") or {},
        join,
        entries.get("transform"),
        bool(entries.get("transform_each", False)),
        bool(entries.get("repeats", False)),
        # models write one bracket too many at times
        close and regex.compile(rf"[\s}}\]]*(?:{close.pattern.pattern})", regex.DOTALL),
    )


def _anchor(where: str, entries: Mapping[str, Any], name: str) -> Anchor | None:
    """The anchor ``name`` (a text or several) or ``name``_pattern; None if neither is set."""
    texts, pattern = entries.get(name), entries.get(f"{name}_pattern")
    if texts is not None and pattern is not None:
        raise _error(where, f"has both {name} and {name}_pattern; leave one out")
    if texts is None and pattern is None:
        return None
    if pattern is not None:
        if not isinstance(pattern, str):
            raise _error(f"{where}.{name}_pattern", "must be text")
        return Anchor(_compiled(where, pattern), is_final=False)
    listed = cast("list[Any]", texts) if isinstance(texts, list) else [texts]
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise _error(f"{where}.{name}", "must be text, or a list of texts, that is not empty")
    longest_first = sorted(map(str, listed), key=len, reverse=True)
    grows = any(a != b and a.startswith(b) for a in longest_first for b in longest_first)
    joined = "|".join(map(regex.escape, longest_first))
    return Anchor(_compiled(where, joined), is_final=not grows)


def _compiled(where: str, pattern: str) -> regex.Pattern[str]:
    if pattern.startswith(r"\s*"):
        # such a match begins where the search does, or where a run of white space does: other
        # positions need not be tried, which took time quadratic in the length of a run
        pattern = rf"(?:\G|(?<!\s)){pattern}"
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise _error(where, f"has an invalid pattern: {error}") from error


def _refuse_others(where: str, entries: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(map(str, entries.keys() - known)):
        raise _error(where, f"has the unknown entry {unknown[0]!r}")


def _error(where: str, problem: str) -> TokenizerError:
    return TokenizerError(f"The model's response_template cannot be used: {where} {problem}.")
