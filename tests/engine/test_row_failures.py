"""An error of one row ends only its request; the other requests draw the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import FinishReason, RequestSpec, SamplingParams
from jaxinfer.core.step import PageGroup, StepPlan
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.processor import SequenceProcessor
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.exec.calls import admit as admission_call
from jaxinfer.exec.run import executor as executor_module
from jaxinfer.exec.run import in_flight
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.slots import settings_of
from kit.engines import engine_of, tiny_executor, tiny_limits
from kit.tiny_models import tiny_model

LIMITS = tiny_limits(max_num_seqs=4)
PROMPTS = {"a": (72, 105, 33), "b": (9, 8, 7, 6), "c": (40, 41, 42, 43, 44), "d": (77,) * 9}
PLAIN = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
BAD_SEED = 666  # marks the request that fails
SAMPLING = {
    "plain": PLAIN,
    "logprobs": replace(PLAIN, logprobs=2),
    "penalty": replace(PLAIN, presence_penalty=1.0),
    "prompt_logprobs": replace(PLAIN, prompt_logprobs=1),
}


def answered(
    engine: Engine, sampling: dict[str, SamplingParams], late: Sequence[str] = ()
) -> dict[str, list[Delta]]:
    """The deltas of each request; ``late`` requests arrive while the others decode."""
    deltas: dict[str, list[Delta]] = {name: [] for name in sampling}
    for name, one in sampling.items():
        if name not in late:
            engine.add_request(name, RequestSpec(PROMPTS[name], one))
    for iteration in range(60):
        if iteration == 3:
            for name in late:
                engine.add_request(name, RequestSpec(PROMPTS[name], sampling[name]))
        if engine.has_work:
            for delta in engine.step().deltas:
                deltas[delta.request_id].append(delta)
    assert not engine.has_work
    return deltas


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def check_others(
    found: dict[str, list[Delta]], expected: dict[str, list[Delta]], failed: str, message: str
) -> None:
    last = found[failed][-1]
    assert last.finish_reason is FinishReason.ERROR and message in last.error
    for name in PROMPTS:
        if name != failed:
            assert tokens(found[name]) == tokens(expected[name])
            assert found[name][-1].finish_reason is FinishReason.LENGTH


def failing(function: Callable[..., Any], is_bad: Callable[..., bool]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if is_bad(*arguments):
            raise ValueError("injected")
        return function(*arguments, **named)

    return call


FAULTS = {
    "settings": (
        executor_module,
        "settings_of",
        settings_of,
        lambda some, *_: any(r.seed == BAD_SEED for r in some),
    ),
    "admission": (
        admission_call,
        "slot_rows",
        admission_call.slot_rows,
        lambda some, *_: any(a.request.seed == BAD_SEED for a in some),
    ),
    "logprobs": (
        in_flight,
        "_token_logprobs",
        in_flight._token_logprobs,
        lambda _, index, token_id, top, *named: top == 3,
    ),
}


@pytest.mark.parametrize("when", ["together", "late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_a_row_on_the_host(
    fault: str, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {
        "settings": PLAIN,
        "admission": replace(PLAIN, presence_penalty=1.0),
        "logprobs": replace(PLAIN, logprobs=3),
    }[fault]
    sampling = dict(zip(PROMPTS, SAMPLING.values(), strict=True)) | {
        "c": replace(bad, seed=BAD_SEED)
    }
    late = ("c",) if when == "late" else ()
    expected = answered(engine_of(tiny_executor(LIMITS), LIMITS), sampling, late)
    engine = engine_of(tiny_executor(LIMITS), LIMITS)
    module, name, function, is_bad = FAULTS[fault]
    monkeypatch.setattr(module, name, failing(function, is_bad))
    found = answered(engine, sampling, late)
    check_others(found, expected, "c", "injected")
    assert "injected" in caplog.text, "the log has the traceback"
    monkeypatch.undo()
    again = answered(engine, sampling, late)
    assert {n: tokens(d) for n, d in again.items()} == {n: tokens(d) for n, d in expected.items()}


def test_an_error_in_detokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = dict(zip(PROMPTS, SAMPLING.values(), strict=True))
    engine = engine_of(tiny_executor(LIMITS), LIMITS)
    expected = answered(engine, sampling)
    process = SequenceProcessor.process

    def fails(self: SequenceProcessor, event: Any, *others: Any) -> Delta:
        if self.parent_id == "b" and event.token_ids:
            raise ValueError("injected")
        return process(self, event, *others)

    monkeypatch.setattr(SequenceProcessor, "process", fails)
    check_others(answered(engine, sampling), expected, "b", "injected")
    assert engine.stats().num_live_pages == 0


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite(kind: str, value: float) -> None:
    """A prompt has a token whose embedding is damaged; its freed pages are reused at once."""
    model, params = tiny_model("mistral")  # its head is not tied to the embedding
    damaged = {**params, "embed": params["embed"].at[77].set(value)}
    limits = tiny_limits(
        max_num_seqs=4, num_pages=20, enable_prefix_caching=False, groups=(PageGroup(7),)
    )
    executor = tiny_executor(limits, "mistral")
    undamaged = engine_of(executor, limits)
    sampling = {name: PLAIN for name in PROMPTS} | {"d": SAMPLING[kind]}
    expected = answered(undamaged, sampling)
    executor.replace_weights(damaged)
    for _ in range(3):
        found = answered(engine_of(executor, limits), sampling)
        check_others(found, expected, "d", "not finite")
        assert not tokens(found["d"])


def test_a_failed_call_that_did_not_take_the_state_fails_only_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(tiny_executor(LIMITS), LIMITS)
    launched = Executor._launch_prepared

    def fails(self: Executor, prepared: Any, failed: Any) -> Any:
        if any(row.request_id == "0" for row in prepared.plan.rows):
            raise ValueError("injected")
        return launched(self, prepared, failed)

    monkeypatch.setattr(Executor, "_launch_prepared", fails)
    found = answered(engine, {"a": PLAIN, "b": PLAIN}, late=("b",))
    assert "injected" in found["a"][-1].error and len(tokens(found["b"])) == 6


def test_a_failed_call_that_took_the_state_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(tiny_executor(LIMITS), LIMITS)

    def fails(self: Executor, prepared: Any, failed: Any) -> Any:
        del prepared, failed
        self._arrays.slots.token_ids.delete()
        raise ValueError("injected")

    monkeypatch.setattr(Executor, "_launch_prepared", fails)
    engine.add_request("a", RequestSpec(PROMPTS["a"], PLAIN))
    with pytest.raises(EngineError, match="the device failed in step 0: injected"):
        engine.step()


def test_the_reported_bucket_is_the_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all kinds of sampling: ``padding_waste_ratio`` is computed from these."""
    engine = engine_of(tiny_executor(LIMITS), LIMITS)
    ran: list[int] = []
    launched = Executor._launch_prepared

    def noted(self: Executor, prepared: Any, failed: Any) -> Any:
        step = launched(self, prepared, failed)
        ran.append(step.token_ids.size)
        return step

    monkeypatch.setattr(Executor, "_launch_prepared", noted)
    plans: list[StepPlan] = []
    launch = Executor.launch
    monkeypatch.setattr(Executor, "launch", lambda self, p: plans.append(p) or launch(self, p))
    reported: list[int] = []
    for name, sampling in zip(PROMPTS, SAMPLING.values(), strict=True):
        engine.add_request(name, RequestSpec(PROMPTS[name], sampling))
    while engine.has_work:
        reported += [step.num_bucket_tokens for step in engine.step().steps]
    assert ran == [plan.bucket.num_seqs for plan in plans]
    assert reported == [plan.bucket.num_tokens for plan in plans]
