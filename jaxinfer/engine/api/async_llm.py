"""The streaming API: ``async for output in llm.generate(...)``, many requests at once.

``AsyncLLM`` runs the engine on a thread of this process, for the coroutines of one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.news import EngineStats
from jaxinfer.engine.outputs import Collector, Delta, RequestOutput
from jaxinfer.engine.prompts import Prompt, parse_prompt
from jaxinfer.engine.start.start import start_engine

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine


class AsyncLLM:
    """An engine for concurrent coroutines of one asyncio loop. Create it inside the loop.

    Leaving a generator early (``break``, cancellation, a closed connection) aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.client = EngineClient(EngineThread(engine))
        self._numbers = count(1)

    @classmethod
    async def create(
        cls, model: str | None = None, *, progress: Progress = NO_PROGRESS, **arguments: Any
    ) -> Self:
        """Build the engine on another thread and start it; arguments are those of ``LLM``."""
        config = engine_config(model, arguments)
        return cls(await asyncio.to_thread(start_engine, config, progress))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the growing answer to one prompt after each step that added to it.

        The same object is yielded each time; ``request_id`` is its label and need not be unique.
        Raises ``RequestError`` for an invalid request and ``EngineError`` if the answer could not
        be completed.
        """
        parsed = parse_prompt(prompt, self.engine.tokenizer)
        label = request_id or f"async-{next(self._numbers)}"
        collector = Collector(label, parsed, sampling_params)
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
        """Yield the deltas of each step for all n completions, until the last one has ended."""
        stream = self.client.open(
            prompt.token_ids, sampling_params, priority=priority, cache_salt=cache_salt
        )
        try:
            while deltas := await stream.read():
                for delta in deltas:
                    yield delta
        finally:
            stream.close()

    @property
    def alive(self) -> bool:
        """True if requests are still answered."""
        return self.client.alive

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self.engine.stats()

    async def shutdown(self) -> None:
        """End the engine's thread; open streams end with ``EngineError``."""
        await self.client.shutdown()
