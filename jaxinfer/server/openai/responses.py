"""The responses of each endpoint, with the fields of OpenAI (and vLLM).

A field of type ``UnsetType`` is left out of the JSON until it is set; None is sent as null.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import PositionLogprobs

# the stop string, or the request's stop id, that ended the output
type StopReason = int | str | None


class AnswerStruct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of what the server sends: frozen, and not tracked by the garbage collector."""


class PromptTokensDetails(AnswerStruct, frozen=True, kw_only=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(AnswerStruct, frozen=True, kw_only=True):
    """How many of the generated tokens are thoughts."""

    reasoning_tokens: int


class Usage(AnswerStruct, frozen=True, kw_only=True):
    """Tokens of one request, over all of its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TappedActivations(AnswerStruct, frozen=True, kw_only=True):
    """The activations at one point, of all tokens but the last one."""

    dtype: Literal["float32"] = "float32"  # little endian
    shape: list[int]
    base64: bytes  # JSON has its base64


type Taps = dict[str, TappedActivations]  # by the names of the request's taps


# completions


class CompletionLogprobs(AnswerStruct, frozen=True, kw_only=True):
    """Four lists, one entry a token; an echoed prompt's first token has None in two of them."""

    text_offset: list[int]  # the token's offset in the choice's text, in characters
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerStruct, frozen=True, kw_only=True):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PositionLogprobs | None] | UnsetType = UNSET
    taps: Taps | UnsetType = UNSET


class Completion(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage


class CompletionChunkChoice(AnswerStruct, frozen=True, kw_only=True):
    """New tokens of one completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # only in the first chunk


class CompletionChunk(AnswerStruct, frozen=True, kw_only=True):
    """One event of a streamed ``/v1/completions``.

    With include_usage, ``usage`` is null until the last event, which has no choices.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET


# chats


class TopLogprob(AnswerStruct, frozen=True, kw_only=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None  # UTF-8, also of a token that is only part of a character


class TokenLogprob(AnswerStruct, frozen=True, kw_only=True):
    """The chosen token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerStruct, frozen=True, kw_only=True):
    """One entry for each token."""

    content: list[TokenLogprob]


class ChatFinishReason(StrEnum):
    """Why an answer of a chat ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


class CalledFunction(AnswerStruct, frozen=True, kw_only=True):
    """A function that the model calls; in a stream the name comes first, then the arguments."""

    name: str | UnsetType = UNSET
    arguments: str  # a JSON object as text; of a call that is cut off the beginning


class ToolCall(AnswerStruct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call of one of the request's tools."""

    id: str
    function: CalledFunction


class CalledCustom(AnswerStruct, frozen=True, kw_only=True):
    """A custom tool that the model calls; in a stream the name comes first, then the text."""

    name: str | UnsetType = UNSET
    input: str  # free text


class CustomCall(AnswerStruct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A call of one of the request's custom tools."""

    id: str
    custom: CalledCustom


class ToolCallDelta(AnswerStruct, frozen=True, kw_only=True):
    """A part of a call; the first has the id and the name."""

    index: int  # of the call
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ChatMessage(AnswerStruct, frozen=True, kw_only=True):
    """A message of the model. ``content`` is null in a message of calls alone."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomCall] | UnsetType = UNSET


class ChatChoice(AnswerStruct, frozen=True, kw_only=True):
    """One completion of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    taps: Taps | UnsetType = UNSET


class ChatCompletion(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: list[PositionLogprobs | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(AnswerStruct, frozen=True, kw_only=True):
    """The new part of a message; only the first one has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(AnswerStruct, frozen=True, kw_only=True):
    """New tokens of one completion of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET  # only with a finish_reason
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(AnswerStruct, frozen=True, kw_only=True):
    """One event of a streamed ``/v1/chat/completions``; ``usage`` as in ``CompletionChunk``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # only in the first chunk


# our own endpoints, and small ones


class Generated(AnswerStruct, frozen=True, kw_only=True):
    """One output of ``/v1/generate``."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None in an event that is not the last
    stop_reason: StopReason = None
    logprobs: list[PositionLogprobs] | UnsetType = UNSET
    taps: Taps | UnsetType = UNSET


class GenerateResponse(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/generate``, and each event of its stream."""

    id: str
    model: str
    outputs: list[Generated]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PositionLogprobs | None] | UnsetType = UNSET
    latency_ms: float | UnsetType = UNSET  # from the request's arrival to its last token


class WeightVersion(AnswerStruct, frozen=True, kw_only=True):
    """Tokens [start, end) of a choice were drawn with weights of this version."""

    version: int
    start: int
    end: int


class TokensChoice(AnswerStruct, frozen=True, kw_only=True):
    """One output of ``/inference/v1/generate``; in an event of its stream the new tokens."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int]
    weight_versions: list[WeightVersion]
    taps: Taps | UnsetType = UNSET


class TokensResponse(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/inference/v1/generate``, and each event of its stream, in vLLM's form."""

    request_id: str
    choices: list[TokensChoice]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    kv_transfer_params: None = None
    usage: Usage | UnsetType = UNSET  # of a stream, in its last event


class ModelCard(AnswerStruct, frozen=True, kw_only=True):
    """One name under which the model answers."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxinfer"
    root: str
    parent: None = None
    max_model_len: int
    tool_call_parser: str | None = None  # the form of the model's calls; None: it cannot call


class ModelList(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/detokenize``."""

    prompt: str


class Version(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/version``."""

    version: str


encode = msgspec.json.Encoder().encode  # JSON of one of these structs
