"""``AnswerParser``: the text of an answer, as it arrives, as reasoning, content and tool calls.

It knows nothing of an API's JSON. However a text is divided, the same parts are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import regex

from jaxinfer.text.answers.call_parts import CallArguments, CallBegin, CallEnd, CallPart, Reading
from jaxinfer.text.answers.calls import call_parts
from jaxinfer.text.answers.source import PATTERN_SECONDS, Source, is_settled
from jaxinfer.text.answers.strict_json import JsonStringReader
from jaxinfer.text.answers.template import Anchor, Field, ResponseTemplate

# Characters that are parsed at once. With the package regex (2026.11.19) a search that finds
# nothing takes a time that is quadratic in the length of the text, if the pattern has a part that
# must occur as it is: 1.9 s for 240,000 characters on a busy core.
MAX_PIECE = 4096


# Text that may become a mark is searched at each piece. Of a long one, such as white space before a
# mark, for each HELD_BEFORE characters HELD_MORE have to arrive before it is searched again: 20,000
# newlines cost 18 s otherwise, as a search takes a time that is linear in the text's length.
HELD_BEFORE, HELD_MORE = 256, 32


class Reasoning(NamedTuple):
    """More of the model's thoughts."""

    text: str


class Content(NamedTuple):
    """More of the text for the user."""

    text: str


type Part = Reasoning | Content | CallPart
_TEXTS = (Content, Reasoning, CallArguments)

type _Kind = Literal["open", "again", "close", "hidden"]


_TEXT = regex.compile(r"\S")


class _Found(NamedTuple):
    """An anchor in the buffer: a field begins or ends, begun thoughts are opened again, or a
    special token is left out, as is the end of thoughts that a call has ended before.
    """

    kind: _Kind
    field: Field | None
    match: regex.Match[str]


class AnswerParser:
    """Parses one answer: ``feed`` its text in any pieces, then ``finish``.

    Calls are returned as they arrive; the module ``call_parts`` says when one begins. Text that
    looks like a call and is none is content. Methods raise ``TimeoutError`` if a pattern of the
    model's own template takes too long.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        hidden: regex.Pattern[str] | None = None,
        content_is_last: bool = False,
    ) -> None:
        """``prompt`` is the text before the answer, which may have begun it. ``tools``: the
        JSON schema of each tool's parameters. ``hidden`` matches special tokens, which are left out
        of texts where they are no anchors. ``content_is_last``: a form holds from the content's
        first character to the answer's end, so that a mark in it is the text of a string.
        """
        self._template = template
        self._tools = tools or {}
        self._hidden = hidden
        self._content_is_last = content_is_last
        self._has_thought = False
        self._implicit = template.implicit
        self._openings = [one for one in template.fields if one.open is not None]
        self._enter(self._implicit)
        self._last: CallPart | None = None  # of the calls
        begun_answer, knows_start = template.begun_answer(prompt)
        is_new = not knows_start or not begun_answer.strip()
        self._buffer = template.after_results(begun_answer)
        if not knows_start:  # messages may contain any mark
            self._buffer = template.marks_at_end(prompt)
        if not knows_start:  # the prompt's own calls and examples of calls are not the answer's
            self._openings = [one for one in self._openings if one.has_reasoning]
        self._start = 0  # of the text that is not yet returned
        self._scan = 0  # where the next anchor may begin
        self._searched = ""  # the buffer in which the matches are known
        self._known: dict[regex.Pattern[str], regex.Match[str] | None] = {}
        self._skips_space = False  # a mark at the prompt's end has the white space after it
        self._num_new = 0  # characters that have arrived since the text was searched
        self._num_awaited = 0  # that have to, before it is searched again
        self._own = len(self._buffer)  # where the answer's own text begins, after the prompt's
        self._has_answered = False  # with content or a call
        self._has_content = False  # that is not blank, since the last call
        self._unclosed: Field | None = None  # thoughts that a call has ended
        if template.thinks_first and is_new:
            self._enter(next(one for one in template.fields if one.has_reasoning))
        self._is_prompt = True
        parts = list(self._parts(at_end=False))
        self._is_prompt = False
        self._openings = [one for one in template.fields if one.open is not None]
        # of the prompt only a call that it has begun is part of the answer
        begun = [number for number, part in enumerate(parts) if isinstance(part, CallBegin)]
        self._begun = parts[begun[-1] :] if begun and self._source else []

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
        pieces = [text[at : at + MAX_PIECE] for at in range(0, len(text), MAX_PIECE)]
        return joined_parts([part for piece in pieces for part in self._fed(piece)])

    def _fed(self, text: str) -> list[Part]:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if self._source is None:
            self._buffer += text
        else:
            self._source.add(text)
        self._num_new += len(text)
        if self._num_new <= self._num_awaited:
            return []
        begun, self._begun = self._begun, []
        parts = [*begun, *self._parts(at_end=False)]
        # a character before stays, for patterns that look behind
        if self._source is None and (done := self._start - 1) > 0:
            self._buffer = self._buffer[done:]
            self._start, self._scan = 1, self._scan - done
            self._own = max(self._own - done, 0)
        self._num_new, self._num_awaited = 0, self._num_held // HELD_BEFORE * HELD_MORE
        return parts

    @property
    def _num_held(self) -> int:
        """Characters that further text may make a mark, or a part of one."""
        source = self._source
        return len(self._buffer) - self._start if source is None else len(source.text) - source.at

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """The rest at the answer's end. ``is_cut``: the model has not ended it, so that a call
        without its closing mark is not whole.
        """
        begun, self._begun = self._begun, []
        return joined_parts([*begun, *self._parts(at_end=True, is_cut=is_cut)])

    def _parts(self, *, at_end: bool, is_cut: bool = False) -> Iterator[Part]:
        while True:
            if self._source is not None:
                if at_end:
                    self._source.end(is_cut=is_cut)
                yield from self._call_parts(self._source)
                if self._source is not None:
                    return
            found, hold = self._next_anchor(at_end)
            if found is None:
                end = len(self._buffer) if at_end else hold
                yield from self._text(end)
                self._start, self._scan = end, max(self._scan, end)
                return
            start, end = found.match.span()
            if found.kind == "again":
                self._start = self._scan = end
            elif found.kind == "open":
                yield from self._text(start)
                self._start = self._scan = end
                self._enter(found.field, found.match)
            else:  # a text ends, or a special token is left out
                yield from self._text(start)
                stays = found.kind == "hidden" or self._field is self._implicit
                self._start, self._scan = end, end + (stays and start == end)
                if not stays:
                    by_call = self.in_reasoning and not found.match[0].strip()
                    self._unclosed = self._field if by_call else None
                    self._enter(self._implicit)
                elif found.field is not None and found.match[0].strip():
                    self._unclosed = None

    # fields

    def _enter(self, field: Field | None, match: regex.Match[str] | None = None) -> None:
        self._field = field
        is_json = field is not None and field.reader == "json-string"
        self._string = JsonStringReader() if is_json else None
        self._is_blank = True  # no text of the field has been returned since it was opened
        self._has_thought = self._has_thought or self.in_reasoning
        self._spaces = ""  # at its end: they are part of it if further text follows
        self._source: Source | None = None  # of the calls that are read
        if field is not None and field.has_calls and match is not None:
            source = self._source = Source(self._buffer, match.end())
            source.unsent.append(match[0])
            groups = {name: text for name, text in match.groupdict().items() if text is not None}
            self._reading: Reading[None] = call_parts(source, field, groups, self._tools)

    def _call_parts(self, source: Source) -> Iterator[Part]:
        """The parts of calls that have arrived, and text that turned out to be no call."""
        skipped, after = 0, self._implicit
        try:
            for part in self._reading:
                if part is None:
                    return
                source.unsent.clear()
                self._has_answered, self._has_content = True, False
                self._last = part
                yield part
            if source.is_cut and self._last == CallEnd(False):
                source.take(len(source.text))  # of an argument that is cut off
        except (ValueError, KeyError, TypeError):
            if isinstance(self._last, CallBegin | CallArguments):
                self._last = CallEnd(False)
                yield self._last
            if self._field is not None and (after is None or not after.has_content):
                after = self._field.as_content
            skipped = 1  # an opening of no characters must not be found again
            if source.is_cut and self._implicit is None:
                source.take(len(source.text))  # a beginning that nothing else can have
                source.unsent.clear()
            if text := "".join(source.unsent):
                skipped = 0
                yield self._content(text)
        self._buffer, self._start = source.text, source.at
        self._scan = source.at + skipped
        if not self._is_prompt:
            self._own = 0
        self._enter(after)

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
            self._is_blank = self._is_blank and not text.strip()
            if field.has_content:
                yield self._content(text)
            elif field.has_reasoning:
                yield Reasoning(text)

    def _content(self, text: str) -> Content:
        self._has_answered = True
        self._has_content = self._has_content or not text.isspace()
        return Content(text)

    # anchors

    @property
    def _in_last(self) -> bool:
        """True in content that is the last field: marks count only before its text."""
        field = self._field
        return self._content_is_last and field is not None and field.has_content

    def _is_over(self, field: Field | None) -> bool:
        """True for thoughts that have ended: their mark among the text after them is its own."""
        has_reasoning = field is not None and field.has_reasoning and not field.repeats
        return has_reasoning and self._has_thought

    def _watched(self) -> Iterator[tuple[_Kind, Field | None, Anchor]]:
        field = self._field
        if self._in_last and (self._has_content or field is not self._implicit):
            return
        if field is self._implicit:
            for one in self._openings:
                assert one.open is not None
                if not (one.is_answer and self._has_answered) and not (
                    self._is_over(one) and self._has_content
                ):
                    yield "open", one, one.open
        elif field is not None and field.open and field.has_reasoning and self._is_blank:
            yield "again", field, field.open
        if field is not None and field.close is not None:
            yield "close", field, field.close
        if self._unclosed is not None and field is self._implicit:
            # the model ends its thoughts behind the calls in them
            assert self._unclosed.close is not None
            yield "hidden", self._unclosed, self._unclosed.close
        if self._hidden is not None:
            yield "hidden", None, Anchor(self._hidden, is_final=True)

    def _next_anchor(self, at_end: bool) -> tuple[_Found | None, int]:
        """The first anchor, and where a text begins that more text may make an anchor.

        An anchor counts only if no earlier text can become one: of those at one place the longest
        is taken.
        """
        best: _Found | None = None
        hold = len(self._buffer)
        for kind, field, anchor in self._watched():
            if kind == "again":
                match = self._match_at(_after_space(self._buffer, self._start), anchor, at_end)
            elif self._in_last or (kind == "open" and self._is_over(field)):
                match = self._match_before_text(anchor, at_end)
            elif kind == "open" and field is not None and field.is_answer:
                match = self._match_at(self._start, anchor, at_end)
            else:
                match = self._next_match(anchor, at_end)
            if match is None:
                continue
            if not at_end and (match.partial or not self._is_settled(anchor, match)):
                hold = min(hold, self._start if kind == "again" else match.start())
            elif best is None or _rank(match, kind) < _rank(best.match, best.kind):
                best = _Found(kind, field, match)
        if best is not None and best.match.start() >= hold:
            best = None
        return best, hold

    def _match_at(self, start: int, anchor: Anchor, at_end: bool) -> regex.Match[str] | None:
        partial = not at_end
        return anchor.pattern.match(self._buffer, start, partial=partial, timeout=PATTERN_SECONDS)

    def _match_before_text(self, anchor: Anchor, at_end: bool) -> regex.Match[str] | None:
        """A match at the start, or behind the white space there, that has not been passed."""
        starts = (self._start, _after_space(self._buffer, self._start))
        found = (self._match_at(start, anchor, at_end) for start in starts)
        return next((one for one in found if one is not None and one.start() >= self._scan), None)

    def _next_match(self, anchor: Anchor, at_end: bool) -> regex.Match[str] | None:
        """The first match that has not been passed. Matches are kept: a search to the end of a long
        text for each of its many anchors would take a time that is quadratic in its length.
        """
        text, pattern = self._buffer, anchor.pattern
        if self._searched is not text or at_end:
            self._searched, self._known = text, {}
        known = self._known.get(pattern)
        if pattern not in self._known or (known is not None and known.start() < self._scan):
            known = pattern.search(text, self._scan, partial=not at_end, timeout=PATTERN_SECONDS)
            self._known[pattern] = known
        return known

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
        return is_settled(anchor.pattern, match, self._buffer)


def _rank(match: regex.Match[str], kind: str) -> tuple[int, bool, int]:
    return match.start(), kind == "hidden", -(match.end() - match.start())


def _after_space(text: str, start: int) -> int:
    found = _TEXT.search(text, start)
    return len(text) if found is None else found.start()


def joined_parts[P](parts: Iterable[P]) -> list[P]:
    """The parts with neighbouring texts of one kind as one."""
    joined: list[P] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, _TEXTS) and isinstance(last, _TEXTS) and isinstance(last, type(part)):
            joined[-1] = part._replace(text=last.text + part.text)
        else:
            joined.append(part)
    return joined
