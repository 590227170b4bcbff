"""Requests for extras wait until the steps that they need are there; others do not."""

from __future__ import annotations

import threading
import time

import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import CacheError
from jaxinfer.core.later import Later
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine import engine as engine_module
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Collector
from jaxinfer.engine.prompts import Prompt
from kit.engines import drain, engine_of, tiny_executor, tiny_limits

LIMITS = tiny_limits()
PROMPT = (72, 105, 33)
PLAIN = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
ASKING = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1, n=2)


@pytest.fixture
def made() -> threading.Event:
    """Extras are made when it is set."""
    return threading.Event()


@pytest.fixture
def engine(made: threading.Event) -> Engine:
    return engine_of(tiny_executor(LIMITS), LIMITS, extras=Later(lambda: made.wait(30)))


def added(engine: Engine, **requests: SamplingParams) -> dict[str, Collector]:
    for name, sampling in requests.items():
        engine.add_request(name, PROMPT, sampling)
    return {name: Collector(name, Prompt(None, PROMPT), one) for name, one in requests.items()}


def ended(engine: Engine, collectors: dict[str, Collector]) -> set[str]:
    """Who has ended after the turns that the engine has something to do in."""
    before = set(engine.open_request_ids)
    for _ in range(12):
        for delta in engine.step().deltas:
            collectors[delta.request_id].add(delta)
    return before - set(engine.open_request_ids)


def test_only_who_asks_for_extras_waits(engine: Engine, made: threading.Event) -> None:
    collectors = added(engine, first=ASKING, second=PLAIN)
    assert ended(engine, collectors) == {"second"} and engine.has_work
    assert engine.stats().num_waiting == ASKING.n
    collectors |= added(engine, third=PLAIN, fourth=ASKING)
    assert ended(engine, collectors) == {"third"} and engine.has_work
    made.set()
    drain(engine, collectors)
    texts = {name: collector.output.outputs[0] for name, collector in collectors.items()}
    assert len({tuple(text.token_ids) for text in texts.values()}) == 1
    assert [len(texts[name].logprobs or ()) for name in ("first", "second")] == [3, 0]
    collectors = added(engine, last=ASKING)
    assert ended(engine, collectors) == {"last"} and not engine.has_work


def test_in_a_batch_they_are_made_for_the_first_who_asks() -> None:
    begun = threading.Event()
    limits = replace(LIMITS, prefill_first=True)
    engine = engine_of(tiny_executor(limits), limits, extras=Later(begun.set))
    assert ended(engine, added(engine, first=PLAIN)) == {"first"} and not begun.is_set()
    added(engine, second=ASKING)
    assert begun.wait(10)


def test_who_is_aborted_meanwhile_never_begins(engine: Engine, made: threading.Event) -> None:
    collectors = added(engine, gone=ASKING, stays=ASKING)
    engine.abort("gone")
    assert not ended(engine, collectors)
    made.set()
    drain(engine, collectors)
    assert not collectors["gone"].output.outputs[0].token_ids
    assert len(collectors["stays"].output.outputs[1].token_ids) == 3


def test_who_has_waited_comes_before_what_is_newer(made: threading.Event) -> None:
    extras = Later(lambda: made.wait(30))
    engine = engine_of(tiny_executor(LIMITS), LIMITS, extras=extras)
    for name, sampling in (("waited", ASKING), ("newer", PLAIN)):
        engine.add_request(name, PROMPT, sampling)
        engine.abort(name)
    made.set()
    extras.result()
    assert [delta.request_id for delta in engine.step().deltas] == ["waited", "waited", "newer"]


def test_what_keeps_them_from_being_made_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        raise CacheError("no room on the disk")

    extras = Later(make)
    engine_of(tiny_executor(LIMITS), LIMITS, extras=extras)
    with pytest.raises(CacheError):
        extras.result()
    assert "logprobs, penalties, logit_bias and min_tokens will fail: no room" in caplog.text


def test_a_turn_without_other_work_waits_a_moment(
    engine: Engine, made: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer: a request that needs no extras may come meanwhile."""
    monkeypatch.setattr(engine_module, "HELD_SECONDS", 1.0)
    added(engine, first=ASKING)
    start = time.perf_counter()
    engine.step()
    assert 0.9 < time.perf_counter() - start < 20
    added(engine, second=PLAIN)
    start = time.perf_counter()
    engine.step()
    assert time.perf_counter() - start < 0.9
    made.set()
