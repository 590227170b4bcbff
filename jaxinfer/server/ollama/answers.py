"""The answers of ollama's API. Durations are nanoseconds, times are in RFC 3339."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxinfer.server.openai.responses import AnswerStruct, TokenLogprob

API_VERSION = "0.13.0"  # of ollama: the API is as in this one, and clients require a least version

Nanoseconds = int | UnsetType
ModelName = Annotated[str, Meta(description="The name of the model.")]
CreatedAt = Annotated[str, Meta(description="The time, in RFC 3339.")]
DoneReason = Annotated[
    Literal["stop", "length", "load"] | UnsetType, Meta(description="Why the answer ended.")
]


def timestamp(seconds: float) -> str:
    """Seconds since 1970 in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class CalledAnswer(AnswerStruct, frozen=True, kw_only=True):
    """The function of a call."""

    index: Annotated[int, Meta(description="The number of the call in the answer.")]
    name: str
    arguments: Annotated[dict[str, Any], Meta(description="The arguments, an object.")]


class CallAnswer(AnswerStruct, frozen=True, kw_only=True):
    """A call of a tool."""

    id: Annotated[str, Meta(description="The id of the call.")]
    function: CalledAnswer


class OllamaMessage(AnswerStruct, frozen=True, kw_only=True):
    """The model's message, in a stream its new part."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: Annotated[str | UnsetType, Meta(description="The model's thoughts.")] = UNSET
    tool_calls: list[CallAnswer] | UnsetType = UNSET


class Timings(AnswerStruct, frozen=True, kw_only=True):
    """The numbers at the end of an answer."""

    total_duration: Annotated[Nanoseconds, Meta(description="Nanoseconds of the request.")] = UNSET
    load_duration: Annotated[
        Literal[0] | UnsetType, Meta(description="Always 0: the model is loaded.")
    ] = UNSET
    prompt_eval_count: Annotated[
        int | UnsetType, Meta(description="Tokens of the prompt, with those from the cache.")
    ] = UNSET
    prompt_eval_duration: Annotated[
        Nanoseconds, Meta(description="Nanoseconds until the first token.")
    ] = UNSET
    eval_count: Annotated[int | UnsetType, Meta(description="Tokens that were generated.")] = UNSET
    eval_duration: Annotated[
        Nanoseconds, Meta(description="Nanoseconds from the first token to the last one.")
    ] = UNSET


class _Answer(Timings, frozen=True, kw_only=True):
    model: ModelName
    created_at: CreatedAt
    done: Annotated[bool, Meta(description="True at the end.")]
    done_reason: DoneReason = UNSET
    logprobs: Annotated[
        list[TokenLogprob] | UnsetType, Meta(description="The requested logprobs.")
    ] = UNSET


class OllamaChatAnswer(_Answer, frozen=True, kw_only=True):
    """The answer of ``/api/chat``, or a line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Answer, frozen=True, kw_only=True):
    """The answer of ``/api/generate``, or a line of its stream."""

    response: Annotated[str, Meta(description="The text, in a stream its new part.")]
    thinking: Annotated[str | UnsetType, Meta(description="The model's thoughts.")] = UNSET


class OllamaEmbeddings(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/embed``."""

    model: ModelName
    embeddings: Annotated[list[list[float]], Meta(description="The vector of each text.")]
    total_duration: Annotated[int, Meta(description="Nanoseconds of the request.")]
    load_duration: Annotated[Literal[0], Meta(description="Always 0: the model is loaded.")] = 0
    prompt_eval_count: Annotated[int, Meta(description="Tokens of all texts.")]


class OllamaEmbedding(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/api/embeddings``."""

    embedding: Annotated[list[float], Meta(description="The vector.")]
