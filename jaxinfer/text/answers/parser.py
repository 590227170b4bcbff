"""``AnswerParser``: the text of an answer, as it arrives, as reasoning, content and tool calls.

It knows nothing of an API's JSON. However a text is divided, the same parts are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import regex

from jaxinfer.text.answers.strict_json import JsonStringReader
from jaxinfer.text.answers.template import (
    PATTERN_SECONDS,
    Anchor,
    Field,
    ResponseTemplate,
)
from jaxinfer.text.answers.values import Call, read_calls, string_marks


class Reasoning(NamedTuple):
    """More of the model's thoughts."""

    text: str


class Content(NamedTuple):
    """More of the text for the user."""

    text: str


type Part = Reasoning | Content | Call


class _Found(NamedTuple):
    """An anchor in the buffer: a field begins or ends, or a special token is left out."""

    kind: Literal["open", "close", "hidden"]
    field: Field | None
    match: regex.Match[str]


class AnswerParser:
    """Parses one answer: ``feed`` its text in any pieces, then ``finish``.

    A call is returned when it is complete: its arguments are a JSON object. Text that looks like a
    call and is none is content; only a call that is cut off at the answer's end is dropped. Methods
    raise ``TimeoutError`` if a pattern of the model's own template takes too long.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        hidden: regex.Pattern[str] | None = None,
    ) -> None:
        """``prompt`` is the text before the answer, which may have begun it. ``tools``: the
        JSON schema of each tool's parameters. ``hidden`` matches special tokens, which are left out
        of texts where they are no anchors.
        """
        self._template = template
        self._tools = tools or {}
        self._hidden = hidden
        self._implicit = template.implicit
        self._openings = [one for one in template.fields if one.open is not None]
        self._enter(self._implicit)
        self._buffer, knows_start = template.begun_answer(prompt)
        if not knows_start:  # the prompt's own calls and examples of calls are not the answer's
            self._openings = [one for one in self._openings if one.has_reasoning]
        self._start = 0  # of the text that is not yet returned
        self._scan = 0  # where the next anchor may begin
        self._skips_space = False  # a mark at the prompt's end has the white space after it
        self._own = len(self._buffer)  # where the answer's own text begins, after the prompt's
        self._is_prompt = True
        for _ in self._parts(at_end=False):
            pass  # text of the prompt
        self._is_prompt = False
        self._openings = [one for one in template.fields if one.open is not None]

    @property
    def in_reasoning(self) -> bool:
        """True if the next text belongs to the model's thoughts."""
        return self._field is not None and self._field.has_reasoning

    @property
    def in_content(self) -> bool:
        """True if the next text belongs to the content, unless it opens another field."""
        return self._field is not None and self._field.has_content

    def feed(self, text: str) -> list[Part]:
        """The parts that are complete with this further text; neighbouring texts are joined."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        self._buffer += text
        parts = _joined(self._parts(at_end=False))
        # a character before stays, for patterns that look behind
        if (done := self._start - 1) > 0:
            self._buffer = self._buffer[done:]
            self._start, self._scan = 1, self._scan - done
            self._own = max(self._own - done, 0)
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """The rest at the answer's end. ``is_cut``: the model has not ended it, so that a call
        without its closing mark is not complete.
        """
        return _joined([*self._parts(at_end=True), *self._rest(is_cut)])

    def _parts(self, *, at_end: bool) -> Iterator[Part]:
        while True:
            found, hold = self._next_anchor(at_end)
            if found is None:
                if not self._collects:
                    yield from self._text(hold)
                    self._start = hold
                self._scan = max(self._scan, hold)
                return
            start, end = found.match.span()
            if self._is_in_string(start):
                self._scan = start + 1
            elif found.kind == "open":
                yield from self._text(start)
                self._start = self._scan = end
                self._enter(found.field, found.match)
            elif self._collects:
                yield from self._collected(start, end, found.match.groupdict())
                is_empty = not self._opening and end == self._start
                self._start, self._scan = end, end + is_empty
                self._enter(self._implicit)
            else:  # a text ends, or a special token is left out
                yield from self._text(start)
                stays = found.kind == "hidden" or self._field is self._implicit
                self._start, self._scan = end, end + (stays and start == end)
                if not stays:
                    self._enter(self._implicit)

    def _rest(self, is_cut: bool) -> Iterator[Part]:
        end = len(self._buffer)
        if not self._collects:
            yield from self._text(end)
        elif is_cut:  # text without a mark before it may be an answer in JSON
            yield from () if self._opening.strip() else self._as_content(end)
        else:
            yield from self._collected(end, end, {})

    # fields

    def _enter(self, field: Field | None, match: regex.Match[str] | None = None) -> None:
        self._field = field
        self._captures = {} if match is None else _groups(match.groupdict())
        self._opening = "" if match is None else match[0]
        self._collects = field is not None and field.has_calls
        marks = string_marks(field.reader, field.reader_args) if field and self._collects else ()
        self._strings = _StringTracker(marks) if marks else None
        is_json = field is not None and field.reader == "json-string"
        self._string = JsonStringReader() if is_json else None
        self._is_blank = True  # no text of the field has been returned since it was opened
        self._spaces = ""  # at its end: they are part of it if further text follows

    def _text(self, end: int) -> Iterator[Part]:
        """The buffer up to ``end`` as text of the current field."""
        text = self._buffer[max(self._start, self._own) : end]
        field = self._field
        if field is None or not text:
            return
        if self._string is not None:
            text = self._string.feed(text)
        if field.strips:
            text = (self._spaces + text).lstrip() if self._is_blank else self._spaces + text
            kept = text.rstrip()
            text, self._spaces = kept, text[len(kept) :]
        if text:
            self._is_blank = False
            if field.has_content:
                yield Content(text)
            elif field.has_reasoning:
                yield Reasoning(text)

    def _collected(self, start: int, end: int, groups: Mapping[str, Any]) -> Iterator[Part]:
        """The calls in the buffer up to ``start``, where their closing mark begins."""
        field = self._field
        assert field is not None
        try:
            yield from read_calls(
                self._buffer[self._start : start],
                field.reader,
                field.reader_args,
                transform=field.transform,
                transform_each=field.transform_each,
                captures={**self._captures, **_groups(groups)},
                tools=self._tools,
            )
        except (ValueError, KeyError, TypeError):
            yield from self._as_content(end)

    def _as_content(self, end: int) -> Iterator[Part]:
        """A part that is no call, with its marks."""
        if text := self._opening + self._buffer[self._start : end]:
            yield Content(text)

    # anchors

    def _is_in_string(self, end: int) -> bool:
        """True if ``end`` is within a string of the collected JSON."""
        if self._strings is None:
            return False
        return self._strings.is_inside(self._buffer, self._start, end)

    def _watched(self) -> Iterator[tuple[Literal["open", "close", "hidden"], Field | None, Anchor]]:
        field = self._field
        if field is self._implicit:
            for one in self._openings:
                assert one.open is not None
                yield "open", one, one.open
        if field is not None and field.close is not None:
            yield "close", field, field.close
        if self._hidden is not None and not self._collects:
            yield "hidden", None, Anchor(self._hidden, is_final=True)

    def _next_anchor(self, at_end: bool) -> tuple[_Found | None, int]:
        """The first anchor, and where a text begins that more text may make an anchor.

        An anchor counts only if no earlier text can become one: of those at one place the longest
        is taken.
        """
        best: _Found | None = None
        hold = len(self._buffer)
        for kind, field, anchor in self._watched():
            match = anchor.pattern.search(
                self._buffer, self._scan, partial=not at_end, timeout=PATTERN_SECONDS
            )
            if match is None:
                continue
            if not at_end and (match.partial or not self._is_settled(anchor, match)):
                hold = min(hold, match.start())
            elif best is None or _rank(match, kind) < _rank(best.match, best.kind):
                best = _Found(kind, field, match)
        if best is not None and best.match.start() >= hold:
            best = None
        return best, hold

    def _is_settled(self, anchor: Anchor, match: regex.Match[str]) -> bool:
        """True if further text cannot change this match.

        A mark of the prompt counts in any case, so that parser and grammar agree on where the
        answer begins: further white space may belong to it, and is left out.
        """
        if anchor.is_final:
            return True
        if self._is_prompt:
            if match.end() == len(self._buffer):
                longer = anchor.pattern.match(self._buffer + " ", match.start())
                self._skips_space = longer is not None and longer.end() > match.end()
            return True
        if match.end() == len(self._buffer):
            return False
        # a pattern may look ahead to the end: a character that no text has shows it
        again = anchor.pattern.match(self._buffer + "\0", match.start(), timeout=PATTERN_SECONDS)
        return (
            again is not None
            and again.span() == match.span()
            and again.groupdict() == match.groupdict()
        )


class _StringTracker:
    """Follows the strings in JSON text, so that marks within them do not count."""

    def __init__(self, marks: Sequence[tuple[str, str]]) -> None:
        self._closing = dict(marks)
        self._opening = regex.compile("|".join(regex.escape(opening) for opening, _ in marks))
        self._read = 0  # characters after the start that have been read
        self._inside: str | None = None  # the mark that ends the open string

    def is_inside(self, buffer: str, start: int, end: int) -> bool:
        """True if ``end`` is within a string of the text that begins at ``start``."""
        position = start + self._read
        while position < end:
            found = self._next_mark(buffer, position, end)
            if found is None:
                position = end
            elif found[0] == "\\":  # it escapes the next character
                position = found.end() + 1
            else:
                self._inside = self._closing[found[0]] if self._inside is None else None
                position = found.end()
        self._read = position - start
        return self._inside is not None

    def _next_mark(self, buffer: str, position: int, end: int) -> regex.Match[str] | None:
        if self._inside is None:
            return self._opening.search(buffer, position, end)
        # strings in other marks than quotes have no escapes
        pattern = r'["\\]' if self._inside == '"' else regex.escape(self._inside)
        return regex.search(pattern, buffer, pos=position, endpos=end)


def _rank(match: regex.Match[str], kind: str) -> tuple[int, bool, int]:
    return match.start(), kind == "hidden", -(match.end() - match.start())


def _groups(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in found.items() if text is not None}


def _joined(parts: Iterator[Part] | Sequence[Part]) -> list[Part]:
    """The parts with neighbouring texts of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined
