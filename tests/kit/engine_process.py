"""Calls of an engine in a process of its own.

Owns: ``talk`` and ``answer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.requests.outputs import Collector, RequestOutput
from jaxinfer.engine.requests.prompts import Prompt

PROMPTS = [tuple(range(3 + i, 12 + i)) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

type Scenario = Callable[[EngineClient], Coroutine[Any, Any, None]]


def talk(link: EngineProcess, scenario: Scenario) -> None:
    """Run a scenario with a client, then end the engine."""

    async def main() -> None:
        client = EngineClient(link)
        try:
            await asyncio.wait_for(scenario(client), 60)
        finally:
            await client.shutdown()

    asyncio.run(main())


async def answer(
    client: EngineClient, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY
) -> RequestOutput:
    """The whole answer to a prompt."""
    stream = client.open(RequestSpec(prompt, sampling))
    collector = Collector("r", Prompt(None, prompt), sampling)
    try:
        while deltas := await stream.read():
            for delta in deltas:
                collector.add(delta)
    finally:
        stream.close()
    assert collector.output.finished
    return collector.output
