"""The objects of the Responses API: items, the response, and the events of its stream."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxinfer.server.openai.responses import TokenLogprob


class Status(StrEnum):
    """The state of a response, and of an item."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"  # it was cut off
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Object(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all structs: frozen, and not tracked by the garbage collector."""


class _Typed(_Object, frozen=True, kw_only=True, tag_field="type"):
    """A struct whose field ``type`` names its kind."""


# parts of items


class OutputText(_Typed, frozen=True, kw_only=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(_Typed, frozen=True, kw_only=True, tag="reasoning_text"):
    """The text of thoughts."""

    text: str


class SummaryText(_Typed, frozen=True, kw_only=True, tag="summary_text"):
    """The text of thoughts, for clients that requested a summary."""

    text: str


# items


class OutputMessage(_Typed, frozen=True, kw_only=True, tag="message"):
    """A message of the model."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(_Typed, frozen=True, kw_only=True, tag="reasoning"):
    """The model's thoughts, in ``content`` or, for a request for a summary, in ``summary``."""

    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText]


class FunctionCall(_Typed, frozen=True, kw_only=True, tag="function_call"):
    """A call of one of the request's tools."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str  # a JSON object as text; of a call that is cut off the beginning
    status: Status


class CustomToolCall(_Typed, frozen=True, kw_only=True, tag="custom_tool_call"):
    """A call of one of the request's custom tools."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str  # free text
    status: Status


type OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall

# the response


class InputTokensDetails(_Object, frozen=True, kw_only=True):
    """The prompt's tokens by source."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0  # writing to the prefix cache costs nothing


class OutputTokensDetails(_Object, frozen=True, kw_only=True):
    """The generated tokens by kind."""

    reasoning_tokens: int


class ResponseUsage(_Object, frozen=True, kw_only=True):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(_Object, frozen=True, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(_Object, frozen=True, kw_only=True):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(_Object, frozen=True, kw_only=True):
    """The answer of ``/v1/responses``; fields of the request are as the client sent them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None


class DeletedResponse(_Object, frozen=True, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# events


class Event(_Typed, frozen=True, kw_only=True):
    """Base of the events; ``sequence_number`` counts them from 0."""

    sequence_number: int


class _Lifecycle(Event, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseQueued(_Lifecycle, frozen=True, kw_only=True, tag="response.queued"):
    """A background response waits for its first token."""


class ResponseCreated(_Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(_Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    """The model answers."""


class ResponseCompleted(_Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a whole response."""


class ResponseIncomplete(_Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut off or cancelled."""


class ResponseFailed(_Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""


class _OfItem(Event, frozen=True, kw_only=True):
    output_index: int


class OutputItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class OutputItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""

    item: OutputItem


class _InItem(_OfItem, frozen=True, kw_only=True):
    item_id: str


class _OfPart(_InItem, frozen=True, kw_only=True):
    content_index: Literal[0] = 0  # an item has one part


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The part of a message or of thoughts begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The part has ended."""

    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text of a message."""

    delta: str
    logprobs: list[TokenLogprob] = []


class OutputTextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text of a message."""

    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More thoughts."""

    delta: str


class ReasoningTextDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole thoughts."""

    text: str


class _OfSummary(_InItem, frozen=True, kw_only=True):
    summary_index: Literal[0] = 0


class SummaryPartAdded(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.added"
):
    """The part of a summary begins."""

    part: SummaryText


class SummaryPartDone(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_part.done"
):
    """The part of a summary has ended."""

    part: SummaryText


class SummaryTextDelta(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"
):
    """More thoughts, for clients that requested a summary."""

    delta: str


class SummaryTextDone(
    _OfSummary, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"
):
    """The whole thoughts, for clients that requested a summary."""

    text: str


class ArgumentsDelta(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of the arguments of a call."""

    delta: str


class ArgumentsDone(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The whole arguments of a call."""

    name: str
    arguments: str


class CustomInputDelta(
    _InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    """The text of a custom tool's call, which comes at once."""

    delta: str


class CustomInputDone(
    _InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    """The whole text of a custom tool's call."""

    input: str


class InputItemList(_Object, frozen=True, kw_only=True):
    """A page of the items that a response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


EVENTS: tuple[type[Event], ...] = (
    *(ResponseCreated, ResponseQueued, ResponseInProgress, ResponseCompleted),
    *(ResponseIncomplete, ResponseFailed, OutputItemAdded, OutputItemDone),
    *(ContentPartAdded, ContentPartDone, OutputTextDelta, OutputTextDone),
    *(ReasoningTextDelta, ReasoningTextDone, SummaryPartAdded, SummaryPartDone),
    *(SummaryTextDelta, SummaryTextDone, ArgumentsDelta, ArgumentsDone),
    *(CustomInputDelta, CustomInputDone),
)
