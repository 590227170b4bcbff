"""How ``/v1/completions`` is written, whole and as events.

Owns: ``CompletionWriter``. Must not know: queues, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.outputs import Delta, PositionLogprobs
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.answer import Answer, Gain
from jaxinfer.server.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    StopReason,
    Usage,
    encode,
)
from jaxinfer.server.schema import CompletionRequest
from jaxinfer.server.sse import frame
from jaxinfer.server.writer import Envelope, Reply, completion_logprobs, merged, usage_of


class CompletionWriter:
    """See ``Writer``. A choice's text begins with its prompt where ``echo`` asks for it."""

    def __init__(self, reply: Reply, request: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self._reply = reply
        self._request = request
        self._prompts = prompts
        self._id = f"cmpl-{reply.request_id}"
        self._offsets: dict[int, int] = {}  # where each choice's next token begins
        # of each prompt, as far as they came; nothing precedes a prompt's first token
        self._prompt_logprobs: list[list[PositionLogprobs | None]] = [[None] for _ in prompts]
        self._held: list[Gain] = []  # by choices whose echo waits for the prompt's logprobs
        self._envelope = Envelope(self._chunk(None if reply.sends_usage else UNSET))

    def whole(self, gains: Sequence[Gain], answer: Answer) -> Completion:
        """See ``Writer``."""
        self._take_prompt_logprobs(gains)
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
        self._take_prompt_logprobs(gains)
        events: list[bytes] = []
        envelope = self._running_envelope(answer)
        gains, self._held = [*self._held, *gains], []
        for gain in merged(gains):
            if not self._can_begin(gain):
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
            text=self._echo(prompt) + text,
            logprobs=self._logprobs(gain, first=True),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=list(token_ids) if listed else UNSET,
            prompt_token_ids=list(prompt.token_ids) if listed else UNSET,
            prompt_logprobs=self._prompt_logprobs[gain.prompt] if wants_prompt else UNSET,
        )

    def _chunk_choice(self, gain: Gain) -> CompletionChunkChoice:
        prompt, delta = self._prompts[gain.prompt], gain.delta
        first = gain.choice not in self._offsets
        text, token_ids = self._output(delta)
        if first:
            self._offsets[gain.choice] = 0
            text = self._echo(prompt) + text
        logprobs = self._logprobs(gain, first=first)
        if logprobs is not None and logprobs.tokens:
            self._offsets[gain.choice] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        finish_reason, stop_reason = self._ending(delta)
        listed = self._request.return_token_ids
        return CompletionChunkChoice(
            index=gain.choice,
            text=text,
            logprobs=logprobs,
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

    def _echo(self, prompt: Prompt) -> str:
        if not self._request.echo:
            return ""
        if prompt.text is not None or self._reply.tokenizer is None:
            return prompt.text or ""
        detokenizer = self._reply.tokenizer.detokenizer(
            skip_special_tokens=self._request.skip_special_tokens
        )
        text = detokenizer.push(prompt.token_ids)
        # token ids may end within a character; the output's text then begins with all of it
        return text + detokenizer.flush() if self._request.scores_only else text

    def _logprobs(self, gain: Gain, *, first: bool) -> CompletionLogprobs | None:
        top = self._request.logprobs
        if top is None:
            return None
        _, token_ids = self._output(gain.delta)
        positions: tuple[PositionLogprobs | None, ...] = gain.delta.logprobs[: len(token_ids)]
        if first and self._request.echo:
            prompt = self._prompts[gain.prompt]
            token_ids = prompt.token_ids + token_ids
            positions = (*self._prompt_logprobs[gain.prompt], *positions)
        offset = self._offsets.get(gain.choice, 0)
        return completion_logprobs(self._reply, token_ids, positions, top, offset)

    def _take_prompt_logprobs(self, gains: Sequence[Gain]) -> None:
        for gain in gains:
            self._prompt_logprobs[gain.prompt].extend(gain.delta.prompt_logprobs)

    def _can_begin(self, gain: Gain) -> bool:
        """Whether what the choice's first event echoes is complete."""
        if not self._request.echo or self._request.logprobs is None:
            return True
        known = len(self._prompt_logprobs[gain.prompt])
        return known == len(self._prompts[gain.prompt].token_ids)

    def _usage(self, answer: Answer) -> Usage:
        return usage_of(answer, counts_output=not self._request.scores_only)

    def _running_envelope(self, answer: Answer) -> Envelope:
        if self._reply.sends_usage and self._request.sends_continuous_usage:
            return Envelope(self._chunk(self._usage(answer)))
        return self._envelope
