"""Until the steps in which rows decode beside prompts are there, the two take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import CacheError
from jaxinfer.core.later import Later
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import StepPlan
from jaxinfer.engine.engine import Engine
from jaxinfer.exec.executor import Executor
from kit.engines import engine_of, run, tiny_executor, tiny_limits, tokens

LIMITS = tiny_limits(max_num_batched_tokens=16)
BATCH = msgspec.structs.replace(LIMITS, prefill_first=True)
PROMPTS = [tuple(range(5 + i, 25 + 2 * i)) for i in range(3)]
LONG = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """What is launched."""
    launched: list[StepPlan] = []
    launch = Executor.launch

    def noted(self: Executor, plan: StepPlan) -> object:
        launched.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(Executor, "launch", noted)
    return launched


def engine_with(make: Callable[[], object], limits: Limits = LIMITS) -> tuple[Engine, Later]:
    mixed = Later(make)
    return engine_of(tiny_executor(limits), limits, mixed=mixed), mixed


def mixes(plans: list[StepPlan]) -> bool:
    return any(plan.bucket.is_mixed for plan in plans)


def test_the_same_tokens_before_and_after(plans: list[StepPlan]) -> None:
    may_be = threading.Event()
    engine, mixed = engine_with(lambda: may_be.wait(30))
    turns = run(engine, PROMPTS, LONG)
    kinds = [bool(plan.prefills) for plan in plans]
    first = kinds.index(False)
    assert not mixes(plans) and any(kinds[first:]), "a prompt comes after rows that decode"
    assert not any(a and b for a, b in zip(kinds[first:], kinds[first + 1 :], strict=False))
    may_be.set()
    mixed.result()
    together = run(engine, PROMPTS, LONG)
    assert mixes(plans) and tokens(together) == tokens(turns)


def test_what_follows_background_work_comes_after_it_or_at_once() -> None:
    may_be, followed = threading.Event(), threading.Event()
    engine, mixed = engine_with(lambda: may_be.wait(30))
    engine.after_background_work(followed.set)
    assert not followed.wait(0.02)
    may_be.set()
    mixed.result()
    assert followed.wait(10)
    batch, _ = engine_with(may_be.wait, BATCH)  # begins nothing by itself
    for quiet in (engine, batch, engine_of(tiny_executor(LIMITS), LIMITS)):
        followed.clear()
        quiet.after_background_work(followed.set)
        assert followed.is_set()


def test_a_batch_whose_prompts_come_first_never_asks_for_them(plans: list[StepPlan]) -> None:
    asked = threading.Event()
    engine, _ = engine_with(asked.set, BATCH)
    run(engine, PROMPTS, LONG)
    assert not asked.is_set() and not mixes(plans)


def test_one_that_does_not_fit_asks_for_them(plans: list[StepPlan]) -> None:
    asked = threading.Event()
    engine, mixed = engine_with(asked.set, BATCH)
    run(engine, [*PROMPTS, *PROMPTS], LONG)
    assert asked.wait(10)
    mixed.result()
    run(engine, [*PROMPTS, *PROMPTS], LONG)
    assert mixes(plans)


def test_what_keeps_them_from_being_there_is_logged_and_turns_go_on(
    plans: list[StepPlan], caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> None:
        raise CacheError("no room on the disk")

    engine, mixed = engine_with(make)
    with pytest.raises(CacheError):
        mixed.result()
    assert "keep taking turns, which is slower: no room on the disk" in caplog.text
    run(engine, PROMPTS, LONG)
    assert not mixes(plans)
