"""The shared parts of the response writers, and logprobs in OpenAI's two forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from msgspec import UNSET, UnsetType

from jaxinfer.core.points import Point
from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta, Logprob, PositionLogprobs, joined
from jaxinfer.engine.requests.points import tapped
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.api.fields import GenerationFields
from jaxinfer.server.api.tools import AnswerReading
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import DONE, EVENTS, frame
from jaxinfer.server.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    TappedActivations,
    Taps,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode,
)
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ResponseContext:
    """Fields that all parts of a response carry, and the spelling of tokens."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    role: str
    sends_usage: bool
    tokens_as_ids: bool
    tokenizer: Tokenizer | None
    points: Sequence[Point] = ()  # that requests may read
    reading: AnswerReading | None = None  # of a chat whose answers are not plain text

    def piece(self, token_id: int) -> str:
        """A token's text next to its logprob."""
        if self.tokens_as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_piece(token_id)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """A token's UTF-8 bytes, also if it is only part of a character."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


class Echo(NamedTuple):
    """The text before a choice's output, and the offsets of its tokens in it."""

    text: str = ""
    offsets: Sequence[int] = ()


class Writer[R: GenerationFields](ABC):
    """Writes one response, whole (``full_response``) or as events."""

    stream_end: ClassVar[bytes] = DONE  # after the last event
    stream_type: ClassVar[bytes] = EVENTS

    def __init__(self, context: ResponseContext, request: R, prompts: Sequence[Prompt]) -> None:
        self._context = context
        self._request = request
        self._prompts = prompts
        self._has_ended = False

    async def next_events(self, answer: Answer) -> bytes:
        """The next part of the stream, of several events if a client is slow; empty at the end."""
        while updates := await answer.read():
            if data := self.events(updates, answer):
                return data
        if self._has_ended or not answer.finished:
            return b""
        self._has_ended = True
        return self.final_events(answer)

    @abstractmethod
    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        """The events for these updates; may be none."""

    @abstractmethod
    def final_events(self, answer: Answer) -> bytes:
        """The events after the last update."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return frame(error.body)

    @abstractmethod
    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> Any:
        """The body of a response that is not streamed."""

    def _listed(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        """Token ids for a client that requested them."""
        return list(token_ids) if self._request.return_token_ids else UNSET

    def _taps(self, delta: Delta) -> Taps | UnsetType:
        """The requested activations of a whole answer."""
        if not self._request.taps:
            return UNSET
        found = tapped(delta.taps, tuple(dict.fromkeys(self._request.taps)), self._context.points)
        return {
            name: TappedActivations(shape=list(one.shape), base64=one.astype("float32").tobytes())
            for name, one in found.items()
        }

    def _prompt_logprobs_of(
        self, updates: Sequence[ChoiceUpdate]
    ) -> list[PositionLogprobs | None] | UnsetType:
        """The requested logprobs of the only prompt; its first token has none."""
        if self._request.prompt_logprobs is None:
            return UNSET
        return [None, *(one for update in updates for one in update.delta.prompt_logprobs)]


class Envelope:
    """An event without its choice, encoded once: only the choice changes from token to token."""

    def __init__(self, chunk: CompletionChunk | ChatChunk) -> None:
        # a quote within a string is escaped, so no text can contain the empty list
        head, tail = frame(encode(chunk)).split(b'"choices":[]')
        self._head, self._tail = head + b'"choices":[', b"]" + tail

    def around(self, choice: CompletionChunkChoice | ChatChunkChoice) -> bytes:
        """The event with this choice."""
        return b"".join((self._head, encode(choice), self._tail))


class EnvelopeWriter[R: GenerationFields](Writer[R]):
    """A writer of OpenAI's responses, whose events differ only in their choice and usage."""

    _id_prefix: ClassVar[str]
    _chunk_type: ClassVar[type[CompletionChunk | ChatChunk]]

    def __init__(self, context: ResponseContext, request: R, prompts: Sequence[Prompt]) -> None:
        super().__init__(context, request, prompts)
        self._head: dict[str, Any] = {  # fields of every response and event
            "id": f"{self._id_prefix}-{context.request_id}",
            "created": context.created,
            "model": context.model,
            "system_fingerprint": context.fingerprint,
        }
        self._begun: set[int] = set()  # choices that have an event
        self._envelope = Envelope(self._chunk(None if context.sends_usage else UNSET))

    def final_events(self, answer: Answer) -> bytes:
        return frame(encode(self._chunk(self._usage(answer)))) if self._context.sends_usage else b""

    def _chunk(self, usage: Usage | None | UnsetType, **fields: Any) -> CompletionChunk | ChatChunk:
        return self._chunk_type(**self._head, choices=[], usage=usage, **fields)

    def _envelope_with(self, usage: Usage | None | UnsetType, **fields: Any) -> Envelope:
        if fields or isinstance(usage, Usage):
            return Envelope(self._chunk(usage, **fields))
        return self._envelope

    def _usage(self, answer: Answer) -> Usage:
        return usage_of(answer)

    def _running_usage(self, answer: Answer) -> Usage | None | UnsetType:
        """The usage in each event: null until the last one unless the client requested it."""
        if not self._context.sends_usage:
            return UNSET
        return self._usage(answer) if self._request.sends_continuous_usage else None


def merged_updates(updates: Sequence[ChoiceUpdate]) -> list[ChoiceUpdate]:
    """One update for each choice: a slow reader gets several steps at once."""
    if len(updates) == 1:  # the usual case; the rest takes 5 of a token's 50 us
        return list(updates)
    found: dict[int, list[ChoiceUpdate]] = {}
    for update in updates:
        found.setdefault(update.choice, []).append(update)
    return [
        several[0]._replace(delta=joined([update.delta for update in several]))
        for several in found.values()
    ]


def broken_off(reason: FinishReason | None) -> ApiError:
    """The error of an answer that is not complete, in APIs that have no word for it."""
    if reason is FinishReason.ABORT:
        message = "the server has ended the answer before its end; ask again"
        return ApiError(503, message, code="aborted")
    return ApiError(500, "the answer has failed; the server's log has its request id")


def in_order(updates: Sequence[ChoiceUpdate]) -> list[ChoiceUpdate]:
    """All updates of an answer as one for each choice, by index."""
    return sorted(merged_updates(updates), key=lambda update: update.choice)


def prompt_details(answer: Answer) -> PromptTokensDetails | UnsetType:
    """The prompt's tokens by source, unless the server does not tell them."""
    cached = answer.reported_cached_tokens
    return UNSET if cached is None else PromptTokensDetails(cached_tokens=cached)


def usage_of(answer: Answer, *, counts_output: bool = True) -> Usage:
    """Tokens of the request so far."""
    num_tokens = answer.num_tokens if counts_output else 0
    return Usage(
        prompt_tokens=answer.num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=answer.num_prompt_tokens + num_tokens,
        prompt_tokens_details=prompt_details(answer),
    )


class TextOffsets:
    """The text offsets of one choice's tokens, as they arrive.

    A token whose text is held back, since a stop string may begin in it, has no offset yet: the
    text may end before it.
    """

    def __init__(
        self, context: ResponseContext, prompt: Prompt, echo: Echo, *, skip_special: bool
    ) -> None:
        self._untaken = list(echo.offsets)
        self._length = len(echo.text)  # of the text of all tokens, sent or held back
        self._shown = len(echo.text)
        self._detokenizer = (
            None
            if context.tokenizer is None
            else context.tokenizer.detokenizer(prompt.token_ids, skip_special)
        )

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        """Add new text and tokens of the choice."""
        self._shown += len(text)
        if self._detokenizer is None:
            self._untaken += [0] * len(token_ids)
            return
        decoded, offsets = self._detokenizer.push_with_offsets(token_ids)
        self._untaken += [self._length + offset for offset in offsets]
        self._length += len(decoded)

    @property
    def known(self) -> bool:
        """True if the text has been sent up to the start of the last token."""
        return not self._untaken or self._untaken[-1] <= self._shown

    def take(self) -> list[int]:
        """The offsets since the last call; within the text, also if a stop string cut it off."""
        offsets = [min(offset, self._shown) for offset in self._untaken]
        self._untaken.clear()
        return offsets


def chat_logprobs(
    context: ResponseContext,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    top: int,
) -> ChatLogprobs:
    """OpenAI's newer form; ``top`` alternatives a token."""

    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        token, data = context.piece(token_id), context.token_bytes(token_id)
        return {"token": token, "logprob": logprob, "bytes": data}

    content = [
        TokenLogprob(
            **fields(token_id, position[token_id].logprob),
            top_logprobs=[
                TopLogprob(**fields(other, one.logprob)) for other, one in likeliest(position, top)
            ],
        )
        for token_id, position in zip(token_ids, positions, strict=True)
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    context: ResponseContext,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    top: int,
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """OpenAI's older form; ``offsets`` are the tokens' offsets in the choice's text.

    A position without logprobs (a prompt's first token) is None. The chosen token is always among
    its alternatives, as with OpenAI.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    alternatives: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        tokens.append(context.piece(token_id))
        if position is None:
            chosen.append(None)
            alternatives.append(None)
            continue
        chosen.append(position[token_id].logprob)
        ranked: dict[str, float] = {}
        for other, one in [*likeliest(position, top), (token_id, position[token_id])]:
            # two tokens may have the same text (parts of characters): the likelier one is listed
            ranked.setdefault(context.piece(other), one.logprob)
        alternatives.append(ranked)
    return CompletionLogprobs(
        text_offset=list(offsets), token_logprobs=chosen, tokens=tokens, top_logprobs=alternatives
    )


def likeliest(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` likeliest tokens in order, then those that the request names."""
    ranked = [item for item in position.items() if item[1].rank is not None]
    ranked.sort(key=lambda item: item[1].rank or 0)
    return ranked[:top] + [item for item in position.items() if item[1].rank is None]
