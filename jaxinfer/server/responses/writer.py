"""The writer of ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from msgspec.structs import replace

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta, PositionLogprobs
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.api.choice_parts import ChoiceParts, NumberedCall
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.responses import TokenLogprob, encode
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.openai.writer import ResponseContext, Writer, chat_logprobs, merged_updates
from jaxinfer.server.responses import objects
from jaxinfer.server.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from jaxinfer.server.responses.output import MESSAGE, SUMMARY, THOUGHTS, OutputItems
from jaxinfer.server.responses.tools import Origin
from jaxinfer.text.answers.call_parts import CallArguments, CallEnd
from jaxinfer.text.answers.parser import Content, Reasoning

_STATUS: Mapping[FinishReason | None, Status] = MappingProxyType(
    {FinishReason.STOP: Status.COMPLETED, FinishReason.LENGTH: Status.INCOMPLETE}
)
_LAST_EVENTS: Mapping[Status, type[objects.Event]] = MappingProxyType(
    {
        Status.COMPLETED: objects.ResponseCompleted,
        Status.INCOMPLETE: objects.ResponseIncomplete,
        Status.CANCELLED: objects.ResponseIncomplete,
        Status.FAILED: objects.ResponseFailed,
    }
)


class ResponseWriter(Writer[ChatCompletionRequest]):
    """Writes one response: ``add`` updates, then ``end`` or ``fail``.

    ``response`` has the fields of the request, ``origins`` its tools by function; ``on_end`` is
    called once, when it has ended.
    ``frames`` are the events that ``take`` has not taken; none if the response is not streamed.
    """

    stream_end: ClassVar[bytes] = b""

    def __init__(
        self,
        context: ResponseContext,
        request: ChatCompletionRequest,
        prompts: Sequence[Prompt],
        *,
        response: ResponseObject,
        summarises: bool,
        origins: Mapping[str, Origin],
        on_end: Callable[[ResponseWriter], None],
    ) -> None:
        super().__init__(context, request, prompts)
        self.frames: list[bytes] = []
        self.is_cancelled = False  # by the client; set it before ``end``
        self._response = response
        self._on_end = on_end
        self._thoughts = SUMMARY if summarises else THOUGHTS
        self._items = OutputItems(response.id.partition("_")[2], self._emit, origins)
        self._parts = ChoiceParts(context.reading, response.id, 0)
        self._num_events = 0
        self._is_running = False
        self._finish: FinishReason | None = None
        # tokens whose text the parser has not returned yet
        self._unread_ids: list[int] = []
        self._unread_logprobs: list[PositionLogprobs] = []

    @property
    def response(self) -> ResponseObject:
        """The response so far."""
        return replace(self._response, output=self._items.listed)

    @property
    def is_streamed(self) -> bool:
        """True if events are written."""
        return self._request.stream

    def begin(self) -> None:
        """Write the events before the first token, unless they are written."""
        if self._num_events:
            return
        self._emit(objects.ResponseCreated, response=self._response)
        if self._response.status is Status.QUEUED:
            self._emit(objects.ResponseQueued, response=self._response)

    def add(self, updates: Sequence[ChoiceUpdate]) -> None:
        """Write the events of these updates."""
        if not self._is_running:
            self.begin()
            self._is_running = True
            self._response = replace(self._response, status=Status.IN_PROGRESS)
            self._emit(objects.ResponseInProgress, response=self._response)
        # a delta's tokens all count as thoughts or as text, so those of several steps stay apart
        for update in updates if self._context.reading else merged_updates(updates):
            self._add(update.delta)

    def end(self, answer: Answer) -> None:
        """Write the last events of an answer that has ended."""
        if self._finish is FinishReason.ABORT and not self.is_cancelled:
            self.fail(ApiError(500, "the server has ended the request; send it again"))
            return
        status = _STATUS.get(self._finish, Status.CANCELLED)
        is_empty = all(isinstance(item, ReasoningItem) for item in self._items.listed)
        if status is Status.COMPLETED and is_empty:
            self._items.add_text(MESSAGE, "", [])
        cut_off = IncompleteDetails() if status is Status.INCOMPLETE else None
        self._end(status, incomplete_details=cut_off, usage=self._usage(answer))

    def fail(self, error: ApiError) -> None:
        """Write the last events of a response that cannot be completed."""
        self.begin()
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self._end(Status.FAILED, error=ResponseError(code=code, message=error.message))

    def take(self) -> bytes:
        """The events since the last call."""
        taken, self.frames = b"".join(self.frames), []
        return taken

    # the interface of ``Writer``

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        self.add(updates)
        return self.take()

    def final_events(self, answer: Answer) -> bytes:
        self.end(answer)
        return self.take()

    def failure(self, error: ApiError) -> bytes:
        self.fail(error)
        return self.take()

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> ResponseObject:
        self.add(updates)
        self.end(answer)
        return self._response

    # private

    def _add(self, delta: Delta) -> None:
        self._unread_ids += delta.token_ids
        self._unread_logprobs += delta.logprobs
        num_thought_tokens = self._parts.num_thought_tokens
        parts = self._parts.read(delta)
        logprobs: list[TokenLogprob] = []
        if self._parts.num_thought_tokens > num_thought_tokens:
            self._take_tokens()
        elif any(not isinstance(part, Reasoning) for part in parts):
            logprobs = self._logprobs(*self._take_tokens())
        for part in parts:
            if isinstance(part, NumberedCall):
                self._items.begin_call(part)
            elif isinstance(part, CallArguments):
                self._items.add_arguments(part.text)
            elif isinstance(part, CallEnd):
                self._items.end_item(Status.COMPLETED if part.is_whole else Status.INCOMPLETE)
            elif isinstance(part, Content):
                self._items.add_text(MESSAGE, part.text, logprobs)
                logprobs = []
            else:
                self._items.add_text(self._thoughts, part.text, [])
        self._finish = delta.finish_reason or self._finish

    def _take_tokens(self) -> tuple[list[int], list[PositionLogprobs]]:
        """The unread tokens, whose text the parser has returned now, and their logprobs."""
        taken = self._unread_ids, self._unread_logprobs
        self._unread_ids, self._unread_logprobs = [], []
        return taken

    def _logprobs(
        self, token_ids: list[int], positions: list[PositionLogprobs]
    ) -> list[TokenLogprob]:
        if not self._request.logprobs:
            return []
        top = self._request.top_logprobs or 0
        return chat_logprobs(self._context, token_ids, positions, top).content

    def _end(self, status: Status, **fields: Any) -> None:
        is_whole = status is Status.COMPLETED
        self._items.end_item(Status.COMPLETED if is_whole else Status.INCOMPLETE)
        self._response = replace(
            self.response,
            status=status,
            completed_at=int(time.time()) if is_whole else None,
            **fields,
        )
        self._emit(_LAST_EVENTS[status], response=self._response)
        self._on_end(self)

    def _usage(self, answer: Answer) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=answer.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=answer.reported_cached_tokens or 0  # OpenAI's clients require it
            ),
            output_tokens=answer.num_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self._parts.num_thought_tokens
            ),
            total_tokens=answer.num_prompt_tokens + answer.num_tokens,
        )

    def _emit(self, kind: type[objects.Event], **fields: Any) -> None:
        """Write an event, if the response is streamed."""
        if self.is_streamed:
            data = encode(kind(sequence_number=self._num_events, **fields))
            self.frames.append(frame(data, str(kind.__struct_config__.tag).encode()))
        self._num_events += 1
