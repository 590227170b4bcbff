"""``jaxinfer simulate``: a trace on engines that need not exist, with the scheduler that serves.

Sizes are the engine's own plan for a device (``bench plan``), and so is the time of a step unless
measured costs are given. Hit rates, preemptions, queues and batches follow from the scheduler.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.bench.arguments import Parser, count, goodput_limit, percents, positive
from jaxinfer.bench.cluster import Cluster, Offered, Outcome, Replica
from jaxinfer.bench.figures import summarize
from jaxinfer.bench.floor import Floor
from jaxinfer.bench.plan import DEVICES, REACHED_TPOT, REACHED_TTFT, config_of, plan_on
from jaxinfer.bench.plot import curves_plot
from jaxinfer.bench.records import Record
from jaxinfer.bench.report import number, table
from jaxinfer.bench.step_costs import (
    EstimatedCosts,
    LinearCosts,
    StepCosts,
    costs_of_text,
    read_costs,
)
from jaxinfer.bench.traces import Arrival, cut, most_reused, prompt_of, read_trace
from jaxinfer.core.errors import BenchError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.engine.link.routing import POLICIES, PREFIX, Router
from jaxinfer.models.costs import costs_of

MAX_REPLICAS = 100
VOCAB = 50_000  # ids of prompts
NS = 1e9
METRICS = ("ttft", "tpot", "e2el")
COLUMNS = ("replicas", "routing", "hits", "bound", "TTFT p50", "p90", "p99", "TPOT p50", "p90")
MORE_COLUMNS = ("p99", "goodput", "preempted", "busy")


def offered(trace: Sequence[Arrival], given: Mapping[str, Any]) -> Iterator[Offered]:
    """The requests of a trace, each with its prompt once it is asked for.

    ``given``: ``seed``, ``time_scale``, ``max_input_len``, ``max_output_len`` and, unless it is
    ``VOCAB``, ``vocab_size``.
    """
    ids = np.arange(given.get("vocab_size", VOCAB))
    for index, one in enumerate(trace):
        prompt = prompt_of(one, index, ids, given["seed"], given["max_input_len"])
        most = cut(one.output_len, given["max_output_len"])
        yield Offered(one.when / given["time_scale"], IntLog(prompt.astype(np.int32)), most)


def simulated(
    offers: Iterator[Offered],
    limits: Limits,
    costs: StepCosts,
    *,
    replicas: int = 1,
    routing: str = PREFIX,
) -> Cluster:
    """A cluster after all requests have ended."""
    router = Router(replicas, routing)
    cluster = Cluster([Replica(limits, costs) for _ in range(replicas)], router)
    cluster.run(offers)
    return cluster


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    """The share of the prompts' tokens that was reused, of requests that were answered."""
    done = [one for one in outcomes if not one.error]
    total = sum(one.num_prompt_tokens for one in done)
    return sum(one.num_cached_tokens for one in done) / max(1, total)


def result_of(
    cluster: Cluster,
    bound: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None,
) -> dict[str, Any]:
    """The figures of a run; times in ms under vLLM's names."""
    outcomes, replicas = cluster.outcomes, cluster.replicas
    records = [_record(one) for one in outcomes]
    figures = summarize(records, percentiles=percentiles, metrics=METRICS, goodput=goodput)
    seconds = figures["duration"]
    return {
        "replicas": len(replicas),
        "routing": cluster.router.policy,
        "hit_rate": hit_rate(outcomes),
        "bound": bound,
        **figures,
        "preemptions": sum(one.state.num_preemptions for one in replicas),
        "steps": sum(one.num_steps for one in replicas),
        "busy": sum(one.busy for one in replicas) / len(replicas) / seconds if seconds else 0.0,
        "requests_of_replicas": [
            sum(one.rank == rank for one in outcomes) for rank in range(len(replicas))
        ],
    }


def _record(one: Outcome) -> Record:
    """A request as a client would have seen it; chunks after the first one count as one."""
    start = round(one.arrived * NS)
    if one.error or not math.isfinite(one.ended):
        error = one.error or "open"
        return Record(start_ns=start, prompt_tokens=one.num_prompt_tokens, error=error)
    first, last = round(one.first_token * NS) - start, round(one.ended * NS) - start
    return Record(
        start_ns=start,
        gaps_ns=[first, last - first] if one.num_tokens > 1 else [first],
        end_ns=last,
        prompt_tokens=one.num_prompt_tokens,
        output_tokens=one.num_tokens,
    )


def bound_of(trace: Sequence[Arrival], max_input_len: int | None) -> float:
    """The share of the prompts' tokens that one cache without limits would have."""
    total = sum(cut(one.input_len, max_input_len) for one in trace)
    return sum(most_reused(trace, max_input_len)) / total


def cell(figures: Mapping[str, Any], name: str) -> str:
    """A figure in a table; "" if there is none."""
    return number(figures[name]) if name in figures else ""


def lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The results as a table; times in ms."""
    rows = [
        [
            str(one["replicas"]),
            one["routing"],
            f"{one['hit_rate']:.1%}",
            f"{one['bound']:.1%}",
            *[cell(one, f"p{p}_{m}_ms") for m in ("ttft", "tpot") for p in (50, 90, 99)],
            cell(one, "request_goodput"),
            str(one["preemptions"]),
            f"{one['busy']:.0%}",
        ]
        for one in results
    ]
    return [
        *table([*COLUMNS, *MORE_COLUMNS], rows),
        "hits: share of the prompts' tokens that was reused; bound: what a cache without limits",
        "would reuse. TTFT and TPOT in ms; goodput in requests a second; busy: share of time in",
        "which a replica runs a step.",
    ]


def plots(results: Sequence[Mapping[str, Any]]) -> str:
    """SVG plots, one after the other: hit rate and TTFT p99 over the number of replicas."""
    parts: list[str] = []
    for title, key, factor in (
        ("hit rate (%) over replicas", "hit_rate", 100.0),
        ("TTFT p99 (ms) over replicas", "p99_ttft_ms", 1.0),
    ):
        curves: dict[str, list[tuple[float, float]]] = {}
        for one in results:
            point = float(one["replicas"]), factor * one[key]
            curves.setdefault(one["routing"], []).append(point)
        parts.append(curves_plot(title, curves))
    return "".join(parts)


def parser() -> Parser:
    """The command line; other flags are the engine's."""
    made = Parser("simulate", (__doc__ or "").splitlines()[0])
    made.add_argument("config", help="a config.json, its folder, or any form of MODEL")
    made.add_argument("--trace", type=Path, required=True, help="of Mooncake's or Azure's form")
    made.add_argument("--device", choices=list(DEVICES), required=True)
    made.add_argument("--cost", type=_costs, help="seconds: step=0.002,row=1e-5,token=1e-5,...")
    made.add_argument("--costs", type=Path, help="a bench's JSON with measured steps or costs")
    made.add_argument("--replicas", type=_replicas, default=[1], help="1 to 100; or 1,2,4")
    made.add_argument("--routing", type=_policies, default=[PREFIX], help=", ".join(POLICIES))
    made.add_argument("--num-prompts", type=count, help="only the first ones of the trace")
    made.add_argument("--time-scale", type=positive, default=1.0, help="2: twice as fast")
    made.add_argument("--max-input-len", type=count, help="prompts are cut to it")
    made.add_argument("--max-output-len", type=count, help="answers are cut to it")
    made.add_argument("--metric-percentiles", type=percents, default=[50.0, 90.0, 99.0])
    made.add_argument("--goodput", nargs="*", type=goodput_limit, metavar="METRIC:MS")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--plot", type=Path, help="an SVG file of plots over replicas")
    return made


def main(arguments: list[str], read_settings: Callable[[list[str]], dict[str, Any]]) -> int:
    """Simulate every number of replicas and every routing; the exit code."""
    given, more = parser().parse_known_args(arguments)
    if given.cost is not None and given.costs is not None:
        raise BenchError("--cost and --costs exclude each other; leave one out")
    trace = read_trace(given.trace, given.num_prompts)
    jax.config.update("jax_platforms", "cpu")  # a plan takes no memory of a GPU
    device = DEVICES[given.device]
    plan = plan_on(config_of(given.config, read_settings(more)), device)
    floor = Floor(costs_of(plan.program.model), device.ceiling)
    measured: LinearCosts | None = given.cost
    source = f"estimate for {device.name}" if measured is None else "--cost"
    if given.costs is not None:
        measured, source = read_costs(given.costs), str(given.costs)
    costs = measured or EstimatedCosts(floor, REACHED_TPOT, REACHED_TTFT)
    found = _all(given, trace, plan.program.limits, costs)
    if given.plot is not None:
        given.plot.write_text(plots(found))
    if given.json:
        own = None if measured is None else asdict(measured)
        print(json.dumps({"costs": own, "costs_of": source, "results": found}))
    else:
        print("\n".join([f"{len(trace)} requests; costs: {source}", "", *lines(found)]))
    return 0


def _all(
    given: Namespace, trace: Sequence[Arrival], limits: Limits, costs: StepCosts
) -> list[dict[str, Any]]:
    bound = bound_of(trace, given.max_input_len)
    percentiles = sorted({50.0, 90.0, 99.0, *given.metric_percentiles})
    goodput = dict(given.goodput) if given.goodput else None
    found: list[dict[str, Any]] = []
    for replicas, routing in product(given.replicas, given.routing):
        since = time.perf_counter()
        offers = offered(trace, vars(given))
        cluster = simulated(offers, limits, costs, replicas=replicas, routing=routing)
        found.append(result_of(cluster, bound, percentiles, goodput))
        found[-1]["host_seconds"] = round(time.perf_counter() - since, 2)
        print(f"{replicas} replicas, {routing}: simulated", file=sys.stderr)
    return found


def _costs(text: str) -> LinearCosts:
    try:
        return costs_of_text(text)
    except BenchError as error:
        raise ArgumentTypeError(str(error)) from error


def _replicas(text: str) -> list[int]:
    found = [count(part) for part in text.split(",")]
    if max(found) > MAX_REPLICAS:
        raise ArgumentTypeError(f"{max(found)} replicas; use at most {MAX_REPLICAS}")
    return found


def _policies(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [one for one in found if one not in POLICIES]:
        raise ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(POLICIES)}")
    return found
