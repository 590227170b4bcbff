"""How ``/v1/completions`` is written, whole and as events.

Owns: ``CompletionWriter``.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.outputs import Delta, PositionLogprobs
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, Gain
from jaxinfer.server.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    StopReason,
    Usage,
    encode,
)
from jaxinfer.server.openai.schema import CompletionRequest
from jaxinfer.server.openai.writer import (
    Echo,
    Envelope,
    Places,
    Reply,
    completion_logprobs,
    merged,
    usage_of,
)


class CompletionWriter:
    """See ``Writer``. A choice's text begins with its prompt where ``echo`` asks for it."""

    def __init__(self, reply: Reply, request: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self._reply = reply
        self._request = request
        self._prompts = prompts
        self._id = f"cmpl-{reply.request_id}"
        self._begun: set[int] = set()  # choices that have an event
        self._places: dict[int, Places] = {}  # of each choice's tokens, for logprobs
        self._echoes: dict[int, Echo] = {}  # of each prompt, made with its first choice
        # of each prompt, as far as they came; nothing precedes a prompt's first token
        self._prompt_logprobs: list[list[PositionLogprobs | None]] = [[None] for _ in prompts]
        self._held: list[Gain] = []  # what cannot be written yet
        self._envelope = Envelope(self._chunk(None if reply.sends_usage else UNSET))

    def whole(self, gains: Sequence[Gain], answer: Answer) -> Completion:
        """See ``Writer``."""
        self._note(gains)
        choices = [self._choice(gain) for gain in merged(gains)]
        return Completion(
            id=self._id,
            created=self._reply.created,
            model=self._reply.model,
            choices=sorted(choices, key=lambda choice: choice.index),
            system_fingerprint=self._reply.fingerprint,
            usage=self._usage(answer),
        )

    def frames(self, gains: Sequence[Gain], answer: Answer) -> bytes:
        """See ``Writer``."""
        self._note(gains)
        events: list[bytes] = []
        envelope = self._running_envelope(answer)
        gains, self._held = [*self._held, *gains], []
        for gain in merged(gains):
            if not self._is_writable(gain):
                self._held.append(gain)
                continue
            if gain.delta.token_ids or gain.delta.finish_reason is not None:
                events.append(envelope.around(self._chunk_choice(gain)))
        return b"".join(events)

    def last_frames(self, answer: Answer) -> bytes:
        """See ``Writer``."""
        if not self._reply.sends_usage:
            return b""
        return frame(encode(self._chunk(self._usage(answer))))

    def _chunk(self, usage: Usage | None | UnsetType) -> CompletionChunk:
        return CompletionChunk(
            id=self._id,
            created=self._reply.created,
            model=self._reply.model,
            choices=[],
            system_fingerprint=self._reply.fingerprint,
            usage=usage,
        )

    def _choice(self, gain: Gain) -> CompletionChoice:
        prompt, delta = self._prompts[gain.prompt], gain.delta
        finish_reason, stop_reason = self._ending(delta)
        assert finish_reason is not None, "the answer has ended"
        text, token_ids = self._output(delta)
        listed = self._request.return_token_ids
        wants_prompt = self._request.prompt_logprobs is not None
        return CompletionChoice(
            index=gain.choice,
            text=self._echo(gain.prompt).text + text,
            logprobs=self._logprobs(gain, first=True),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=list(token_ids) if listed else UNSET,
            prompt_token_ids=list(prompt.token_ids) if listed else UNSET,
            prompt_logprobs=self._prompt_logprobs[gain.prompt] if wants_prompt else UNSET,
        )

    def _chunk_choice(self, gain: Gain) -> CompletionChunkChoice:
        prompt, delta = self._prompts[gain.prompt], gain.delta
        first = gain.choice not in self._begun
        self._begun.add(gain.choice)
        text, token_ids = self._output(delta)
        if first:
            text = self._echo(gain.prompt).text + text
        finish_reason, stop_reason = self._ending(delta)
        listed = self._request.return_token_ids
        return CompletionChunkChoice(
            index=gain.choice,
            text=text,
            logprobs=self._logprobs(gain, first=first),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=list(token_ids) if listed else UNSET,
            prompt_token_ids=list(prompt.token_ids) if listed and first else UNSET,
        )

    def _output(self, delta: Delta) -> tuple[str, tuple[int, ...]]:
        """What was generated for the reader: nothing where only the prompt is scored."""
        return ("", ()) if self._request.scores_only else (delta.text, delta.token_ids)

    def _ending(self, delta: Delta) -> tuple[FinishReason | None, StopReason]:
        """Why the choice ended, if it did, and on what."""
        if self._request.scores_only and delta.finish_reason is FinishReason.STOP:
            return FinishReason.LENGTH, None  # the token that was left out happened to end the text
        return delta.finish_reason, delta.stop_reason

    def _echo(self, number: int) -> Echo:
        """What the choices of a prompt begin with."""
        if number not in self._echoes:
            self._echoes[number] = self._echo_of(self._prompts[number])
        return self._echoes[number]

    def _echo_of(self, prompt: Prompt) -> Echo:
        if not self._request.echo:
            return Echo()
        if prompt.text is not None:
            return Echo(prompt.text, prompt.places)
        if self._reply.tokenizer is None:
            return Echo("", [0] * len(prompt.token_ids))
        detokenizer = self._reply.tokenizer.detokenizer(
            skip_special_tokens=self._request.skip_special_tokens
        )
        text, places = detokenizer.push_located(prompt.token_ids)
        # token ids may end within a character; the output's text then begins with all of it
        return Echo(text + detokenizer.flush() if self._request.scores_only else text, places)

    def _logprobs(self, gain: Gain, *, first: bool) -> CompletionLogprobs | None:
        top = self._request.logprobs
        if top is None:
            return None
        _, token_ids = self._output(gain.delta)
        positions: tuple[PositionLogprobs | None, ...] = gain.delta.logprobs[: len(token_ids)]
        if first and self._request.echo:
            prompt = self._prompts[gain.prompt]
            scored = self._prompt_logprobs[gain.prompt]
            unscored = [None] * (len(prompt.token_ids) - len(scored))  # where it was aborted
            token_ids = prompt.token_ids + token_ids
            positions = (*scored, *unscored, *positions)
        places = self._places[gain.choice].take()
        return completion_logprobs(self._reply, token_ids, positions, top, places)

    def _note(self, gains: Sequence[Gain]) -> None:
        """Take in what the logprobs of later events need."""
        for gain in gains:
            self._prompt_logprobs[gain.prompt].extend(gain.delta.prompt_logprobs)
            if self._request.logprobs is None:
                continue
            if gain.choice not in self._places:
                self._places[gain.choice] = Places(
                    self._reply,
                    self._prompts[gain.prompt],
                    self._echo(gain.prompt),
                    skip_special=self._request.skip_special_tokens,
                )
            self._places[gain.choice].add(*self._output(gain.delta))

    def _is_writable(self, gain: Gain) -> bool:
        """Whether it is known what the choice's first event echoes, and where its tokens begin."""
        if self._request.logprobs is None:
            return True
        if self._request.echo:
            known = len(self._prompt_logprobs[gain.prompt])
            if known < len(self._prompts[gain.prompt].token_ids):
                return gain.delta.finish_reason is FinishReason.ABORT
        return gain.delta.finish_reason is not None or self._places[gain.choice].known

    def _usage(self, answer: Answer) -> Usage:
        return usage_of(answer, counts_output=not self._request.scores_only)

    def _running_envelope(self, answer: Answer) -> Envelope:
        if self._reply.sends_usage and self._request.sends_continuous_usage:
            return Envelope(self._chunk(self._usage(answer)))
        return self._envelope
