"""The events of an answer, read from OpenAI's stream; an engine here and a server send the same."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from jaxinfer.core.errors import ContextLengthError, EngineError, JaxinferError, RequestError

MAX_MESSAGE_CHARACTERS = 500  # of a server's error that is repeated
# the words of OpenAI, vLLM and llama.cpp for a prompt that does not fit
FULL_CONTEXT = ("context_length_exceeded", "context length", "context size", "context window")


@dataclass(frozen=True)
class Thought:
    """Further text of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class Said:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call; the first of a call has its name and id."""

    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    """The tokens of a turn."""

    prompt: int
    generated: int
    cached: int | None  # of the prompt; None: the server does not say


@dataclass(frozen=True)
class End:
    """The end of an answer; ``reason`` is OpenAI's ``finish_reason``."""

    reason: str
    usage: Usage | None


type Event = Thought | Said | CallPart | End


class Answerer(Protocol):
    """Answers conversations: an engine in this process, or a server."""

    model: str
    max_model_len: int | None  # tokens of the context, if known
    where: str  # for messages

    def answer(self, request: Mapping[str, Any]) -> Generator[Event]:
        """The events of the answer to a body of ``/v1/chat/completions``, the last an ``End``.

        Closing the generator ends the answer. Raises ``ContextLengthError`` if the conversation
        does not fit, ``RequestError`` if the request is refused, and ``EngineError`` if the answer
        cannot be completed.
        """
        ...


# the parts of a chunk that are read; other servers may leave any of them out


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


def request_body(model: str, request: Mapping[str, Any]) -> bytes:
    """The JSON body of a request to a model; raises ``RequestError``."""
    try:
        return msgspec.json.encode({"model": model, **request})
    except UnicodeEncodeError:
        raise RequestError(
            "a text of the conversation or a setting is not UTF-8; convert it first"
        ) from None


def read_events(stream: Iterable[bytes], where: str) -> Generator[Event]:
    """The events in the bytes of an event stream, which may be cut anywhere."""
    reason, usage, is_done = "", None, False
    for data in _payloads(stream):
        if data == b"[DONE]":
            is_done = True
            break
        chunk = _decoded(data, where)
        if chunk.error:
            raise failure(where, 500, {}, data)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            usage = Usage(
                chunk.usage.prompt_tokens or 0,
                chunk.usage.completion_tokens or 0,
                None if details is None else details.cached_tokens,
            )
        for choice in (chunk.choices or [])[:1]:
            if choice.delta is not None:
                yield from _parts(choice.delta)
            reason = choice.finish_reason or reason
    if not (reason or is_done):
        raise EngineError(f"{where} ended the answer before it was complete; try again")
    yield End(reason, usage)


def read_models(body: bytes) -> list[tuple[str, int | None]]:
    """(name, length of the context) of each model in a body of ``/v1/models``; none if it is
    another text.
    """
    try:
        cards = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [(card.id, card.max_model_len) for card in cards]


def failure(where: str, status: int, headers: Mapping[str, str], body: bytes) -> JaxinferError:
    """The error for a response that is no answer; the headers' names are in lower case."""
    message, code = _error_text(body)
    said = f": {message}" if message else ""
    if any(words in f"{code} {message}".lower() for words in FULL_CONTEXT):
        return ContextLengthError(message or "the context is full")
    if status in (401, 403):
        return RequestError(
            f"{where} refuses the key ({status}{said}); give its key with --api-key, or set "
            "JAXINFER_API_KEY"
        )
    if status == 404:
        return RequestError(
            f"{where} does not know the model or the address (404{said}); check MODEL and --url"
        )
    if status == 429:
        wait = headers.get("retry-after", "")
        later = f"in {wait} s" if wait.isdecimal() else "later"
        return RequestError(f"{where} takes no further request now (429{said}); try again {later}")
    if 300 <= status < 400:
        place = headers.get("location", "elsewhere")
        return RequestError(
            f"{where} sends the request on to {place:.200} ({status}); give that address with --url"
        )
    if 400 <= status < 500:
        return RequestError(f"{where} refuses the request ({status}{said})")
    return EngineError(f"{where} failed ({status}{said}); try again")


def no_stream(where: str, media_type: str) -> EngineError:
    """The error for a response that is no event stream."""
    return EngineError(
        f"{where} answers with {media_type or 'a text without a type'!r:.80} instead of a stream "
        "of events; give the address of an OpenAI-compatible server with --url"
    )


def _payloads(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event; comments and other fields are passed over."""
    rest = b""
    for piece in stream:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()):
                yield data


def _decoded(data: bytes, where: str) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"{where} sent an event that is none of OpenAI's ({error}); give the address of an "
            "OpenAI-compatible server with --url"
        ) from None


def _parts(delta: _Delta) -> Iterator[Event]:
    if thought := delta.reasoning_content or delta.reasoning:
        yield Thought(thought)
    if delta.content:
        yield Said(delta.content)
    for call in delta.tool_calls or ():
        function = call.function or _Function()
        yield CallPart(
            call.index or 0, call.id or "", function.name or "", function.arguments or ""
        )


def _error_text(body: bytes) -> tuple[str, str]:
    """(message, code) in the body of an error, without the full stop."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    code = ""
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        code = str(found.get("code") or found.get("type") or "")
        found = found.get("message") or found.get("detail")
    message = " ".join(str(found or "").split())[:MAX_MESSAGE_CHARACTERS]
    return message.rstrip("."), code
