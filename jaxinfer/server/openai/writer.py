"""What the three ways of writing an answer have in common.

Owns: the ``Writer`` protocol, what every reply and every event of it carries, and logprobs in
OpenAI's two forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxinfer.engine.outputs import Logprob, PositionLogprobs, joined
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, Gain
from jaxinfer.server.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode,
    usage,
)
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reply:
    """What every part of a reply carries, and how tokens are spelt in it."""

    request_id: str
    created: int
    model: str
    fingerprint: str
    role: str
    sends_usage: bool
    tokens_as_ids: bool
    tokenizer: Tokenizer | None

    def piece(self, token_id: int) -> str:
        """A token's text beside its logprob."""
        if self.tokens_as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_piece(token_id)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """A token's UTF-8, also where it is part of a character."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


class Echo(NamedTuple):
    """What precedes a choice's output in its text, and where its tokens begin there."""

    text: str = ""
    places: Sequence[int] = ()


class Writer[R](Protocol):
    """Writes one answer. ``frames`` and ``last_frames`` are for streams, ``whole`` for the rest."""

    def __init__(self, reply: Reply, request: R, prompts: Sequence[Prompt]) -> None: ...

    def frames(self, gains: Sequence[Gain], answer: Answer) -> bytes:
        """The events for what was gained; may be none."""
        ...

    def last_frames(self, answer: Answer) -> bytes:
        """The events after the last gain."""
        ...

    def whole(self, gains: Sequence[Gain], answer: Answer) -> Any:
        """The body of an answer that is not streamed."""
        ...


class Envelope:
    """An event without its choice, which alone changes from token to token: encoded once."""

    def __init__(self, chunk: CompletionChunk | ChatChunk) -> None:
        # a quote within a string is escaped, so that no text can look like the empty list
        head, tail = frame(encode(chunk)).split(b'"choices":[]')
        self._head, self._tail = head + b'"choices":[', b"]" + tail

    def around(self, choice: CompletionChunkChoice | ChatChunkChoice) -> bytes:
        """The event of this choice."""
        return b"".join((self._head, encode(choice), self._tail))


def merged(gains: Sequence[Gain]) -> list[Gain]:
    """One gain for each choice: a slow reader finds several steps at once."""
    if len(gains) == 1:  # nearly always; the rest takes 5 of a token's 50 us
        return list(gains)
    found: dict[int, list[Gain]] = {}
    for gain in gains:
        found.setdefault(gain.choice, []).append(gain)
    return [
        several[0]._replace(delta=joined([gain.delta for gain in several]))
        for several in found.values()
    ]


def usage_of(answer: Answer, *, counts_output: bool = True) -> Usage:
    """Tokens of the request so far."""
    num_tokens = answer.num_tokens if counts_output else 0
    return usage(answer.num_prompt_tokens, num_tokens, cached_tokens=answer.num_cached_tokens)


class Places:
    """Where the tokens of one choice begin in its text, as they come.

    A token whose text is held back, since a stop string may begin there, has no place yet: the text
    may end before it.
    """

    def __init__(self, reply: Reply, prompt: Prompt, echo: Echo, *, skip_special: bool) -> None:
        self._unplaced = list(echo.places)
        self._length = len(echo.text)  # of the text of all tokens that came, shown or not
        self._shown = len(echo.text)
        self._detokenizer = (
            None
            if reply.tokenizer is None
            else reply.tokenizer.detokenizer(prompt.token_ids, skip_special)
        )

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        """Take in what the choice gained."""
        self._shown += len(text)
        if self._detokenizer is None:
            self._unplaced += [0] * len(token_ids)
            return
        decoded, places = self._detokenizer.push_located(token_ids)
        self._unplaced += [self._length + place for place in places]
        self._length += len(decoded)

    @property
    def known(self) -> bool:
        """Whether the text that was shown reaches as far as each token's beginning."""
        return not self._unplaced or self._unplaced[-1] <= self._shown

    def take(self) -> list[int]:
        """The places since the last call; within the text, also where a stop string cut it off."""
        places = [min(place, self._shown) for place in self._unplaced]
        self._unplaced.clear()
        return places


def chat_logprobs(
    reply: Reply, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], top: int
) -> ChatLogprobs:
    """OpenAI's newer form; ``top`` alternatives a token."""
    content: list[TokenLogprob] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = position[token_id]
        others = [
            TopLogprob(
                token=reply.piece(other), logprob=one.logprob, bytes=reply.token_bytes(other)
            )
            for other, one in likeliest(position, top)
        ]
        content.append(
            TokenLogprob(
                token=reply.piece(token_id),
                logprob=entry.logprob,
                bytes=reply.token_bytes(token_id),
                top_logprobs=others,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    reply: Reply,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    top: int,
    places: Sequence[int],
) -> CompletionLogprobs:
    """OpenAI's older form; ``places`` are where the tokens begin in the choice's text.

    A position without logprobs (a prompt's first token) is None. The chosen token is always among
    its alternatives, as with OpenAI.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    alternatives: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        tokens.append(reply.piece(token_id))
        if position is None:
            chosen.append(None)
            alternatives.append(None)
            continue
        chosen.append(position[token_id].logprob)
        ranked: dict[str, float] = {}
        for other, one in [*likeliest(position, top), (token_id, position[token_id])]:
            # two tokens may look the same (parts of characters): the likelier one is listed
            ranked.setdefault(reply.piece(other), one.logprob)
        alternatives.append(ranked)
    return CompletionLogprobs(
        text_offset=list(places), token_logprobs=chosen, tokens=tokens, top_logprobs=alternatives
    )


def likeliest(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` likeliest tokens in order; the chosen one stands first in ``position``."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return ranked[:top]
