"""The writers of ``/api/chat`` and ``/api/generate``: JSON, or a line of JSON for new tokens."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from msgspec import UNSET

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.api.choice_parts import ChoiceParts, NumberedCall
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import LINES
from jaxinfer.server.ollama.answers import (
    CallAnswer,
    CalledAnswer,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaMessage,
    Timings,
    timestamp,
)
from jaxinfer.server.ollama.chat import OllamaChat, OllamaText
from jaxinfer.server.openai.responses import encode
from jaxinfer.server.openai.writer import (
    ResponseContext,
    Writer,
    broken_off,
    chat_logprobs,
    merged_updates,
)
from jaxinfer.text.answers.call_parts import CallArguments, CallEnd, complete_arguments
from jaxinfer.text.answers.parser import Content, Reasoning

_NANOSECONDS = 1_000_000_000


class Piece(NamedTuple):
    """New text of an answer. Calls are whole, as their arguments are objects."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[CallAnswer] = ()


class _LineWriter[R: OllamaChat | OllamaText, A: OllamaChatAnswer | OllamaGenerateAnswer](
    Writer[R]
):
    """Writes the only choice of a request."""

    stream_end: ClassVar[bytes] = b""
    stream_type: ClassVar[bytes] = LINES

    def __init__(self, context: ResponseContext, request: R, prompts: Sequence[Prompt]) -> None:
        super().__init__(context, request, prompts)
        self._parts = ChoiceParts(context.reading, context.request_id, 0)
        self._call: NumberedCall | None = None  # that is open
        self._arguments: list[str] = []  # its text so far

    @abstractmethod
    def _answer(self, piece: Piece, **fields: Any) -> A:
        """The answer with this text."""

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> A:
        (update,) = merged_updates(updates)
        delta = update.delta
        end = self._end(delta, answer)
        return self._answer(self._piece(delta), **self._logprobs(delta), **end)

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        (update,) = merged_updates(updates)
        delta, sent = update.delta, list[A]()
        piece, logprobs = self._piece(delta), self._logprobs(delta)
        if any(piece) or logprobs:
            sent.append(self._answer(piece, done=False, **logprobs))
        if delta.finish_reason is not None:
            sent.append(self._answer(Piece(), **self._end(delta, answer)))
        return b"".join(encode(one) + b"\n" for one in sent)

    def final_events(self, answer: Answer) -> bytes:
        return b""  # the last update has them

    def failure(self, error: ApiError) -> bytes:
        return error.ollama_body + b"\n"

    def _piece(self, delta: Delta) -> Piece:
        content: list[str] = []
        thinking: list[str] = []
        calls: list[CallAnswer] = []
        for part in self._parts.read(delta):
            match part:
                case NumberedCall():
                    self._call, self._arguments = part, []
                case CallArguments():
                    self._arguments.append(part.text)
                case CallEnd():
                    calls.append(self._whole_call())
                case Content():
                    content.append(part.text)
                case Reasoning():
                    thinking.append(part.text)
        return Piece("".join(content), "".join(thinking), calls)

    def _whole_call(self) -> CallAnswer:
        """The open call; one that is cut off has the arguments before the last one."""
        call = self._call
        assert call is not None, "a call has begun"
        arguments = complete_arguments("".join(self._arguments))
        function = CalledAnswer(index=call.number, name=call.name, arguments=arguments)
        return CallAnswer(id=call.id, function=function)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        request = self._request
        if not request.logprobs or not delta.token_ids:
            return {}
        top = request.top_logprobs or 0
        return {
            "logprobs": chat_logprobs(self._context, delta.token_ids, delta.logprobs, top).content
        }

    def _end(self, last: Delta, answer: Answer) -> dict[str, Any]:
        """The fields of the end; raises ``ApiError`` if the answer is not complete."""
        reason = last.finish_reason
        if reason is not FinishReason.STOP and reason is not FinishReason.LENGTH:
            raise broken_off(reason)
        return {"done": True, "done_reason": reason.value, **_timings(answer)}

    @property
    def _head(self) -> dict[str, Any]:
        return {"model": self._context.model, "created_at": timestamp(time.time())}


class OllamaChatWriter(_LineWriter[OllamaChat, OllamaChatAnswer]):
    """Writes messages."""

    def _answer(self, piece: Piece, **fields: Any) -> OllamaChatAnswer:
        message = OllamaMessage(
            content=piece.content,
            thinking=piece.thinking or UNSET,
            tool_calls=list(piece.calls) or UNSET,
        )
        return OllamaChatAnswer(message=message, **self._head, **fields)


class OllamaGenerateWriter[R: OllamaChat | OllamaText](_LineWriter[R, OllamaGenerateAnswer]):
    """Writes texts, with their thoughts."""

    def _answer(self, piece: Piece, **fields: Any) -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer(
            response=piece.content, thinking=piece.thinking or UNSET, **self._head, **fields
        )


def _timings(answer: Answer) -> dict[str, int]:
    now, first = time.monotonic(), answer.first_token
    last = answer.sequences[0].last_token
    found = {
        "total_duration": now - answer.received,
        "load_duration": 0,
        "prompt_eval_duration": (now if first is None else first) - answer.received,
        "eval_duration": 0 if first is None or last is None else last - first,
    }
    counts = {"prompt_eval_count": answer.num_prompt_tokens, "eval_count": answer.num_tokens}
    assert {*found, *counts} == {*Timings.__struct_fields__}
    return {**{name: int(value * _NANOSECONDS) for name, value in found.items()}, **counts}
