"""A storm on a CPU for minutes: SmolLM2 by the default server, as many clients as wait in line."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from bench.storm import Body, alone, any_body, left_over, storm
from jaxinfer.bench.server_process import ServerProcess

STORM_SECONDS = 600
AT_ONCE = 64  # 16 run, the others wait
NUM_ALONE = 200
NEAR_TIE = 1e-3  # of float32 logits; another batch changes them by some 1e-5


def bodies_for(seconds: float, ids: random.Random) -> Iterator[Body]:
    """Random requests until the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield any_body(ids, masks=True)


@pytest.mark.nightly
def test_a_storm_of_minutes() -> None:
    ids = random.Random(0)
    with ServerProcess() as server:
        met = asyncio.run(storm(server.url, bodies_for(STORM_SECONDS, ids), ids, AT_ONCE))
        assert set(met.ended) == {"answered", "left"}
        assert not any(asyncio.run(left_over(server.url)).values())
        again = ids.sample(met.repeatable, min(NUM_ALONE, len(met.repeatable)))
        found = asyncio.run(alone(server.url, again, NEAR_TIE))
        assert again and set(found) <= {"same", "near ties"}
        assert not any(asyncio.run(left_over(server.url)).values())
