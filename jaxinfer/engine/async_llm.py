"""The streaming API: ``async for output in llm.generate(...)``, many requests at once.

Owns: ``AsyncLLM``, the bridge between one asyncio loop and the engine's thread.
Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.build import build_engine
from jaxinfer.engine.engine import Engine, EngineStats
from jaxinfer.engine.outputs import Collector, Delta, RequestOutput
from jaxinfer.engine.prompts import Prompt, parse_prompt
from jaxinfer.engine.thread import EngineThread
from jaxinfer.engine.vllm_args import engine_config


class AsyncLLM:
    """An engine for concurrent callers of one asyncio loop. Make it inside the loop.

    Leaving a generator early (``break``, cancellation, a closed connection) aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, asyncio.Queue[Delta | JaxinferError]] = {}
        self._requests = 0
        self._thread = EngineThread(engine, self._deliver, self._refuse)

    @classmethod
    async def create(
        cls, model: str | None = None, *, progress: Progress | None = None, **arguments: Any
    ) -> Self:
        """Build the engine (off the loop) and start it; arguments are those of ``LLM``."""
        config = engine_config(model, arguments)
        return cls(await asyncio.to_thread(build_engine, config, progress))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the growing answer to one prompt, once for each step that added to it.

        The same object is yielded each time; ``request_id`` is its label and may repeat. Raises
        ``RequestError`` for an invalid request and ``EngineError`` when the answer could not be
        completed.
        """
        parsed = parse_prompt(prompt, self.engine.tokenizer)
        collector = Collector(request_id or self._next_key(), parsed, sampling_params)
        deltas = self.stream(parsed, sampling_params, priority=priority, cache_salt=cache_salt)
        try:
            async for delta in deltas:
                collector.add(delta)
                yield collector.output
        finally:
            await deltas.aclose()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta]:
        """Yield what each step added, over all n completions; ends when the last one has."""
        self.engine.check(prompt.token_ids, sampling_params)
        key = self._next_key()
        stream = self._streams[key] = asyncio.Queue()
        unfinished = sampling_params.n
        try:
            self._thread.submit(
                key, prompt.token_ids, sampling_params, priority=priority, cache_salt=cache_salt
            )
            while unfinished:
                delta = await stream.get()
                if isinstance(delta, JaxinferError):
                    unfinished = 0
                    raise delta
                if delta.error:
                    raise EngineError(delta.error)
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[key]
            if unfinished:
                self._thread.abort(key)

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.alive

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self.engine.stats()

    async def shutdown(self) -> None:
        """End the engine's thread; open streams end with ``EngineError``."""
        await asyncio.to_thread(self._thread.stop)

    def _next_key(self) -> str:
        """A name that no other stream ever has, whatever ids users choose."""
        self._requests += 1
        return f"async-{self._requests}"

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """On the engine's thread: one wake of the loop for all deltas of a step."""
        self._wake(self._distribute, deltas)

    def _refuse(self, request_id: str, error: JaxinferError) -> None:
        self._wake(self._put, request_id, error)

    def _wake(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # when it is, its readers have left
                raise

    def _distribute(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._put(delta.request_id, delta)

    def _put(self, request_id: str, item: Delta | JaxinferError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # else its reader has left
            stream.put_nowait(item)
