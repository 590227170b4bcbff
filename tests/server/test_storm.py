"""A storm: random mixes of every sampling field over HTTP, 512 at once, and clients that leave.

The bucket tables are the real ones, and so are scheduler, engine thread and server; the device is
simulated. It checks that each step fits its bucket and that each row finds its own prefix in its
pages, and its tokens are a function of seed and context.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from bench.storm import (
    AT_ONCE,
    COMPLETIONS,
    SHARE_THAT_LEAVES,
    Body,
    Met,
    alone,
    any_body,
    storm,
    stream_of,
)
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import PageGroup
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.server.api.fields import UNSUPPORTED
from jaxinfer.server.openai.schema import CompletionRequest
from jaxinfer.text.tokenizer import load_tokenizer
from kit.default_limits import default_limits
from kit.drive import EOS
from kit.fake_executor import FakeDevice
from kit.invariants import check
from kit.server import SECONDS, Serving, serving
from kit.tokenizers import real_spec
from kit.watched_executor import WatchedExecutor

NEED_POINTS = {"taps", "steer"}  # of a server with --tap-points
NEUTRAL = {"best_of", "truncate_prompt_tokens", *UNSUPPORTED}  # of which no request can make use


@dataclass(frozen=True)
class Weather:
    """An engine, and what is sent to it: short prompts that decode for long, then anything."""

    platform: str
    num_pages: int
    num_random: int
    num_alone: int
    groups: tuple[PageGroup, ...] = (PageGroup(),)
    num_streams: int = 0
    stream_tokens: int = 32

    def bodies(self, ids: random.Random) -> list[Body]:
        """The bodies of all requests, in order."""
        streams = [stream_of(ids, self.stream_tokens) for _ in range(self.num_streams)]
        return streams + [any_body(ids) for _ in range(self.num_random)]


GPU = Weather("gpu", 30_000, num_random=250, num_alone=60, num_streams=460)
GPU_FOR_LONG = replace(GPU, num_random=2000, num_alone=500)
GPU_WINDOWS = Weather(
    "gpu", 2000, num_random=200, num_alone=30, groups=(PageGroup(), *[PageGroup(512)] * 2)
)
CPU_FEW_PAGES = Weather(
    *("cpu", 260),
    num_random=150,
    num_alone=30,
    groups=(PageGroup(), PageGroup(64)),
    num_streams=20,
    stream_tokens=300,
)


def all_at_once(
    server: Serving, executor: WatchedExecutor, bodies: list[Body], ids: random.Random
) -> Met:
    """A storm whose first step ends when the clients have sent their first requests."""
    enough = (1 - 2 * SHARE_THAT_LEAVES) * min(AT_ONCE, len(bodies))

    async def main() -> Met:
        with executor.held():
            storming = asyncio.create_task(storm(server.url, bodies, ids))
            async with asyncio.timeout(SECONDS):
                while server.service.client.num_open < enough:
                    await asyncio.sleep(0.01)
        return await storming

    return asyncio.run(main())


@pytest.mark.parametrize(
    "weather",
    [
        pytest.param(GPU, id="gpu"),
        pytest.param(GPU_FOR_LONG, id="gpu, for long", marks=pytest.mark.nightly),
        pytest.param(GPU_WINDOWS, id="gpu, windows", marks=pytest.mark.nightly),
        pytest.param(CPU_FEW_PAGES, id="cpu, few pages"),
    ],
)
def test_a_storm(weather: Weather) -> None:
    limits = default_limits(weather.platform, num_pages=weather.num_pages, groups=weather.groups)
    tokenizer = load_tokenizer(real_spec("smollm2"))
    facts = ModelFacts("fake", tokenizer.vocab_size, (EOS,), SamplingParams())
    executor = WatchedExecutor(FakeDevice(limits))
    engine = Engine(executor, limits, facts, tokenizer)
    ids = random.Random(0)
    bodies = weather.bodies(ids)
    with serving(engine) as server:
        met = all_at_once(server, executor, bodies, ids)
        assert set(met.ended) == {"answered", "left"}
        assert met.ended.total() == len(bodies)
        server.wait_until_idle()
        stats = engine.stats()
        assert not (stats.num_running or stats.num_waiting or any(stats.num_live_pages_of_groups))
        check(engine._loop.state)
        assert stats.num_cached_tokens > 0
        assert stats.num_preemptions > 0 or weather is not CPU_FEW_PAGES
        most_rows = max(len(plan.rows) for plan in executor.plans)
        assert most_rows > 300 or not weather.num_streams > 300
        again = ids.sample(met.repeatable, weather.num_alone)
        assert asyncio.run(alone(server.url, again)) == {"same": weather.num_alone}
        server.wait_until_idle()


def test_a_storm_has_every_sampling_field() -> None:
    ids = random.Random(0)
    sent = {name for _ in range(200) for name in any_body(ids, masks=True)}
    fields = set(SamplingParams.__struct_fields__) & set(CompletionRequest.__struct_fields__)
    assert fields - NEUTRAL - NEED_POINTS <= sent


def test_another_token_is_a_difference_unless_it_is_near(server: Serving) -> None:
    """With a real model, as the simulated device knows no logits."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}

    def found(tokens: list[int], near_tie: float) -> dict[str, int]:
        return asyncio.run(alone(server.url, [(body, {0: tokens})], near_tie))

    drawn: list[int] = server.post(COMPLETIONS, **body).json()["choices"][0]["token_ids"]
    other = [(drawn[0] + 1) % 250, *drawn[1:]]
    assert found(drawn, 0.0) == {"same": 1}
    assert found(other, 1e-6) == {"different": 1}
    assert found(other, 100.0) == {"near ties": 1}
    assert found(drawn[:3], 100.0) == {"different": 1}
