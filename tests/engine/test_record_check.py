"""Recordings whose steps run again: equal tokens, and a fault is named by step and array."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, cast

import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import jaxinfer
from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.cli.main import cli
from jaxinfer.cli.replay import rows_of
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import SourceError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.step import (
    Bucket,
    Pages,
    RowResult,
    ScheduledSeq,
    StepDone,
    StepPlan,
    StepResult,
)
from jaxinfer.core.tiers import NO_ORDERS, CostModel, Loaded, TierOrders, TierUnit
from jaxinfer.engine.api.vllm_args import RENAMED
from jaxinfer.engine.record.check import Check
from jaxinfer.engine.record.codec import Call, Note
from jaxinfer.engine.record.file import FileReader, FileWriter, older
from jaxinfer.engine.record.recorder import Recorder
from jaxinfer.engine.record.replay import Report
from jaxinfer.engine.start import tiers
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.observers import header_of
from jaxinfer.exec.run.executor import Executor
from jaxinfer.sched.schedule import ScheduleOutput, initial_state
from kit.drive import make_limits
from kit.recorded import Run
from kit.served_weights import write_tiny_model

PROMPT = list(range(3, 30))


def record(path: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Requests of several kinds, with a change of weights and a sleep between them."""
    llm = LLM(str(folder), **settings, record=str(path), record_digests=True, seed=5)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    kinds = [
        free,
        SamplingParams(max_tokens=9, temperature=0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=9, structured_outputs={"regex": "[ab]{4,9}"}),
        SamplingParams(max_tokens=9, repetition_penalty=1.3, seed=7, n=2),
    ]
    prompts = [{"prompt_token_ids": PROMPT[: 9 + 3 * i]} for i in range(len(kinds))]
    llm.generate(prompts, kinds, use_tqdm=False)
    llm.update_weights(str(folder))
    llm.generate(prompts, kinds, use_tqdm=False)
    llm.sleep()
    llm.wake_up()
    llm.generate(prompts[:2], free, use_tqdm=False)
    llm._engine.close()


def checked(path: Path, settings: dict[str, Any], *arguments: str) -> Any:
    given = ["--check", "--cache-dir", settings["cache_dir"], *arguments]
    return CliRunner().invoke(cli, ["replay", str(path), *given])


def test_a_recording_is_checked_row_by_row(
    tmp_path: Path, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rec"
    record(path, folder, settings)
    result = checked(path, settings)
    assert result.exit_code == 0, result.output
    assert "every plan is equal" in result.stdout and ", all equal" in result.stdout
    assert "note:" not in result.stderr and "were not" not in result.stdout

    some = checked(path, settings, "--until", "7")
    assert some.exit_code == 0 and ", all equal" in some.stdout
    assert "steps up to step 8" in some.stdout or "steps up to step 9" in some.stdout

    # a page of the second layer is damaged before a step
    launch, damaged = Executor.launch, []

    def damaging(self: Executor, plan: StepPlan) -> Any:
        if plan.step_id == 6:
            page = plan.decodes[0].pages[0].ids[0]
            state = [*self._arrays.state]
            state[2] = state[2].at[page].set(jnp.float32(30.0))
            self._arrays.state = tuple(state)
            damaged.append(page)
        return launch(self, plan)

    monkeypatch.setattr(Executor, "launch", damaging)
    result = checked(path, settings)
    assert result.exit_code == 3 and len(damaged) == 1
    assert "step 6: request" in result.stdout, result.stdout
    assert f"layers.1.k deviates in page {damaged[0]}, tokens 0 to 7" in result.stdout


def test_recordings_that_cannot_be_checked_are_errors_of_one_sentence(
    tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    """Of another device, model or engine, or with redacted tokens."""
    path, changed = tmp_path / "rec", tmp_path / "changed"
    config = EngineConfig(model=str(folder), **engine_settings(settings))
    plan = plan_engine(config)
    header = header_of(plan)
    recorder = Recorder(path, 1 << 20, header)
    Run(header.limits, recorder).steps(3)
    recorder.close()
    model = header.model_fields
    for changes, words in (
        ({"machine": header.machine | {"device": "gpu NVIDIA H100"}}, "the device gpu NVIDIA H100"),
        ({"model_fields": model | {"num_heads": "7"}}, "differs from it in num_heads"),
        ({"is_redacted": True}, "has no tokens"),
        ({"limits": replace(header.limits, max_num_batched_tokens=8)}, "max_num_batched_tokens"),
    ):
        writer = FileWriter(changed, replace(header, **changes))
        for body in FileReader(path).bodies():
            writer.add(bytes(body))
        writer.close()
        result = checked(changed, settings)
        assert result.exit_code == 1 and words in result.stderr, result.output
        assert result.stderr.splitlines()[-1].startswith("jaxinfer: error: the record")


def test_rows_after_weights_that_are_not_there_are_not_compared() -> None:
    def missing(reference: str) -> None:
        raise SourceError(f"{reference} is missing")

    for text, words in (("", "as a tree, which is not in"), ("x", "cannot be loaded here (x is")):
        check = Check(cast("Any", None), cast("Any", None), missing)
        check.note(Note(3, "weights", text))
        assert words in check.blind
        report = Report(cast("Any", None), num_calls=1)
        assert rows_of(check, report)[-1].startswith("no later row was compared: before call 3")


def test_steps_are_collected_before_a_copy_is_waited_for() -> None:
    """The copy follows them on the device, and they may wait for masks, which their predecessors'
    tokens make.
    """
    in_flight = list[int]()

    class Runner:
        def launch(self, plan: StepPlan) -> StepPlan:
            in_flight.append(plan.step_id)
            return plan

        def collect(self, step: StepPlan) -> StepResult:
            assert in_flight.pop(0) == step.step_id
            rows = [RowResult(row.request_id, row.epoch, (step.step_id,)) for row in step.rows]
            return StepResult(step.step_id, tuple(rows))

        def forget(self, request_ids: object) -> None:
            pass

    class Copies:
        def obey(self, orders: TierOrders, is_known: object) -> list[TierUnit]:
            assert not (orders.saves and in_flight)
            return []

        def loaded(self, ticket: int, *, failed: bool) -> None:
            assert not in_flight

    state = initial_state(make_limits(num_pages=17))
    check = Check(Runner(), cast("Any", None), cast("Any", None), restores=cast("Any", Copies()))
    check.begin(state)
    pages = (Pages(IntLog([3])),)
    unit, call = TierUnit(bytes(16), 5), Call(0, (), None, {})
    for number, orders in enumerate((NO_ORDERS, NO_ORDERS, TierOrders(saves=(unit,)))):
        plan = StepPlan(number, Bucket(1), (), (ScheduledSeq("r", 0, 0, number, 1, pages),), ())
        assert check.planned(call, ScheduleOutput(plan, (), orders=orders)) is None
    assert in_flight == [2]  # launched after the copy
    results = [StepResult(i, (RowResult("r", 0, (i,)),)) for i in (0, 1, 7)]
    results[2] = replace(results[2], step_id=2)
    events = Loaded(1), *(StepDone(one) for one in results)
    difference = check.events(Call(1, events, None, {}), state)
    assert difference is not None and difference.step_id == 2
    assert "drew token 7 at position 3 in the recording and token 2 here" in difference.text
    assert check.counts.compared == 3


def engine_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in settings.items()}


@pytest.mark.parametrize("kind", ["whole", "ring", "tiers"])
def test_500_mixed_requests_are_replayed_in_another_process(
    tmp_path: Path,
    folder: Path,
    settings: dict[str, Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preemptions, aborts, priorities, new weights in the middle of answers, and sleep. A ring that
    has lost its beginning is checked where pages were computed after it. With tiers preempted
    requests are saved and restored, and so are prefixes, whatever the machine's speed.
    """
    restores = CostModel(token_seconds=1.0)
    monkeypatch.setattr(tiers, "fitted_costs", lambda executor, mover: restores)
    is_whole = kind != "ring"
    size = (64 if is_whole else 1) << 20
    path, other = tmp_path / "rec", write_tiny_model(tmp_path / "other", seed=1)
    given = settings | {"max_num_seqs": 6, "max_num_batched_tokens": 32, "num_pages": 24}
    if kind == "tiers":
        given |= {"kv_offloading_size": 0.001, "preemption": "offload"}
    counts = asyncio.run(
        mixed(given | {"record": str(path), "record_size": size}, folder, other, 500)
    )
    assert counts["preempted"] > 20 and counts["aborted"] > 20 and counts["answered"] > 300, counts
    assert (counts["restored"] > 20) == (kind == "tiers"), counts

    if not is_whole:
        older(path).unlink()
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxinfer.__file__).parents[1])}
    command = [sys.executable, "-m", "jaxinfer", "replay", str(path)]
    for extra in ([], ["--check", "--cache-dir", settings["cache_dir"]]):
        done = subprocess.run(
            [*command, *extra], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "every plan is equal" in done.stdout
    assert ", all equal" in done.stdout and "no later row" not in done.stdout
    words = done.stdout.split()
    compared = int(words[words.index("compared,") - 5])
    assert compared > (3000 if is_whole else 500)
    assert ("were not" in done.stdout) != is_whole
    assert ("from call 0 on" in done.stdout) == is_whole


async def mixed(
    settings: dict[str, Any], folder: Path, other: Path, num_requests: int
) -> dict[str, int]:
    """Run requests of random kinds; returns how many were answered, aborted and preempted."""
    llm = await AsyncLLM.create(str(folder), **settings, record_digests=True)
    random, counts = Random(7), Counter[str]()

    async def request(number: int) -> None:
        length = random.randrange(1, 40)
        sampling = SamplingParams(
            max_tokens=random.randrange(1, 24),
            temperature=random.choice([0.0, 0.7, 1.5]),
            top_k=random.choice([0, 5]),
            seed=random.choice([None, number]),
            ignore_eos=random.random() < 0.5,
            logprobs=random.choice([None, None, 2]),
            presence_penalty=random.choice([0.0, 0.0, 0.5]),
            allowed_token_ids=random.choice([None, None, None, [5, 9, 11, 40]]),
            n=random.choice([1, 1, 1, 2]),
        )
        prompt = [
            *PROMPT[: length // 2],
            *(random.randrange(3, 200) for _ in range(length // 2 + 1)),
        ]
        stops = random.random() < 0.1
        stream = llm.generate(prompt, sampling, priority=random.choice([0, 0, 1]))
        try:
            async for _ in stream:
                if stops:
                    break
            counts["aborted" if stops else "answered"] += 1
        finally:
            await stream.aclose()

    open_ones: list[asyncio.Task[None]] = []
    for number in range(num_requests):
        open_ones.append(asyncio.create_task(request(number)))
        if number == num_requests // 3:
            await llm.update_weights(str(other), mode="keep")
        if number == num_requests // 2:
            await llm.sleep(mode="keep")
            await llm.wake_up()
        while sum(not one.done() for one in open_ones) > 25:  # as many on any machine
            await asyncio.sleep(0.001)
    await asyncio.gather(*open_ones)
    stats = llm.engine.stats()
    counts["preempted"] = stats.num_preemptions
    counts["restored"] = 0 if stats.tiers is None else stats.tiers.num_restored
    await llm.shutdown()
    return counts
