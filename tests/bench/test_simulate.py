"""The simulator: its clock, its costs, its router, and the engine beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from bench.simulator import MOST_POINTS, compared
from jaxinfer.bench.cluster import Cluster, Offered, Replica
from jaxinfer.bench.simulate import bound_of, hit_rate, offered, result_of, simulated
from jaxinfer.bench.step_costs import (
    LinearCosts,
    Work,
    costs_of_text,
    fitted,
    read_costs,
    work_of,
)
from jaxinfer.bench.traces import Arrival, most_reused, prompt_of
from jaxinfer.cli.main import cli
from jaxinfer.core.errors import BenchError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.step import Arrive, Bucket, RowResult, StepPlan, StepResult
from jaxinfer.engine.link.routing import LEAST_LOADED, PREFIX, ROUND_ROBIN, Router
from jaxinfer.engine.loop.loop import EngineLoop
from kit.drive import make_limits
from kit.engines import tiny_executor, tiny_limits

ROOT = Path(__file__).parents[2]
COSTS = LinearCosts(step=1.0, row=0.125, token=0.25)
GIVEN = {"seed": 0, "time_scale": 1.0, "max_input_len": None, "max_output_len": None}


def conversations(count: int, block: int, gap: float, seed: int = 0) -> list[Arrival]:
    """A trace of conversations, whose turns begin with all blocks of the turn before."""
    draw = np.random.default_rng(seed)
    turns: list[tuple[int, ...]] = [(i,) for i in range(count // 6)]
    found, when, new = list[Arrival](), 0.0, 1000
    for _ in range(count):
        when += float(draw.exponential(gap))
        number = int(draw.integers(len(turns)))
        if len(turns[number]) > 8:
            turns[number] = (new,)
        turns[number] = (*turns[number], new + 1, new + 2)
        new += 3
        length = (len(turns[number]) - 1) * block + int(draw.integers(1, block + 1))
        found.append(Arrival(when, length, int(draw.integers(1, 12)), turns[number], block))
    return found


def test_the_bound_is_the_longest_beginning_of_earlier_prompts() -> None:
    trace = conversations(60, 8, 1.0)
    trace += trace[-5:]  # of these all but the last token is known
    ids, prompts, expected = np.arange(50_000), list[list[int]](), list[int]()
    for index, one in enumerate(trace):
        prompt = prompt_of(one, index, ids, 0).tolist()
        common = (
            next((i for i, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b), None)
            for known in prompts
        )
        shortest = [min(len(prompt), len(known)) for known in prompts]
        longest = [n if at is None else at for at, n in zip(common, shortest, strict=True)]
        expected.append(min(max(longest, default=0), len(prompt) - 1))
        prompts.append(prompt)
    assert most_reused(trace) == expected
    assert 0.3 < bound_of(trace, None) < 0.9
    assert sum(most_reused(trace, 20)) < sum(most_reused(trace))


def test_no_request_reuses_more_than_the_bound_of_one_cache() -> None:
    trace = conversations(60, 8, 5.0)
    limits = make_limits(num_pages=2000, max_model_len=128)
    cluster = simulated(offered(trace, GIVEN), limits, COSTS)
    bounds = most_reused(trace)
    for outcome, bound in zip(cluster.outcomes, bounds, strict=True):
        assert outcome.num_cached_tokens <= bound
    assert hit_rate(cluster.outcomes) > 0.8 * bound_of(trace, None)


@dataclass
class Clock:
    """A device for ``EngineLoop``, whose steps take what costs say."""

    now: float = 0.0
    free_at: float = 0.0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self.free_at = max(self.now, self.free_at) + COSTS.seconds(work_of(plan))
        return plan, self.free_at

    def collect(self, step: tuple[StepPlan, float]) -> StepResult:
        plan, end = step
        self.now = max(self.now, end)
        rows = (RowResult(r.request_id, r.epoch, (5,) if r.samples else ()) for r in plan.rows)
        return StepResult(plan.step_id, tuple(rows))

    def forget(self, request_ids: Sequence[str]) -> None:
        pass

    def free_state(self) -> None:
        pass

    def make_state(self) -> None:
        pass


def test_a_replica_keeps_the_time_of_the_engines_loop() -> None:
    """Requests arrive one by one, at random: each gets its first and last token at the same time,
    in a pool in which some are preempted.
    """
    limits = make_limits(num_pages=20, max_model_len=64, max_num_seqs=4)
    draw = np.random.default_rng(3)
    offers, when = list[Offered](), 0.0
    for _ in range(40):
        when += float(draw.exponential(9.0))
        prompt = IntLog(draw.integers(0, 50, int(draw.integers(1, 30))).astype(np.int32))
        offers.append(Offered(when, prompt, int(draw.integers(1, 30))))
    cluster = simulated(iter(offers), limits, COSTS)
    clock, number = Clock(), 0
    loop = EngineLoop(clock, limits)
    times: dict[str, list[float]] = {}
    while number < len(offers) or not loop.idle:
        loop.wait_until_launchable()
        if loop.idle:
            clock.now = max(clock.now, offers[number].when)
        arrivals: list[Arrive] = []
        # the simulator takes a request that arrives at the time of an iteration in that one
        while number < len(offers) and offers[number].when <= clock.now:
            arrivals.append(Arrive(request_of(number, offers[number])))
            number += 1
        for event in loop.iterate(tuple(arrivals)).events:
            times.setdefault(event.request_id, []).append(clock.now)
    found = [(one.first_token, one.ended) for one in cluster.outcomes]
    assert found == [(times[str(i)][0], times[str(i)][-1]) for i in range(len(offers))]
    (replica,) = cluster.replicas
    assert replica.state.num_preemptions == loop.state.num_preemptions > 0


def request_of(number: int, one: Offered) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=one.prompt,
        sampling=SamplingParams(max_tokens=one.max_tokens, ignore_eos=True),
        max_tokens=one.max_tokens,
        arrival=number,
        seed=0,
    )


def test_figures_of_one_request_alone() -> None:
    """A prompt of 16 tokens in a bucket of 16, then decode steps of one row."""
    limits = make_limits(max_num_seqs=1)
    offers = [Offered(7.0, IntLog(range(16)), 3), Offered(9.0, IntLog(range(90)), 3)]
    cluster = simulated(iter(offers), limits, LinearCosts(step=1.0, token=0.25))
    one, refused = cluster.outcomes
    assert (one.first_token, one.ended) == (7.0 + 5.0, 7.0 + 5.0 + 2.0)
    assert "maximum context length" in refused.error
    result = result_of(cluster, 0.5, (50.0,), {"ttft": 6000.0, "tpot": 1000.0})
    assert (result["completed"], result["failed"], result["preemptions"]) == (1, 1, 0)
    assert (result["p50_ttft_ms"], result["p50_tpot_ms"]) == (5000.0, 1000.0)
    assert result["request_goodput"] == pytest.approx(1 / 7.0)


def test_routing() -> None:
    """Turns of conversations: only by their prefixes do they find the cache of the last turn."""
    trace = conversations(120, 64, 40.0)
    limits = make_limits(num_pages=4000, max_model_len=1024, max_num_batched_tokens=64)
    rates: dict[str, float] = {}
    for policy in (PREFIX, LEAST_LOADED, ROUND_ROBIN):
        cluster = simulated(offered(trace, GIVEN), limits, COSTS, replicas=4, routing=policy)
        rates[policy] = hit_rate(cluster.outcomes)
        if policy == ROUND_ROBIN:
            assert [one.rank for one in cluster.outcomes] == [i % 4 for i in range(len(trace))]
        assert all(one.ended < float("inf") for one in cluster.outcomes)
    assert rates[PREFIX] > 1.3 * max(rates[LEAST_LOADED], rates[ROUND_ROBIN]), rates
    router = Router(2, LEAST_LOADED)
    router.began(0, [1] * 1000)
    assert router.choose([1] * 1000, (0, 1)) == 1
    assert Cluster([Replica(limits, COSTS)], Router(1)).outcomes == []


def error_of(costs: LinearCosts, samples: Sequence[tuple[Work, float]]) -> float:
    """The mean relative error."""
    return mean([abs(costs.seconds(work) / seconds - 1) for work, seconds in samples])


def test_a_fit_finds_costs_and_none_is_negative() -> None:
    costs = LinearCosts(2e-3, 1e-5, 2e-5, 3e-8, 1e-9)
    draw = np.random.default_rng(0)
    works = [
        Work(
            decodes=int(draw.integers(0, 64)),
            context=int(draw.integers(0, 10**5)),
            prefills=int(draw.integers(0, 4)),
            tokens=int(draw.integers(0, 4096)),
            pairs=int(draw.integers(0, 10**7)),
        )
        for _ in range(60)
    ]
    samples = [(work, costs.seconds(work)) for work in works]
    assert error_of(fitted(samples), samples) < 1e-6
    noisy = [(work, seconds * draw.uniform(0.7, 1.3)) for work, seconds in samples]
    found = fitted(noisy)
    assert error_of(found, samples) < 0.1
    assert min(fitted([(Work(tokens=1), 2.0), (Work(tokens=3), 1.0)]).__dict__.values()) >= 0
    with pytest.raises(BenchError, match="no measured step"):
        fitted([])


def test_measured_costs_are_read(tmp_path: Path) -> None:
    """The steps of Qwen3-4B on an H200: the fit is within some percent of each."""
    costs = read_costs(ROOT / "bench" / "results" / "h200" / "step.json")
    decode = costs.seconds(Work(decodes=64, context=64 * 1056))
    prompt = costs.seconds(Work(prefills=1, tokens=4096, pairs=4096 * 4097 // 2))
    assert (decode, prompt) == (pytest.approx(5.1e-3, rel=0.05), pytest.approx(54.6e-3, rel=0.05))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": {"step": 0.5}}))
    assert read_costs(path) == costs_of_text("step=0.5")
    path.write_text(json.dumps({"steps": [{"work": {"tokens": 4}, "seconds": 2.0}]}))
    assert read_costs(path).seconds(Work(tokens=4)) == pytest.approx(2.0)
    for text in ("{}", "[]", "x", '{"costs": {"speed": 1}}'):
        path.write_text(text)
        with pytest.raises(BenchError, match="has no measured steps"):
            read_costs(path)


@pytest.mark.parametrize("text", ["speed=1", "step", "step=x", "step=-1", "step=1,,"])
def test_wrong_costs_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is no cost"):
        costs_of_text(text)


def test_the_engine_and_the_simulator_reuse_as_much() -> None:
    """``bench.simulator`` in small: a tiny model answers in real time, in two sizes of its pool."""
    trace = conversations(60, 8, 0.02)
    given: dict[str, Any] = {
        **GIVEN,
        "vocab_size": 300,
        "calibration": (20, 60),
        "num_pages": [60, 129],
    }
    limits = replace(tiny_limits(), buckets=(Bucket(4), Bucket(4, 32, 4, scores=True)))
    found = compared(tiny_executor(limits), limits, trace, given)
    assert found["points_apart"] <= MOST_POINTS
    small, large = (run["hit_rate_engine"] for run in found["runs"])
    assert 0.05 < small < large < found["bound"]


def simulate(*words: str) -> Any:
    return CliRunner().invoke(cli, ["simulate", *words])


def test_the_command(tmp_path: Path) -> None:
    words = (
        str(ROOT / "bench" / "shapes" / "gpt2" / "config.json"),
        f"--trace={ROOT / 'tests' / 'data' / 'traces' / 'mooncake_12.jsonl'}",
        *("--device=h100", "--max-input-len=900", "--max-output-len=20", "--num-prompts=12"),
    )
    plot = tmp_path / "plot.svg"
    several = ("--replicas=1,2", "--routing=prefix,round-robin", f"--plot={plot}")
    done = simulate(*words, "--goodput", "ttft:1000", *several)
    assert done.exit_code == 0, done.output
    assert "costs: estimate for NVIDIA H100" in done.output and "round-robin" in done.output
    assert plot.read_text().count("<svg") == 2
    done = simulate(*words, "--json", "--cost=step=0.01,token=1e-7")
    (result,) = json.loads(done.stdout)["results"]
    assert result["completed"] == 12 and 0 < result["hit_rate"] <= result["bound"]
    assert result["p50_tpot_ms"] >= 10
    for wrong, says in (("--replicas=101", "at most 100"), ("--routing=best", "not one of")):
        done = simulate(*words, wrong)
        assert done.exit_code == 2 and says in done.output
    done = simulate(*words, "--cost=step=1", "--costs=x")
    assert done.exit_code == 1 and "exclude each other" in done.output
