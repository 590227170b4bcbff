"""``jaxinfer bench sweep``: the most requests a second that a server answers within limits.

The load is open-loop: requests arrive at a rate, whether or not earlier ones are answered. The rate
doubles until a limit is exceeded; then the interval between the last rate that meets all limits and
the first that does not is halved (of the logarithm).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from jaxinfer.bench.arguments import (
    Parser,
    add_report,
    add_server,
    add_workload,
    positive,
    report_fields,
    settings_of,
)
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.gates import gates_of
from jaxinfer.bench.offer import in_loop
from jaxinfer.bench.records import COMPLETE, Run, Series
from jaxinfer.bench.requests import TRACES, Load, Requests
from jaxinfer.bench.results import level_meets, results_of
from jaxinfer.bench.serve import Target, conclude, environment_of, sweep_line, target_of
from jaxinfer.bench.vllm_flags import REFUSED, SWEEPS, WITHOUT_EFFECT, add_told
from jaxinfer.core.errors import BenchError

LEAST_REQUESTS = 15  # of a level, so that it has a tail
LOWEST_SHARE = 64  # of the first rate, below which the search gives up


def next_rate(
    levels: Mapping[float, bool], first: float, highest: float, tolerance: float
) -> float | None:
    """The rate to try after these, which meet the limits or not; None at the end of the search."""
    if not levels:
        return first
    met = [rate for rate, meets in levels.items() if meets]
    missed = [rate for rate, meets in levels.items() if not meets]
    if not missed:
        return None if max(met) >= highest else min(2 * max(met), highest)
    low = max((rate for rate in met if rate < min(missed)), default=None)
    if low is None:
        return min(missed) / 2 if min(missed) / 2 >= first / LOWEST_SHARE else None
    return math.sqrt(low * min(missed)) if min(missed) / low > 1 + tolerance else None


def parser() -> Parser:
    """The command line."""
    made = Parser("sweep", (__doc__ or "").splitlines()[0])
    made.add_argument(
        "--limit", required=True, help="such as ttft_p99<200ms,tpot_p99<20ms; all must hold"
    )
    made.add_argument("--start-rate", type=positive, default=1.0, help="requests a second")
    made.add_argument("--max-rate", type=positive, default=1024.0)
    made.add_argument("--level-seconds", type=positive, default=12.0, help="of offered load")
    made.add_argument("--tolerance", type=positive, default=0.1, help="of the rate that is found")
    add_server(made)
    add_workload(made)
    add_report(made)
    add_told(made, WITHOUT_EFFECT, REFUSED)
    return made


async def search(given: argparse.Namespace, folder: Folder) -> None:
    """Measure level after level until the rate is known to the tolerance."""
    requests = Requests(given)
    async with target_of(given) as target:
        folder.environment |= await environment_of(target, given.device)
        first = requests.warm_up_load(target.model)
        await target.warm_up(first, given.num_warmups, given.ready_check_timeout_sec)
        levels: dict[float, bool] = {}
        while rate := next_rate(levels, given.start_rate, given.max_rate, given.tolerance):
            load = requests.load(target.model, *_size(given, rate), len(levels))
            levels[rate] = await _level(given, folder, target, load, rate)


def _size(given: argparse.Namespace, rate: float) -> tuple[int, float]:
    return max(LEAST_REQUESTS, round(rate * given.level_seconds)), rate


async def _level(
    given: argparse.Namespace, folder: Folder, target: Target, load: Load, rate: float
) -> bool:
    """Measure one level; whether it meets the limits. Its prompts are new: no prefix is cached."""
    series = Series(name=f"rate-{rate:.4g}", backend="server", rate=rate)
    records = await target.measure(load, series, given.max_concurrency, given.save_detailed)
    folder.add(series, records, target.samples)
    target.check_ended()
    figures = results_of(folder.run, folder.records())["series"]
    meets = level_meets(folder.run, series, figures)
    verdict = "within" if meets else "exceeds"
    print(f"{sweep_line(series.name, figures[series.name])}  {verdict}", flush=True)
    if series.state != COMPLETE:
        raise BenchError(f"the sweep ended at {rate:g} requests a second: {series.reason}")
    return meets


def main(arguments: list[str]) -> int:
    """Search, print, write; the exit code, which is 1 if no rate meets the limits."""
    if arguments and arguments[0] in SWEEPS:
        raise BenchError(
            f"sweep {arguments[0]} is vLLM's; `jaxinfer bench sweep --limit` searches for the "
            "highest rate of one server, `serve --sweep 1,4,8` measures rates, `plot` draws "
            "several runs, and servers with other settings are started one after the other"
        )
    given = parser().parse_args(arguments)
    limits = [gate.text for gate in gates_of(given.limit)]
    if not limits or any(gate.peer for gate in gates_of(given.limit)):
        raise BenchError(f"--limit {given.limit!r} bounds no figure; write ttft_p99<200ms")
    if given.dataset_name in TRACES:
        raise BenchError("a trace has times of its own; use replay with several --time-scale")
    run = Run(
        command="sweep",
        created=now(),
        settings=settings_of(given),
        limits=limits,
        **report_fields(given),
    )
    folder = Folder.create(given.output or default_path("sweep"), run)
    with finished(folder):
        in_loop(search(given, folder))
    result = folder.finish()
    found = result["capacity"]["requests_per_second"]
    if found is None:
        print(f"no rate that was tried meets {', '.join(limits)}")
        return conclude(folder, result) or 1
    print(f"{found:.4g} requests a second within {', '.join(limits)}")
    return conclude(folder, result)
