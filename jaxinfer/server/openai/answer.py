"""One HTTP request's answer: several prompts, each with n completions, read as one.

Owns: ``Answer``: the streams of a request, its deadline, the ways it can end early, and what the
metrics are told about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.link.client import Stream
from jaxinfer.engine.outputs import Delta, SequenceTimes
from jaxinfer.server.metrics.registry import FinishedRequest, FinishedSequence, Metrics


class Gain(NamedTuple):
    """What one completion gained."""

    prompt: int  # which of the request's prompts
    choice: int  # which of the response's choices; they are numbered prompt by prompt
    delta: Delta


@dataclass(slots=True)
class Progress:
    """How far one completion is; times in seconds of ``time.monotonic``."""

    last_token: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: SequenceTimes | None = None


class Answer:
    """Reads the streams of one request. Close it always; what is unfinished is then aborted."""

    def __init__(
        self,
        request_id: str,
        route: str,
        streams: Sequence[Stream],
        wake: asyncio.Event,
        metrics: Metrics,
        *,
        max_tokens: int | None,
    ) -> None:
        self.request_id = request_id
        self.route = route
        self.received = time.monotonic()
        self.first_token: float | None = None
        self._streams = tuple(streams)
        self._wake = wake
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._progress = tuple(tuple(Progress() for _ in range(s.n)) for s in streams)
        self._num_unfinished = sum(stream.n for stream in streams)
        self._error: Exception | None = None
        self._stopped = False
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None
        for _ in streams:
            metrics.request_received()

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(stream.num_prompt_tokens for stream in self._streams)

    @property
    def num_tokens(self) -> int:
        """Generated so far by all completions."""
        return sum(one.num_tokens for ones in self._progress for one in ones)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache, each prompt counted once."""
        return sum(ones[0].num_cached_tokens for ones in self._progress)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended and been read."""
        return not self._num_unfinished

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Of each choice; None while it goes on."""
        return [one.finish_reason for ones in self._progress for one in ones]

    def expire_after(self, seconds: float, error: Exception) -> None:
        """Fail with ``error`` unless finished within ``seconds``."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self._expire, error)

    def stop(self) -> None:
        """End every unfinished completion with ``abort``; the reader still gets their ends."""
        self._stopped = True
        self._leave_engine()

    def close(self) -> None:
        """Abort what is unfinished and wake the reader, who then gets nothing more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._leave_engine()
        self._report()

    async def read(self) -> list[Gain]:
        """What was gained since the last read, waiting for something; empty at the end.

        Raises the engine's error, or the deadline's, when the answer cannot be completed.
        """
        while True:
            self._wake.clear()
            if self._closed or not self._num_unfinished:
                return []
            if gains := self._take():
                return gains
            if self._error is not None:
                raise self._error
            if self._stopped:
                return self._ends()
            await self._wake.wait()

    def _take(self) -> list[Gain]:
        return [
            self._gain(number, delta)
            for number, stream in enumerate(self._streams)
            for delta in stream.take()
        ]

    def _gain(self, number: int, delta: Delta) -> Gain:
        progress = self._progress[number][delta.index]
        if delta.token_ids:
            self._note_tokens(progress, delta)
        if delta.finish_reason is not None:
            progress.finish_reason, progress.times = delta.finish_reason, delta.times
            self._num_unfinished -= 1
        return Gain(number, number * self._streams[0].n + delta.index, delta)

    def _note_tokens(self, progress: Progress, delta: Delta) -> None:
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

    def _ends(self) -> list[Gain]:
        """The ends of what is unfinished; the engine's own news of it will find no reader."""
        return [
            self._gain(number, Delta("", index, finish_reason=FinishReason.ABORT))
            for number, ones in enumerate(self._progress)
            for index, one in enumerate(ones)
            if one.finish_reason is None
        ]

    def _expire(self, error: Exception) -> None:
        self._error = error
        self._leave_engine()

    def _leave_engine(self) -> None:
        """Abort what is unfinished, however slow the reader; what has arrived is still read."""
        for stream in self._streams:
            stream.close()
        self._wake.set()

    def _report(self) -> None:
        seconds = time.monotonic() - self.received
        unread = FinishReason.ABORT if self._error is None else FinishReason.ERROR
        for stream, ones in zip(self._streams, self._progress, strict=True):
            sequences = tuple(
                FinishedSequence(
                    one.finish_reason or unread, one.num_tokens, one.num_cached_tokens, one.times
                )
                for one in ones
            )
            self._metrics.request_finished(
                FinishedRequest(stream.num_prompt_tokens, self._max_tokens, seconds, sequences)
            )
