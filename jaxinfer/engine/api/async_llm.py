"""The streaming API: ``async for output in llm.generate(...)``, many requests at once.

``AsyncLLM`` runs the engine on a thread of this process, for the coroutines of one asyncio loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.core.errors import ArgumentError
from jaxinfer.core.pooling import PoolingParams
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.api.pooling import pooled_prompts, pooling_output
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.link.wire import MODES, Mode
from jaxinfer.engine.loop.interfaces import reference_of
from jaxinfer.engine.loop.profiler import NUM_STEPS
from jaxinfer.engine.requests.news import EngineStats
from jaxinfer.engine.requests.outputs import Collector, Delta, RequestOutput
from jaxinfer.engine.requests.pooled import NO_SAMPLING, PoolingOutput, PoolingRequestOutput
from jaxinfer.engine.requests.prompts import Prompt, parse_prompt
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.engine.start.start import start_engine

if TYPE_CHECKING:
    from jaxinfer.engine.api.language_model import LanguageModel
    from jaxinfer.engine.loop.engine import Engine
    from jaxinfer.models.base import Params


class AsyncLLM:
    """An engine for concurrent coroutines of one asyncio loop. Create it inside the loop.

    Leaving a generator early (``break``, cancellation, a closed connection) aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._thread = EngineThread(engine)
        self.client = EngineClient(self._thread)
        self._numbers = count(1)

    @classmethod
    async def create(
        cls, model: str | None = None, *, progress: Progress | None = None, **arguments: Any
    ) -> Self:
        """Build the engine on another thread and start it; arguments are those of ``LLM``."""
        config = engine_config(model, arguments)
        return cls(
            await asyncio.to_thread(start_engine, config, progress or progress_on(sys.stderr))
        )

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
        collector = Collector(label, parsed, sampling_params, self.engine.limits.points)
        spec = _spec(parsed, sampling_params, priority, cache_salt)
        deltas = self.stream(spec)
        try:
            async for delta in deltas:
                collector.add(delta)
                yield collector.output
        finally:
            await deltas.aclose()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the vector of one prompt, once, as in vLLM; see ``LLM.encode`` for the errors."""
        engine, params = self.engine, pooling_params or PoolingParams()
        given = pooled_prompts(engine, [parse_prompt(prompt, engine.tokenizer)], [params])
        spec = _spec(given[0], NO_SAMPLING, priority, cache_salt, pools=True)
        stream = self.client.open(spec)
        try:
            while deltas := await stream.read():
                for delta in deltas:
                    label = request_id or f"async-{next(self._numbers)}"
                    yield pooling_output(engine, label, given[0], params, delta)
        finally:
            stream.close()

    async def stream(self, spec: RequestSpec) -> AsyncGenerator[Delta]:
        """Yield the deltas of each step for all n completions, until the last one has ended."""
        stream = self.client.open(spec)
        try:
            while deltas := await stream.read():
                for delta in deltas:
                    yield delta
        finally:
            stream.close()

    @property
    def model(self) -> LanguageModel:
        """The weights that are served now, as ``jaxinfer.load`` gives them, without a copy.

        It does not generate: this object does.
        """
        from jaxinfer.engine.api.language_model import model_of_engine  # imports JAX

        return model_of_engine(self.engine)

    async def update_weights(self, weights: Params | str | Path, *, mode: Mode = "wait") -> None:
        """Serve other weights of the same model, and forget all prefixes; see ``LLM``.

        The weights are checked and copied to the device while requests run. Open requests are then
        completed with the old weights, with ``mode="abort"`` ended with the finish reason "abort",
        or with ``mode="keep"`` continued with the new ones: their KV is computed again, so that
        every later token is drawn as if the new weights had read the whole text, and
        ``weight_versions`` of their outputs has a span for each. Requests that arrive in between
        wait, and get the new weights.
        """
        _check_mode(mode)
        prepared = await asyncio.to_thread(self.engine.weights.prepared, weights)
        change = partial(self.engine.replace_weights, prepared, reference_of(weights))
        await self._between_steps(change, mode)

    async def reset_prefix_cache(self, *, mode: Mode = "wait") -> bool:
        """Forget all prefixes; returns True. ``mode``: see ``update_weights``."""
        _check_mode(mode)
        await self._between_steps(self.engine.reset_prefix_cache, mode)
        return True

    async def set_steering(self, name: str, vector: Any) -> None:
        """Keep a steering vector that requests may name, or with None remove it; see ``LLM``."""
        await self.client.set_steering(name, vector)

    async def pause_generation(self, *, mode: Mode = "wait") -> None:
        """Complete or abort the open requests, then hold later ones until ``resume_generation``.

        With ``mode="keep"`` the open requests stop after the steps in flight, and go on after
        ``resume_generation``: with the KV that they had, unless the weights or the prefix cache
        have changed or the engine has slept; then it is computed again.
        """
        _check_mode(mode)
        await self.client.control("pause", mode=mode)

    async def resume_generation(self) -> None:
        """Start the requests that ``pause_generation`` has held."""
        await self.client.control("resume")

    async def is_paused(self) -> bool:
        """True between ``pause_generation`` and ``resume_generation``."""
        return (await self.client.control("report")).paused

    async def sleep(self, level: int = 1, *, mode: Mode = "abort") -> None:
        """Give the device's memory back until ``wake_up``; see ``LLM.sleep``.

        Open requests are aborted, completed before (``mode="wait"``) or continued after
        ``wake_up`` (``mode="keep"``, with their KV computed again). Later ones wait for it.
        """
        _check_mode(mode)
        await self.client.control("sleep", mode=mode, level=level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the device's memory again, and start the requests that wait; see ``LLM.wake_up``."""
        await self.client.control("wake_up", tags=None if tags is None else tuple(tags))

    async def is_sleeping(self) -> bool:
        """True until weights and KV cache are both on the device."""
        return bool((await self.client.control("report")).asleep)

    async def start_profile(self, folder: str | Path, num_steps: int = NUM_STEPS) -> None:
        """Trace the next steps into a new folder in ``folder``; see ``LLM.start_profile``."""
        await self.client.control("start_profile", path=str(folder), num_steps=num_steps)

    async def stop_profile(self) -> None:
        """End the trace and write the profile; no step runs while it is written."""
        await self.client.control("stop_profile")

    async def _between_steps(self, function: Callable[[], None], mode: Mode) -> None:
        await asyncio.wrap_future(self._thread.between_steps(function, mode))

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


def _spec(
    prompt: Prompt,
    sampling: SamplingParams,
    priority: int,
    cache_salt: str | None,
    *,
    pools: bool = False,
) -> RequestSpec:
    """A request; a salt of None is vLLM's "no salt"."""
    salt = "" if cache_salt is None else cache_salt
    return RequestSpec(prompt.token_ids, sampling, priority, salt, pools)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ArgumentError(f"mode must be 'wait', 'abort' or 'keep', got {mode!r}")
