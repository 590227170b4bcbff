"""The client of an engine on another thread or process, for one asyncio loop.

``EngineClient`` opens a ``Stream`` for each request, counts open and waiting ones, and routes news
to streams. It wakes the loop once a step, not once a token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from msgspec.structs import replace

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.limits import MAX_STEPS_IN_FLIGHT
from jaxinfer.core.request import RequestSpec
from jaxinfer.core.steering import float32_bytes
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Action,
    Answer,
    Command,
    Control,
    Controlled,
    EngineState,
    Failed,
    Mode,
    Ping,
    Pong,
    Refused,
    SetSteering,
    Submission,
)
from jaxinfer.engine.requests.news import News
from jaxinfer.engine.requests.outputs import Delta, joined
from jaxinfer.engine.requests.validate import check_request

PONG_SECONDS = 1.0  # for the answer to a ping
STEPS_REMEMBERED = 256  # that say how long the longest one may take
FIRST_TOKEN_SECONDS = 0.1  # for each token of a step before the first one has ended
MAX_UNJOINED_DELTAS = 256  # deltas that an unread stream holds before it joins them


class Stream:
    """The output of one request. Always close it; closing an unfinished one aborts the request.

    ``wake`` is set whenever there is output to take; streams with the same reader may share it.
    """

    def __init__(
        self, client: EngineClient, key: str, num_prompt_tokens: int, n: int, wake: asyncio.Event
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.n = n
        self.started = False
        self._client = client
        self._key = key
        self.num_unfinished = n  # completions that have not ended
        self._arrived: list[Delta] = []
        self._max_arrived = MAX_UNJOINED_DELTAS  # beyond this, deltas in _arrived are joined
        self._error: JaxinferError | None = None
        self._wake = wake

    @property
    def finished(self) -> bool:
        """True if every completion has ended and been taken."""
        return not (self.num_unfinished or self._arrived or self._error)

    def take(self) -> list[Delta]:
        """The deltas since the last call, possibly none.

        After all deltas have been taken it raises ``RequestError`` if the engine refused the
        request or it asks for what turned out to be impossible, and ``EngineError`` if the answer
        could not be completed.
        """
        arrived, self._arrived = self._arrived, []
        self._max_arrived = MAX_UNJOINED_DELTAS
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    async def read(self) -> list[Delta]:
        """Wait for deltas and ``take`` them; empty once finished or closed.

        A slow reader gets the deltas of several steps at once.
        """
        while not (arrived := self.take()) and self.num_unfinished:
            self._wake.clear()
            await self._wake.wait()
        return arrived

    def close(self) -> None:
        """Abort the request if it is unfinished. Deltas that have arrived can still be taken."""
        self._client.forget(self._key)
        self.num_unfinished = 0
        self._wake.set()

    def put(self, delta: Delta) -> None:
        """Add a delta; called by the client."""
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
        if delta.error:
            self.fail(delta.failure())
            return
        self._arrived.append(delta)
        if len(self._arrived) > self._max_arrived:
            self._join()
        self._wake.set()

    def _join(self) -> None:
        """Join the deltas of each completion, which takes a fifth of the memory."""
        several: dict[int, list[Delta]] = {}
        for delta in self._arrived:
            several.setdefault(delta.index, []).append(delta)
        self._arrived = [joined(deltas) for deltas in several.values()]
        self._max_arrived = MAX_UNJOINED_DELTAS + 2 * len(self._arrived)

    def fail(self, error: JaxinferError) -> None:
        """End with an error after the deltas that have arrived; called by the client."""
        self._error = self._error or error
        self._wake.set()


class EngineClient:
    """Opens streams on an engine. Create it inside the loop that will use it.

    ``observe``, which may be set later, is called in the loop with all news, for metrics.
    """

    def __init__(self, link: Link, observe: Callable[[News], None] | None = None) -> None:
        self.limits = link.limits
        self.facts = link.facts
        self.tokenizer = link.tokenizer
        self.stats = link.stats  # of the engine's last iteration
        self.observe = observe
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._opened = 0
        self._shows_names = False
        self._num_waiting = 0
        self.num_waiting_tokens = 0  # prompt tokens of all requests that have not started
        self._num_started = 0
        self._last_form: StructuredOutputsParams | None = None  # that was sent
        self._pongs: list[asyncio.Future[float]] = []
        self._last_heard = self._loop.time()
        self._token_seconds = deque[float](maxlen=STEPS_REMEMBERED)  # of each step
        self._num_controls = 0
        self._controls: dict[int, asyncio.Future[EngineState]] = {}
        # why the engine answers no more, once it does not
        self.ended: asyncio.Future[JaxinferError] = self._loop.create_future()
        link.connect(self.receive)

    @property
    def alive(self) -> bool:
        """True if requests are still answered."""
        return self._link.alive

    @property
    def num_open(self) -> int:
        """Streams that have not been closed."""
        return len(self._streams)

    def num_queued(self, arriving: int = 0) -> int:
        """Requests for which no slot would be free if ``arriving`` more were opened."""
        slots = self._link.num_replicas * self.limits.max_num_seqs
        free = max(slots - self._num_started, 0)
        return max(self._num_waiting + arriving - free, 0)

    def checked(self, spec: RequestSpec) -> RequestSpec:
        """A request with its prompt as int32, for ``open``; raises ``RequestError`` for one that
        this engine can never answer.
        """
        prompt = check_request(spec, self.limits, self.facts, self.tokenizer)
        return replace(spec, prompt_token_ids=prompt)

    def open(
        self,
        spec: RequestSpec,
        *,
        wake: asyncio.Event | None = None,
        checked: bool = False,
        client: str = "",
        name: str = "",
        is_whole: bool = False,
    ) -> Stream:
        """Submit a request; raises ``RequestError``, or ``EngineError`` if the engine has ended.

        ``checked``: it comes from ``checked``, which reads every token id of the prompt. ``client``
        and ``is_whole``: as in ``Submission``. ``name``: the user's id, which a profile
        shows if it has been started.
        """
        if not checked:
            spec = self.checked(spec)
        self._opened += 1
        # unique, since users may repeat their request ids; short, as it comes with every token
        key = f"{name if name and self._shows_names else 'stream'}-{self._opened}"
        self._submit(Submission(key, spec, client, is_whole=is_whole))
        counts = len(spec.prompt_token_ids), spec.sampling.n
        stream = Stream(self, key, *counts, wake or asyncio.Event())
        self._streams[key] = stream
        self._num_waiting += 1
        self.num_waiting_tokens += stream.num_prompt_tokens
        return stream

    def _submit(self, submission: Submission) -> None:
        form = submission.spec.sampling.structured_outputs
        if form is not None and form is self._last_form:
            submission = submission.with_form(None)
        self._link.send(submission)
        self._last_form = form or self._last_form

    def forget(self, key: str) -> None:
        """Remove a stream; called by the stream, perhaps twice."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        if stream.started:
            self._num_started -= stream.num_unfinished
        else:
            self._leave_queue(stream)
        if stream.num_unfinished:
            with suppress(EngineError):
                self._link.send(AbortRequest(key))

    async def stalled_seconds(self, wait: float = PONG_SECONDS) -> float:
        """How long the engine's loop has had work without finishing a part of it, such as a step.

        If its process does not tell within ``wait`` seconds: since it was last heard of; infinity
        if it has ended.
        """
        pong: asyncio.Future[float] = self._loop.create_future()
        self._pongs.append(pong)
        try:
            self._link.send(Ping())
            return await asyncio.wait_for(pong, wait)
        except EngineError:
            return inf
        except TimeoutError:
            return max(self._loop.time() - self._last_heard, wait)
        finally:
            if pong in self._pongs:
                self._pongs.remove(pong)

    @property
    def longest_step(self) -> float:
        """Seconds that the largest steps in flight may take, judging by the slowest of late."""
        tokens = max(bucket.num_tokens for bucket in self.limits.buckets)
        return MAX_STEPS_IN_FLIGHT * tokens * max(self._token_seconds, default=FIRST_TOKEN_SECONDS)

    async def control(
        self,
        action: Action,
        *,
        mode: Mode = "wait",
        path: str = "",
        level: int = 1,
        tags: tuple[str, ...] | None = None,
        num_steps: int = 0,
    ) -> EngineState:
        """Change the engine between two steps; returns the state after it. Requests that arrive
        during the change wait for its end.

        ``pause`` holds them until ``resume``, ``sleep`` until ``wake_up``; ``path`` names the
        weights of ``update_weights``, or the folder of ``start_profile``, whose window has at most
        ``num_steps``; ``report`` changes nothing. Open requests are completed
        first, aborted, or continued afterwards (``mode``). Raises the error of the change, and
        ``EngineError`` if the engine has ended.
        """
        if action in ("start_profile", "stop_profile"):
            self._shows_names = action == "start_profile"
        return await self._controlled(
            lambda number: Control(number, action, mode, path, level, tags, num_steps=num_steps)
        )

    async def set_steering(self, name: str, vector: Any) -> None:
        """Keep a steering vector float32[W] that requests may name, or with None remove it.

        Raises ``RequestError`` for a vector that fits no point of the engine.
        """
        if vector is not None:
            vector = float32_bytes(f"the steering vector {name!r}", vector)
        await self._controlled(lambda number: SetSteering(number, name, vector))

    async def _controlled(self, command: Callable[[int], Command]) -> EngineState:
        """Send a command with this number; returns the state of its ``Controlled``."""
        self._num_controls += 1
        done: asyncio.Future[EngineState] = self._loop.create_future()
        self._controls[self._num_controls] = done
        self._link.send(command(self._num_controls))
        return await done

    async def shutdown(self) -> None:
        """End the engine; open streams end with ``EngineError``."""
        await asyncio.to_thread(self._link.stop)

    def receive(self, answer: Answer) -> None:
        """Handle an answer of the engine in the loop; called by the link, on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, answer)
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop has no readers
                raise

    # in the loop

    def _take(self, answer: Answer) -> None:
        self._last_heard = self._loop.time()
        match answer:
            case News():
                self._take_news(answer)
            case Refused():
                if (stream := self._streams.get(answer.request_id)) is not None:
                    stream.fail(answer.failure.error)
            case Pong():
                self._end_pings(answer.stalled_seconds)
            case Controlled():
                failure = answer.failure
                self._end_control(answer.number, failure.error if failure else answer.state)
            case Failed():
                if not self.ended.done():
                    self.ended.set_result(answer.error)
                for number in tuple(self._controls):
                    self._end_control(number, answer.error)
                for stream in self._streams.values():
                    if stream.num_unfinished:
                        stream.fail(answer.error)
                self._end_pings(inf)

    def _take_news(self, news: News) -> None:
        self.stats = news.stats
        for step in news.steps:
            self._token_seconds.append(step.seconds / step.num_bucket_tokens)
        for key in news.started:
            if (stream := self._streams.get(key)) is not None:
                stream.started = True
                self._leave_queue(stream)
                self._num_started += stream.n
        for delta in news.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)
                if stream.started and delta.finish_reason is not None:
                    self._num_started -= 1  # its slot is free before the delta is read
        if self.observe is not None:
            self.observe(news)

    def _end_control(self, number: int, result: EngineState | JaxinferError) -> None:
        done = self._controls.pop(number, None)
        if done is None or done.done():  # the caller has given up
            return
        if isinstance(result, EngineState):
            done.set_result(result)
        else:
            done.set_exception(result)

    def _end_pings(self, stalled_seconds: float) -> None:
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_result(stalled_seconds)

    def _leave_queue(self, stream: Stream) -> None:
        self._num_waiting -= 1
        self.num_waiting_tokens -= stream.num_prompt_tokens
