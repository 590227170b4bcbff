"""The simulator next to the engine: the first requests of a trace, scaled down, on this CPU.

Run from the repository root:

    .venv/bin/python -m bench.simulator TRACE [--output bench/results/cpu/simulator.json]

Lengths of prompts, answers and blocks are divided by ``--factor``, times by ``--time-scale``. A
tiny model with random weights first computes other prompts, to whose steps the costs are fitted;
then it answers the requests as they arrive, in real time, with each number of pages, and the
simulator answers them with those costs. Exits with 1 if the hit rates differ by more than two
points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from jaxinfer.bench.circumstances import host_circumstances
from jaxinfer.bench.cluster import Offered, Outcome
from jaxinfer.bench.numbers import percentile
from jaxinfer.bench.simulate import bound_of, hit_rate, offered, simulated
from jaxinfer.bench.step_costs import LinearCosts, Work, fitted, work_of
from jaxinfer.bench.traces import Arrival, read_trace
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, Request, SamplingParams
from jaxinfer.core.step import Arrive, StepPlan, StepResult
from jaxinfer.engine.loop.loop import EngineLoop, StepExecutor
from jaxinfer.engine.start.build import build_engine, plan_engine

MOST_POINTS = 2.0  # by which the hit rates may differ
VOCAB = 50_000
CALIBRATION = "requests before, and the most tokens of their prompts"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@dataclass
class Timed:
    """An executor that notes the work and the seconds of each step, as ``Timeline`` counts them."""

    inner: StepExecutor[Any]
    samples: list[tuple[Work, float]] = field(default_factory=list[tuple[Work, float]])
    _ended: float = 0.0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float, Any]:
        """See ``StepExecutor``."""
        return plan, time.perf_counter(), self.inner.launch(plan)

    def collect(self, step: tuple[StepPlan, float, Any]) -> StepResult:
        """See ``StepExecutor``."""
        plan, launched, handle = step
        result = self.inner.collect(handle)
        now = time.perf_counter()
        self.samples.append((work_of(plan), now - max(launched, self._ended)))
        self._ended = now
        return result

    def forget(self, request_ids: Sequence[str]) -> None:
        """See ``StepExecutor``."""
        self.inner.forget(request_ids)

    def free_state(self) -> None:
        """See ``StepExecutor``."""
        self.inner.free_state()

    def make_state(self) -> None:
        """See ``StepExecutor``."""
        self.inner.make_state()


def answered(loop: EngineLoop[Any], offers: Sequence[Offered]) -> list[Outcome]:
    """Answer requests in real time."""
    outcomes: list[Outcome] = []
    start, number = time.perf_counter(), 0
    while number < len(offers) or not loop.idle:
        loop.wait_until_launchable()
        now, arrivals = time.perf_counter() - start, list[Arrive]()
        while number < len(offers) and offers[number].when <= now:
            arrivals.append(Arrive(_request(number, offers[number])))
            outcomes.append(Outcome(offers[number].when, len(offers[number].prompt)))
            number += 1
        if loop.idle and not arrivals:
            time.sleep(max(0.0, offers[number].when - now))
            continue
        for event in loop.iterate(tuple(arrivals)).events:
            one, now = outcomes[int(event.request_id)], time.perf_counter() - start
            if event.finish_reason is FinishReason.ERROR:
                raise RuntimeError(event.error)
            one.num_cached_tokens = event.num_cached_tokens
            one.num_tokens += len(event.token_ids)
            one.first_token = min(one.first_token, now)
            one.ended = now
    return outcomes


def _request(number: int, one: Offered) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=one.prompt,
        sampling=SamplingParams(max_tokens=one.max_tokens, ignore_eos=True, temperature=0.0),
        max_tokens=one.max_tokens,
        arrival=number,
        seed=0,
    )


def tiny_engine(folder: Path, sizes: dict[str, Any]) -> tuple[StepExecutor[Any], Limits]:
    """The executor of a tiny model with random weights, and its limits."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    config = EngineConfig(
        model=str(path), load_format="dummy", skip_tokenizer_init=True, dtype="float32", **sizes
    )
    plan = plan_engine(config)
    engine = build_engine(plan)
    return engine.executor, engine.limits


def calibration(count: int, longest: int, seed: int, vocab_size: int) -> list[Offered]:
    """Prompts and answers of all lengths, some at once; none shares its beginning."""
    draw = np.random.default_rng([seed, 9])
    found, when = list[Offered](), 0.0
    for _ in range(count):
        when += float(draw.exponential(0.03))
        prompt = draw.integers(0, vocab_size, int(draw.integers(8, longest)))
        found.append(Offered(when, IntLog(prompt.astype(np.int32)), int(draw.integers(1, 40))))
    return found


def compared(
    executor: StepExecutor[Any], limits: Limits, trace: Sequence[Arrival], given: dict[str, Any]
) -> dict[str, Any]:
    """Engine and simulator on the same requests, with each number of pages.

    Raises ``ValueError`` for more pages than the executables have: they would write elsewhere.
    """
    if max(given["num_pages"]) > limits.num_pages[0]:
        raise ValueError(f"the engine has {limits.num_pages[0]} pages; name at most so many")
    timed = Timed(executor)
    others = calibration(*given["calibration"], given["seed"], given["vocab_size"])
    answered(EngineLoop(timed, limits), others)
    costs = fitted(timed.samples)
    ratio = _ratio(costs, timed.samples)
    timed.samples.clear()
    offers, bound = list(offered(trace, given)), bound_of(trace, given["max_input_len"])
    runs = [
        _compared(timed, replace(limits, num_pages=(pages,)), offers, costs, bound)
        for pages in given["num_pages"]
    ]
    return {
        "requests": len(trace),
        "bound": bound,
        "points_apart": max(run["points_apart"] for run in runs),
        "costs": asdict(costs),
        "fitted_over_measured": ratio,
        "page_size": limits.page_size,
        "runs": runs,
    }


def _compared(
    timed: Timed,
    limits: Limits,
    offers: Sequence[Offered],
    costs: LinearCosts,
    bound: float,
) -> dict[str, Any]:
    """Both with so many pages, which may be fewer than the executables have."""
    loop = EngineLoop(timed, limits)
    real = answered(loop, offers)
    cluster = simulated(iter(offers), limits, costs)
    ratio = _ratio(costs, timed.samples)
    timed.samples.clear()
    points = 100 * abs(hit_rate(real) - hit_rate(cluster.outcomes))
    return {
        "num_pages": sum(limits.num_pages),
        "bound": bound,
        "hit_rate_engine": hit_rate(real),
        "hit_rate_simulator": hit_rate(cluster.outcomes),
        "points_apart": points,
        "requests_with_other_hits": sum(
            a.num_cached_tokens != b.num_cached_tokens
            for a, b in zip(real, cluster.outcomes, strict=True)
        ),
        "preemptions_engine": loop.state.num_preemptions,
        "engine_ms": _times(real),
        "simulator_ms": _times(cluster.outcomes),
        "preemptions_simulator": sum(one.state.num_preemptions for one in cluster.replicas),
        "fitted_over_measured": ratio,
    }


def _ratio(costs: LinearCosts, samples: Sequence[tuple[Work, float]]) -> float:
    """The time of all steps by their costs over the measured time."""
    return sum(costs.seconds(work) for work, _ in samples) / sum(one for _, one in samples)


def _times(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """p50, p90 and p99 in ms."""
    ttft = [1e3 * (one.first_token - one.arrived) for one in outcomes]
    tpot = [
        1e3 * (one.ended - one.first_token) / (one.num_tokens - 1)
        for one in outcomes
        if one.num_tokens > 1
    ]
    return {
        name: [round(percentile(values, percent), 3) for percent in (50, 90, 99)]
        for name, values in (("ttft", ttft), ("tpot", tpot))
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("trace", type=Path)
    made.add_argument("--requests", type=int, default=500)
    made.add_argument("--factor", type=int, default=64)
    made.add_argument("--time-scale", type=float, default=4.0)
    made.add_argument("--num-pages", type=int, nargs="+", default=[600, 2000, 6000])
    made.add_argument("--calibration", type=int, nargs=2, default=[150, 1000], help=CALIBRATION)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", type=Path)
    return made


def main() -> int:
    """Compare, print and write the result; 1 if the hit rates are too far apart."""
    given = parser().parse_args()
    trace = [one.scaled(given.factor) for one in read_trace(given.trace, given.requests)]
    sizes = {
        "page_size": 8,
        "num_pages": max(given.num_pages),
        "max_model_len": 2048,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 512,
        "prefill_first": False,
    }
    options = vars(given) | {"max_input_len": None, "max_output_len": None, "vocab_size": VOCAB}
    with tempfile.TemporaryDirectory() as folder:
        executor, limits = tiny_engine(Path(folder), sizes)
        found = compared(executor, limits, trace, options)
    found |= {
        "trace": given.trace.name,
        "factor": given.factor,
        "time_scale": given.time_scale,
        **host_circumstances(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    return int(found["points_apart"] > MOST_POINTS)


if __name__ == "__main__":
    sys.exit(main())
