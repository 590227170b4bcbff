"""One asyncio loop's side of an engine that runs elsewhere: streams in, streams out.

Owns: ``EngineClient`` and its ``Stream``: which requests are open and which of them still wait, the
routing of news to readers, and the wake of the loop (one for each step, not one a token).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.facts import ModelFacts, check_request
from jaxinfer.engine.news import EngineStats, News
from jaxinfer.engine.outputs import Delta, joined
from jaxinfer.text.tokenizer import Tokenizer

MOST_APART = 256  # deltas that a stream holds before it joins them


class Link(Protocol):
    """The way to an engine: a thread of this process, or another process.

    What comes back goes to the three callbacks of ``Listener``, from any thread.
    """

    def connect(self, listener: Listener) -> None:
        """Name who is told; called once, before anything else."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        ...

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Send a request; raises ``EngineError`` when nobody would answer it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within one step. Unknown ids are ignored."""
        ...

    def ping(self) -> None:
        """Ask for a ``pong``, which comes once the engine's loop has read this."""
        ...

    def stop(self) -> None:
        """End the engine; open requests are refused. Returns when it has ended."""
        ...


class Listener(Protocol):
    """Who is told what happens. Every call returns at once; any thread may make it."""

    def news(self, news: News) -> None:
        """A turn of the engine brought something."""
        ...

    def refuse(self, request_id: str, error: JaxinferError) -> None:
        """A request was not accepted, or cannot be finished."""
        ...

    def pong(self) -> None:
        """The engine's loop has read a ``ping``."""
        ...


class Stream:
    """What one request gains, for one reader. Close it always; closing an open one aborts it.

    ``wake`` is set whenever there is something to take; streams with one reader may share it.
    """

    def __init__(
        self, client: EngineClient, key: str, num_prompt_tokens: int, n: int, wake: asyncio.Event
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.n = n
        self.started = False
        self._client = client
        self._key = key
        self._unfinished = n
        self._arrived: list[Delta] = []
        self._most_apart = MOST_APART  # deltas in _arrived, then they are joined
        self._error: JaxinferError | None = None
        self._wake = wake

    @property
    def num_unfinished(self) -> int:
        """Completions that the engine has not ended."""
        return self._unfinished

    @property
    def finished(self) -> bool:
        """Whether every completion has ended and been taken."""
        return not (self._unfinished or self._arrived or self._error)

    def take(self) -> list[Delta]:
        """Everything gained since the last call, maybe nothing.

        Raises ``RequestError`` for a request that the engine refused and ``EngineError`` when the
        answer could not be completed, after what came before.
        """
        arrived, self._arrived = self._arrived, []
        self._most_apart = MOST_APART
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    async def read(self) -> list[Delta]:
        """``take``, waiting for something; empty once finished or closed.

        A slow reader thus gets several steps at once.
        """
        while not (arrived := self.take()) and self._unfinished:
            self._wake.clear()
            await self._wake.wait()
        return arrived

    def close(self) -> None:
        """Forget the request; an unfinished one is aborted. What has arrived can still be taken."""
        self._client.forget(self._key)
        self._unfinished = 0
        self._wake.set()

    def put(self, delta: Delta) -> None:
        """Take a delta in; called by the client."""
        if delta.finish_reason is not None:
            self._unfinished -= 1
        if delta.error:
            self.fail(EngineError(delta.error))
            return
        self._arrived.append(delta)
        if len(self._arrived) > self._most_apart:
            self._join()
        self._wake.set()

    def _join(self) -> None:
        """One delta for each completion, which is a fifth of the memory until a reader comes."""
        several: dict[int, list[Delta]] = {}
        for delta in self._arrived:
            several.setdefault(delta.index, []).append(delta)
        self._arrived = [joined(deltas) for deltas in several.values()]
        self._most_apart = MOST_APART + 2 * len(self._arrived)

    def fail(self, error: JaxinferError) -> None:
        """End with an error, after what has arrived; called by the client."""
        self._error = self._error or error
        self._wake.set()


class EngineClient:
    """Opens streams on an engine. Make it inside the loop that will use it.

    ``observe``, which may be set later, is called in the loop with all news, for counters.
    """

    def __init__(
        self,
        link: Link,
        limits: Limits,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        *,
        stats: EngineStats | None = None,
        observe: Callable[[News], None] | None = None,
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.tokenizer = tokenizer
        self.stats = stats or EngineStats()  # of the engine's last turn
        self.observe = observe
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._opened = 0
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_started = 0
        self._pongs: list[asyncio.Future[None]] = []
        link.connect(self)

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._link.alive

    @property
    def num_open(self) -> int:
        """Streams that somebody still reads."""
        return len(self._streams)

    def num_queued(self, arriving: int = 0) -> int:
        """Requests that have no slot, nor a free one to take, once ``arriving`` more came."""
        free = max(self.limits.max_num_seqs - self._num_started, 0)
        return max(self._num_waiting + arriving - free, 0)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of all requests that have not begun."""
        return self._num_waiting_tokens

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise ``RequestError`` for a request that this engine can never answer."""
        check_request(
            prompt_token_ids,
            sampling,
            limits=self.limits,
            facts=self.facts,
            has_tokenizer=self.tokenizer is not None,
        )

    def open(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        wake: asyncio.Event | None = None,
        checked: bool = False,
    ) -> Stream:
        """Submit a request; raises ``RequestError`` or ``EngineError`` when that is hopeless.

        ``checked``: it has passed ``check``, which looks at every token id of the prompt.
        """
        if not checked:
            self.check(prompt_token_ids, sampling)
        self._opened += 1
        key = f"stream-{self._opened}"  # never used again, whatever ids users choose
        self._link.submit(key, prompt_token_ids, sampling, priority=priority, cache_salt=cache_salt)
        stream = Stream(self, key, len(prompt_token_ids), sampling.n, wake or asyncio.Event())
        self._streams[key] = stream
        self._num_waiting += 1
        self._num_waiting_tokens += stream.num_prompt_tokens
        return stream

    def forget(self, key: str) -> None:
        """Drop a stream; called by the stream, and harmless the second time."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        if stream.started:
            self._num_started -= stream.num_unfinished
        else:
            self._leave_queue(stream)
        if stream.num_unfinished:
            self._link.abort(key)

    async def responds(self, seconds: float) -> bool:
        """Whether the engine's loop answers within ``seconds``."""
        if not self.alive:
            return False
        pong = self._loop.create_future()
        self._pongs.append(pong)
        try:
            self._link.ping()
            await asyncio.wait_for(pong, seconds)
        except (TimeoutError, EngineError):
            return False
        finally:
            if pong in self._pongs:
                self._pongs.remove(pong)
        return self.alive

    async def shutdown(self) -> None:
        """End the engine; open streams end with ``EngineError``."""
        await asyncio.to_thread(self._link.stop)

    # Listener: called on the engine's side

    def news(self, news: News) -> None:
        """See ``Listener``."""
        self._wake(self._take_news, news)

    def refuse(self, request_id: str, error: JaxinferError) -> None:
        """See ``Listener``."""
        self._wake(self._take_refusal, request_id, error)

    def pong(self) -> None:
        """See ``Listener``."""
        self._wake(self._take_pong)

    def _wake(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # when it is, its readers have left
                raise

    # in the loop

    def _take_news(self, news: News) -> None:
        self.stats = news.stats
        for key in news.started:
            if (stream := self._streams.get(key)) is not None:
                stream.started = True
                self._leave_queue(stream)
                self._num_started += stream.n
        for delta in news.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)
                if stream.started and delta.finish_reason is not None:
                    self._num_started -= 1  # its slot is free, whenever its reader comes
        if self.observe is not None:
            self.observe(news)

    def _take_refusal(self, key: str, error: JaxinferError) -> None:
        if (stream := self._streams.get(key)) is not None:
            stream.fail(error)

    def _take_pong(self) -> None:
        pongs, self._pongs = self._pongs, []
        for pong in pongs:
            if not pong.done():
                pong.set_result(None)

    def _leave_queue(self, stream: Stream) -> None:
        self._num_waiting -= 1
        self._num_waiting_tokens -= stream.num_prompt_tokens
