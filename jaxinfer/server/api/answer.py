"""The answer to one HTTP request: several prompts, each with n completions, read as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.request import FinishReason, SamplingParams
from jaxinfer.engine.link.beam_stream import BeamStream
from jaxinfer.engine.link.client import Stream
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.server.metrics.registry import Metrics, SequenceProgress

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


@dataclass(frozen=True)
class Caller:
    """The sender of a request: the name of its key, empty without one, a text that differs from
    key to key, and its trace's headers.

    ``client`` tells senders from each other: by key or address; empty for this process.
    """

    key_name: str = ""
    key_salt: str = ""
    trace: Mapping[str, str] | None = None
    client: str = ""

    @classmethod
    def of(cls, scope: Scope) -> Caller:
        """The sender, after the guards have checked the key."""
        headers = Headers(scope=scope)
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        state = scope["state"]
        salt, client = state.get("key_salt", ""), state.get("client", "")
        return cls(state.get("key_name", ""), salt, trace or None, client)


UNKNOWN = Caller()


class ChoiceUpdate(NamedTuple):
    """One completion's next tokens."""

    prompt: int  # index of the prompt in the request
    choice: int  # index of the choice in the response; the choices are numbered prompt by prompt
    delta: Delta


class Answer:
    """Reads the streams of one request. Always close it: that aborts unfinished completions."""

    def __init__(
        self,
        request_id: str,
        route: str,
        streams: Sequence[Stream | BeamStream],
        wake: asyncio.Event,
        metrics: Metrics,
        *,
        sampling: SamplingParams,
        caller: Caller,
        shows_cached: bool = True,
    ) -> None:
        self.request_id = request_id
        self.route = route
        self.sampling = sampling
        self.caller = caller
        self._shows_cached = shows_cached
        self.received = time.monotonic()
        self.first_token: float | None = None
        self._streams = tuple(streams)
        self._wake = wake
        self._metrics = metrics
        self._progress = tuple(tuple(SequenceProgress() for _ in range(s.n)) for s in streams)
        self._num_unfinished = sum(stream.n for stream in streams)
        self.error: Exception | None = None  # why it cannot be completed
        self._stopped = False
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None
        for _ in streams:
            metrics.request_received()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once."""
        return sum(stream.num_prompt_tokens for stream in self._streams)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far by all completions."""
        return sum(one.num_tokens for completions in self._progress for one in completions)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, each prompt counted once."""
        return sum(completions[0].num_cached_tokens for completions in self._progress)

    @property
    def reported_cached_tokens(self) -> int | None:
        """``num_cached_tokens`` for the client; None if the server does not tell it."""
        return self.num_cached_tokens if self._shows_cached else None

    @property
    def finished(self) -> bool:
        """True if every completion has ended and been read."""
        return not self._num_unfinished

    @property
    def sequences(self) -> list[SequenceProgress]:
        """The state of each choice."""
        return [one for completions in self._progress for one in completions]

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """The finish reason of each choice; None while it runs."""
        return [one.finish_reason for one in self.sequences]

    def expire_after(self, seconds: float, error: Exception) -> None:
        """Fail with ``error`` unless finished within ``seconds``."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self._expire, error)

    def stop(self) -> None:
        """End every unfinished completion with ``abort``; ``read`` still returns these ends."""
        self._stopped = True
        self._close_streams()

    def close(self) -> None:
        """Abort unfinished completions; a waiting ``read`` returns an empty list. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._close_streams()
        self._report()

    async def read(self) -> list[ChoiceUpdate]:
        """The updates since the last read; waits for at least one; empty at the end.

        Raises the engine's error, or the timeout's, if the answer cannot be completed.
        """
        while True:
            self._wake.clear()
            if self._closed or not self._num_unfinished:
                return []
            if updates := self._take_updates():
                return updates
            if self.error is not None:
                raise self.error
            if self._stopped:
                return self._abort_updates()
            await self._wake.wait()

    def _take_updates(self) -> list[ChoiceUpdate]:
        try:
            return [
                self._apply(number, delta)
                for number, stream in enumerate(self._streams)
                for delta in stream.take()
            ]
        except JaxinferError as error:
            self.error = error
            raise

    def _apply(self, number: int, delta: Delta) -> ChoiceUpdate:
        progress = self._progress[number][delta.index]
        if delta.token_ids:
            self._note_tokens(progress, delta)
        elif delta.pooled:
            progress.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            progress.finish_reason, progress.times = delta.finish_reason, delta.times
            self._num_unfinished -= 1
        return ChoiceUpdate(number, number * self._streams[0].n + delta.index, delta)

    def _note_tokens(self, progress: SequenceProgress, delta: Delta) -> None:
        now, count = time.monotonic(), len(delta.token_ids)
        if progress.last_token is None:
            self._metrics.first_tokens(now - self.received)
            if self.first_token is None:
                self.first_token = now
        else:
            self._metrics.inter_token(now - progress.last_token, count)
        progress.last_token = now
        progress.num_tokens += count
        progress.num_cached_tokens = delta.num_cached_tokens

    def _abort_updates(self) -> list[ChoiceUpdate]:
        """An ``abort`` for each unfinished completion, in place of the engine's own updates."""
        return [
            self._apply(number, Delta("", index, finish_reason=FinishReason.ABORT))
            for number, completions in enumerate(self._progress)
            for index, one in enumerate(completions)
            if one.finish_reason is None
        ]

    def _expire(self, error: Exception) -> None:
        self.error = error
        self._close_streams()

    def _close_streams(self) -> None:
        """Abort in the engine; updates that have arrived can still be read."""
        for stream in self._streams:
            stream.close()
        self._wake.set()

    def _report(self) -> None:
        seconds = time.monotonic() - self.received
        unread = FinishReason.ABORT if self.error is None else FinishReason.ERROR
        for stream, progress in zip(self._streams, self._progress, strict=True):
            ended = [replace(one, finish_reason=one.finish_reason or unread) for one in progress]
            self._metrics.request_finished(
                stream.num_prompt_tokens, self.sampling.max_tokens, seconds, ended
            )
        if name := self.caller.key_name:
            self._metrics.key_used(name, self.num_prompt_tokens, self.num_tokens)
