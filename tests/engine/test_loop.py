"""The loop with a simulated executor: overlap, failures, late compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.core.errors import EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, RequestSpec, SamplingParams
from jaxinfer.core.step import Abort, Arrive, StepPlan, StepResult, TokenEvent
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.link.wire import Failed, Stop, Submission
from jaxinfer.engine.loop import engine as engine_module
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.late_compiles import LateCompiles
from jaxinfer.engine.loop.loop import EngineLoop
from jaxinfer.engine.loop.timeline import Timeline
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.news import EngineStats
from kit.drive import make_limits, make_request
from kit.fake_executor import VOCAB, FakeExecutor, expected_tokens
from kit.recorded import Run


class Scripted:
    """A fake device: runs at launch, can fail at launch or collect, counts steps in flight."""

    def __init__(self, page_size: int, fail_launch: int = -1, fail_collect: int = -1) -> None:
        self.fake = FakeExecutor(page_size)
        self.fail_launch, self.fail_collect = fail_launch, fail_collect
        self.in_flight = self.deepest = 0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        if plan.step_id == self.fail_launch:
            raise RuntimeError("no launch")
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        return plan, self.fake.run(plan)

    def forget(self, request_ids: Sequence[str]) -> None:
        pass

    def collect(self, step: tuple[StepPlan, StepResult]) -> StepResult:
        self.in_flight -= 1
        if step[0].step_id == self.fail_collect:
            raise RuntimeError("no answer")
        return step[1]


def drain(loop: EngineLoop, *events: Arrive | Abort) -> list[TokenEvent]:
    news = list(loop.iterate(tuple(events)).events)
    while not loop.idle:
        news += loop.iterate(()).events
    return news


def generated(news: list[TokenEvent], request_id: str) -> list[int]:
    return [t for event in news if event.request_id == request_id for t in event.token_ids]


def test_two_steps_are_in_flight_with_overlap_and_one_without() -> None:
    for overlap, depth in ((True, 2), (False, 1)):
        limits = make_limits()
        executor = Scripted(limits.page_size)
        loop = EngineLoop(executor, limits, overlap=overlap)
        request = make_request("a", range(1, 8), max_tokens=9)
        news = drain(loop, Arrive(request))
        assert generated(news, "a") == expected_tokens(request, limits.max_model_len)
        assert executor.deepest == depth


@pytest.mark.parametrize(
    ("changes", "finish"),
    [({"max_tokens": 2}, None), ({"eos_token_ids": range(VOCAB)}, FinishReason.STOP)],
    ids=["its last step is in flight", "it ended, and a stale step is in flight"],
)
def test_events_are_returned_without_waiting_for_the_next_step(
    changes: dict[str, Any], finish: FinishReason | None
) -> None:
    limits = make_limits()
    executor = Scripted(limits.page_size)
    loop = EngineLoop(executor, limits)
    loop.iterate((Arrive(make_request("a", [1, 2], **changes)),))
    loop.iterate(())
    assert executor.in_flight == 2
    (event,) = loop.iterate(()).events
    assert len(event.token_ids) == 1 and event.finish_reason is finish
    assert executor.in_flight == 1
    assert len(drain(loop)) == (finish is None)


def test_a_failed_step_ends_only_its_requests() -> None:
    for where in ("fail_launch", "fail_collect"):
        limits = make_limits()
        executor = Scripted(limits.page_size, **{where: 3})
        loop = EngineLoop(executor, limits)
        news = drain(loop, Arrive(make_request("a", range(1, 8), max_tokens=50)))
        assert news[-1].finish_reason is FinishReason.ERROR
        assert "step 3 failed" in news[-1].error
        assert loop.state.num_free_pages == limits.num_usable_pages
        executor.fail_launch = executor.fail_collect = -1
        other = make_request("b", range(2, 9), max_tokens=5)
        news = drain(loop, Arrive(other))
        assert generated(news, "b") == expected_tokens(other, limits.max_model_len)


def test_a_lost_device_is_an_engine_error() -> None:
    limits = make_limits()
    executor = Scripted(limits.page_size)

    def lost(plan: StepPlan) -> NoReturn:
        raise EngineError("the device failed")

    executor.launch = lost  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the device failed"):
        EngineLoop(executor, limits).iterate((Arrive(make_request("a", [1, 2], max_tokens=5)),))


def test_many_failing_launches_do_not_recurse() -> None:
    limits = make_limits(max_num_seqs=1)
    executor = Scripted(limits.page_size)

    def failing(plan: StepPlan) -> NoReturn:
        raise ValueError("cannot pack")

    executor.launch = failing  # type: ignore[method-assign]
    loop = EngineLoop(executor, limits)
    arrivals = tuple(
        Arrive(make_request(f"r{i}", [1, 2], max_tokens=5, arrival=i)) for i in range(2000)
    )
    news = loop.iterate(arrivals).events
    assert len(news) == 2000 and loop.idle


def test_late_compiles_are_counted_only_inside_the_block() -> None:
    watch = LateCompiles()
    jax.jit(lambda x: x * 3)(jnp.ones(5))
    with watch:
        jax.jit(lambda x: x * 5)(jnp.ones(5))
    jax.jit(lambda x: x * 7)(jnp.ones(5))
    assert watch.count >= 1
    before = watch.count
    with watch:
        pass
    assert watch.count == before


def test_a_request_that_arrives_during_a_step_joins_the_next_launch() -> None:
    limits = make_limits()
    loop = EngineLoop(Scripted(limits.page_size), limits)
    loop.iterate((Arrive(make_request("a", range(1, 8), max_tokens=50)),))
    loop.iterate(())  # two are in flight
    loop.wait_until_launchable()
    loop.wait_until_launchable()  # nothing more to wait for
    iteration = loop.iterate((Arrive(make_request("b", range(2, 9), max_tokens=5, arrival=1)),))
    assert [plan.step_id for plan in iteration.collected] == [0]
    assert [admission.request.request_id for admission in iteration.launched[0].admissions] == ["b"]
    assert not loop.idle


def engine_of(executor: Scripted, limits: Limits) -> Engine:
    facts = ModelFacts("scripted", 256, (), SamplingParams())
    engine = Engine(executor, limits, facts, None)
    engine.add_request("a", RequestSpec(range(1, 8), SamplingParams(max_tokens=20)))
    return engine


def test_compiles_while_the_engine_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # the real class in place of conftest's, which fails on a late compile
    monkeypatch.setattr(engine_module, "LateCompiles", LateCompiles)
    limits = make_limits()
    executor = Scripted(limits.page_size)
    collect = executor.collect

    def compiling(step: tuple[StepPlan, StepResult]) -> StepResult:
        jax.jit(lambda x: x + step[0].step_id)(1.0)
        return collect(step)

    executor.collect = compiling  # type: ignore[method-assign]
    engine = engine_of(executor, limits)
    steps = 0
    while engine.has_work:
        steps += len(engine.step().steps)
        engine.wait_until_launchable()
    assert engine.stats().num_late_compiles == steps


def test_a_device_lost_while_it_waits_stops_the_engine() -> None:
    limits = make_limits()
    executor = Scripted(limits.page_size)

    def lost(step: tuple[StepPlan, StepResult]) -> NoReturn:
        raise EngineError("the device failed")

    executor.collect = lost  # type: ignore[method-assign]
    engine = engine_of(executor, limits)
    for _ in range(2):
        engine.step()
    with pytest.raises(EngineError, match="the device failed"):
        engine.wait_until_launchable()
    assert not engine.has_work
    with pytest.raises(EngineError, match="build a new one"):
        engine.add_request("b", RequestSpec([1], SamplingParams()))


class WaitingEngine:
    """Records its calls; a request is submitted while it waits for the device."""

    limits = facts = tokenizer = None
    asleep = ()
    is_compiling = saves_ahead = False
    stats = staticmethod(EngineStats)

    def load_others(self, deliver: object) -> None:
        """None are missing."""

    def __init__(self) -> None:
        self.thread = EngineThread(self)  # type: ignore[arg-type]
        self.calls: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.calls)

    def add_request(self, request_id: str, *_: object, **__: object) -> None:
        self.calls.append(request_id)

    def step(self) -> str:
        self.calls.append("step")
        return "news"

    def close(self) -> None:
        """Nothing is compiled."""

    def wait_until_launchable(self) -> None:
        first = "wait" not in self.calls
        self.calls.append("wait")
        if first:
            self.thread.send(Submission("during", RequestSpec((1,), SamplingParams())))
        else:
            self.thread.send(Stop())


def test_the_thread_reads_commands_after_the_wait() -> None:
    engine = WaitingEngine()
    answers: list[object] = []
    engine.thread.send(Submission("first", RequestSpec((1,), SamplingParams())))
    engine.thread.connect(answers.append)
    engine.thread.wait()
    assert engine.calls == ["first", "step", "wait", "during", "step", "wait"]
    assert answers[:2] == ["news", "news"] and isinstance(answers[2], Failed)


@pytest.mark.parametrize("method", ["close", "step"])
def test_an_error_at_the_end_leaves_no_request_waiting(method: str) -> None:
    def fails() -> None:
        raise OSError("no space")

    engine = WaitingEngine()
    setattr(engine, method, fails)
    answers: list[object] = []
    engine.thread.send(Submission("first", RequestSpec((1,), SamplingParams())))
    engine.thread.connect(answers.append)
    engine.thread.wait()
    assert isinstance(answers[-1], Failed)
    assert method == "close" or "no space" in str(answers[-1].error)


def test_a_step_ends_when_it_is_collected() -> None:
    """The time of commands before the iteration that reports the step is not the step's."""
    now = [0.0]
    limits = make_limits()
    engine = engine_of(Scripted(limits.page_size), limits)
    engine._timeline = Timeline(lambda: now[0])  # type: ignore[attr-defined]
    engine._timeline.arrive(("0",))  # type: ignore[attr-defined]
    for _ in range(2):
        engine.step()
    now[0] = 5.0
    engine.wait_until_launchable()
    now[0] = 100.0
    assert [step.seconds for step in engine.step().steps] == [5.0]


def test_prompts_that_are_computed_whole_are_not_looked_up() -> None:
    """Their logprobs or activations are read, so they are no misses of the prefix cache."""
    run = Run()
    prompt = [*range(1, 14)]
    sampling = (SamplingParams(max_tokens=2, prompt_logprobs=0), SamplingParams(max_tokens=2))
    for number, one in enumerate(sampling):
        run.engine.add_request(str(number), RequestSpec(prompt, one))
        run.steps(8, 0)
        stats = run.engine.stats()
        assert (stats.num_prefilled_tokens, stats.num_looked_up_tokens) == (
            len(prompt) * (number + 1),
            len(prompt) * number,
        )
    assert stats.num_cached_tokens > 0
