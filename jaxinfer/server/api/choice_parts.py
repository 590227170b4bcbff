"""The text of one answer to a chat as parts, which each API writes in its own form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.server.api.custom_tools import input_of
from jaxinfer.server.api.tools import AnswerReading
from jaxinfer.text.answers.call_parts import CallArguments, CallBegin, CallEnd
from jaxinfer.text.answers.parser import Content, Part, Reasoning


class NumberedCall(NamedTuple):
    """A call of a tool begins. ``number``: its index among the calls of its answer."""

    number: int
    id: str
    name: str
    is_custom: bool = False  # the arguments that follow are the free text of a custom tool


type ChoicePart = Reasoning | Content | NumberedCall | CallArguments | CallEnd


class ChoiceParts:
    """Reads the deltas of one choice. ``reading`` None: all of its text is content."""

    def __init__(self, reading: AnswerReading | None, request_id: str, choice: int) -> None:
        self._reading = reading
        self._parser = None if reading is None else reading.parser()
        self._request_id = request_id
        self._choice = choice
        self.num_thought_tokens = 0  # of thoughts and their marks
        self._num_unread = 0  # tokens whose text the parser has not returned yet
        self._num_calls = 0
        self._drops_call = False  # the open call is one too many
        self._has_cut_call = False  # without its end
        self._custom: list[str] | None = None  # arguments of the open call of a custom tool

    @property
    def in_reasoning(self) -> bool:
        """True if the next text belongs to the model's thoughts."""
        return self._parser is not None and self._parser.in_reasoning

    def read(self, delta: Delta) -> list[ChoicePart]:
        """The new parts. Without a reading there is one for each delta with tokens, as OpenAI's
        stream has an event for it, even if its text is held back and therefore empty. The tokens of
        a delta all count as thoughts or none does, so those of several steps are read one by one.
        """
        if self._parser is None:
            return [Content(delta.text)] if delta.text or delta.token_ids else []
        was_thinking = self._parser.in_reasoning
        parts = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts += self._parser.finish(is_cut=not _is_ended(delta))
        self._num_unread += len(delta.token_ids)
        has_others = not all(isinstance(part, Reasoning) for part in parts)
        if self._parser.in_reasoning or ((was_thinking or parts) and not has_others):
            self.num_thought_tokens += self._num_unread
            self._num_unread = 0
        elif has_others:
            self._num_unread = 0
        return [numbered for part in parts for numbered in self._numbered(part)]

    def ends_with_calls(self, delta: Delta) -> bool:
        """True if the answer, whose last delta this is, waits for the results of its calls."""
        is_cut = self._has_cut_call and not _is_ended(delta)
        return self._num_calls > 0 and delta.finish_reason is FinishReason.STOP and not is_cut

    def _numbered(self, part: Part) -> Iterator[ChoicePart]:
        """The part, a call with its number and id; none for parts of a call too many. The text of a
        custom tool's call comes at once.
        """
        if isinstance(part, CallArguments | CallEnd):
            if not self._drops_call:
                yield from self._of_call(part)
            return
        if not isinstance(part, CallBegin):
            yield part
            return
        reading, number = self._reading, self._num_calls
        assert reading is not None, "only a parser finds calls"
        self._drops_call = number > 0 and not reading.parallel
        if self._drops_call:
            return
        self._num_calls += 1
        is_custom = part.name in reading.custom
        self._custom = [] if is_custom else None
        call_id = reading.call_id(self._request_id, self._choice, number, part.name)
        yield NumberedCall(number, call_id, part.name, is_custom)

    def _of_call(self, part: CallArguments | CallEnd) -> Iterator[ChoicePart]:
        self._has_cut_call = part == CallEnd(False)
        if self._custom is None:
            yield part
        elif isinstance(part, CallArguments):
            self._custom.append(part.text)
        else:
            yield CallArguments(input_of("".join(self._custom)))
            yield part


def _is_ended(delta: Delta) -> bool:
    """True if the model has ended the answer: no limit, and no stop string of the request."""
    return delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str)
