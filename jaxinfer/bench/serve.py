"""``jaxinfer bench serve``: latency and throughput of a running server.

Random prompts are token ids, so that each has exactly its length. Any server with OpenAI's routes
can be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from jaxinfer.bench.arguments import (
    Parser,
    add_profile,
    add_report,
    add_server,
    add_workload,
    headers_of,
    report_fields,
    settings_of,
)
from jaxinfer.bench.circumstances import write_report, writing
from jaxinfer.bench.client import GET_SECONDS, Client
from jaxinfer.bench.figures import TITLES, details, table
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.monitor import Sample, answers_bar, missing_telemetry, summary, watched
from jaxinfer.bench.offer import (
    RETRY_SECONDS,
    Ended,
    Outcome,
    in_loop,
    offer,
    offer_sessions,
    rate_of,
    wait_until_ready,
)
from jaxinfer.bench.process_tree import tree_memory
from jaxinfer.bench.profile import check_profiler, profile_server
from jaxinfer.bench.records import COMPLETE, PARTIAL, Record, Run, Series, records_of
from jaxinfer.bench.requests import TRACES, Load, Requests
from jaxinfer.bench.sessions import has_sessions
from jaxinfer.bench.vllm_flags import REFUSED, WITHOUT_EFFECT, add_told
from jaxinfer.core.errors import BenchError

CLOSE_SECONDS = 0.05  # in which the loop closes the connections
SWEEP = "1,4,8,16,24,32,inf"  # the levels at which other engines have been measured


def level_size(rate: float) -> int:
    """Requests of a level: 12 seconds' worth, at least 15; 512 if they all arrive at once."""
    return 512 if math.isinf(rate) else max(15, round(12 * rate))


def parser(command: str) -> Parser:
    """The command line of ``serve`` or ``replay``."""
    made = Parser(command, (__doc__ or "").splitlines()[0])
    add_server(made)
    add_workload(made)
    add_report(made)
    add_profile(made)
    made.add_argument(
        "--sweep", nargs="?", const=SWEEP, metavar="RATES", help=f"levels; default {SWEEP}"
    )
    add_told(made, WITHOUT_EFFECT, REFUSED)
    made.add_argument("--save-result", action="store_true", help="also vLLM's JSON file")
    made.add_argument("--append-result", action="store_true", help="a line more of that file")
    made.add_argument("--label", help="in that file and its name")
    made.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="in that file")
    made.add_argument("--result-dir", type=Path, default=Path())
    made.add_argument("--result-filename")
    return made


class Target:
    """A running server, its model, and what the flags say of both."""

    def __init__(
        self,
        client: Client,
        model: str,
        endpoint: str,
        pid: int | None = None,
        *,
        shows_progress: bool = True,
    ) -> None:
        self.client, self.model, self.endpoint, self.pid = client, model, endpoint, pid
        self.shows_progress = shows_progress
        self.samples: list[Sample] = []  # of the last series
        self._ended: Ended | None = None

    async def warm_up(self, load: Load, count: int, seconds: float) -> None:
        """Wait until the first request succeeds (not if ``seconds`` is 0), then send it ``count``
        times more.
        """
        body = load.bodies[0]
        if seconds:
            await wait_until_ready(self.client, self.endpoint, body, seconds)
        for _ in range(count):
            await self.client.post(self.endpoint, body)

    async def measure(
        self, load: Load, series: Series, max_concurrency: int | None, texts: bool = False
    ) -> list[Record]:
        """Offer a load, and complete the description of its series.

        If the run is ended by then the records are those of the answers until then, and
        ``check_ended``, which the caller calls when they are kept, raises.
        """
        with (
            watched(self.pid) as self.samples,
            answers_bar(len(load.bodies), self.shows_progress) as on_answer,
        ):
            outcome, kept = await self._answered(load, series, max_concurrency, on_answer)
        series.requests, series.workload = len(load.bodies), load.workload
        series.facts |= {"client_cpu_us_per_chunk": outcome.cpu_us_per_chunk, **self.memory()}
        series.facts |= summary(self.samples)
        failure = next((answer.error for answer in outcome.answers if answer.error), "")
        if failure:
            self.client.close()  # if the system has no more files, the records need some
            await asyncio.sleep(CLOSE_SECONDS)
        if failure and (await self.client.get("/v1/models")).status == 0:
            series.state, series.reason = PARTIAL, f"the server ended midway ({failure})"
        report_errors(outcome)
        turns, sent = load.turns, load.sent_tokens
        return records_of(
            outcome.answers,
            outcome.start,
            [turns[number] for number in kept],
            [sent[number] for number in kept],
            texts=texts,
        )

    def check_ended(self) -> None:
        """Raise ``Ended`` if the run was ended during the last measurement."""
        if self._ended is not None:
            raise self._ended

    async def _answered(
        self, load: Load, series: Series, limit: int | None, on_answer: Callable[[], None]
    ) -> tuple[Outcome, list[int]]:
        """The outcome of a load, and the number of the request of each of its answers."""
        everything = list(range(len(load.queries)))
        try:
            return await self.offered(load, limit, on_answer), everything
        except Ended as ended:
            self._ended, series.state, series.reason = ended, PARTIAL, str(ended)
            jobs = accumulate((not turn for turn in load.turns), initial=-1)
            pairs = zip(everything, islice(jobs, 1, None), strict=True)
            return ended.outcome, [number for number, job in pairs if ended.is_done[job]]

    async def offered(
        self, load: Load, limit: int | None, on_answer: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Offer a load without a record of it."""
        client, path = self.client, self.endpoint
        if any(query.session for query in load.queries):
            return await offer_sessions(client, path, *load.sessions, limit, on_answer)
        return await offer(client, path, load.bodies, load.times, limit, on_answer)

    def memory(self) -> dict[str, float]:
        """Memory of the server's process tree in MB; empty without its process id."""
        if self.pid is None:
            return {}
        with suppress(ProcessLookupError):
            memory = tree_memory(self.pid)
            return {
                "server_rss_mb": memory.rss / 1e6,
                "server_pss_mb": memory.pss / 1e6,
                "server_processes": memory.processes,
            }
        return {}


@asynccontextmanager
async def target_of(given: argparse.Namespace) -> AsyncGenerator[Target]:
    """The server that the flags name; raises ``BenchError`` if it does not answer in time."""
    host = f"[{given.host}]" if ":" in given.host else given.host
    url = given.base_url or f"http://{host}:{given.port}"
    headers = headers_of(given.header)
    if given.api_key and not any(name.lower() == "authorization" for name in headers):
        headers = {**headers, "Authorization": f"Bearer {given.api_key}"}
    seconds = given.request_timeout_sec
    with closing(Client(url, headers, seconds=seconds, insecure=given.insecure)) as client:
        named = given.served_model_name or given.model
        model = named or await first_model(client, given.ready_check_timeout_sec)
        yield Target(
            *(client, model, given.endpoint, given.server_pid),
            shows_progress=not given.disable_tqdm,
        )


async def run(given: argparse.Namespace, command: str) -> Folder:
    """Measure one level or the sweep; returns the finished folder."""
    requests = Requests(given)
    rates = rates_of(given.sweep) if given.sweep else None
    path = given.output or default_path(command)
    described = Run(
        command=command, created=now(), settings=settings_of(given), **report_fields(given)
    )
    async with target_of(given) as target:
        environment = await environment_of(target, given.device)
        if given.profile:
            await check_profiler(target.client)
        first = requests.warm_up_load(target.model)
        with finished(Folder.create(path, described, environment)) as folder:
            await target.warm_up(first, given.num_warmups, given.ready_check_timeout_sec)
            idle = {f"idle_{name}": value for name, value in target.memory().items()}
            for number, rate in enumerate(rates or [given.request_rate]):
                series = Series(
                    name=f"rate-{rate:g}" if rates else command,
                    backend="server",
                    rate=_offered(given, rate),
                    facts=dict(idle),
                )
                count = level_size(rate) if rates else given.num_prompts
                # the prompts of a level are its own, or a prefix cache would have them
                load = requests.load(target.model, count, rate, number)
                records = await target.measure(
                    load, series, given.max_concurrency, texts=given.save_detailed
                )
                folder.add(series, records, target.samples)
                target.check_ended()
                if series.state != COMPLETE:
                    break
            if given.profile and all(one.state == COMPLETE for one in described.series):
                # requests like those before, but others, so that no prefix is cached
                later = len(described.series)
                load = requests.load(target.model, given.num_prompts, given.request_rate, later)
                offer = partial(target.offered, load, given.max_concurrency)
                await profile_server(target.client, offer, given.profile_num_steps, folder)
    return folder


async def environment_of(target: Target, device: str | None) -> dict[str, str]:
    """The server's own version, its model, and the device as the command line names it."""
    version = (await target.client.get("/version")).body.decode(errors="replace")
    named = {"device": device} if device else {}
    telemetry = missing_telemetry(target.pid)
    return {"server": version.strip(), "model": target.model, **named, **telemetry}


def _offered(given: argparse.Namespace, rate: float) -> float | None:
    has_times = given.dataset_name in TRACES or given.ramp_up_strategy
    return None if math.isinf(rate) or has_times else rate


def rates_of(text: str) -> list[float]:
    """Rates with commas between them; raises ``BenchError`` if one is none."""
    try:
        return [rate_of(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(f"--sweep has {text!r}; give rates such as 1,4,inf") from error


async def first_model(client: Client, seconds: float) -> str:
    """The first name that the server lists. Raises ``BenchError`` if it lists none in time."""
    deadline = time.monotonic() + seconds
    while (answer := await client.get("/v1/models", _seconds_until(deadline))).status != 200:
        # 503: the model is still being loaded
        if answer.status not in (0, 503) or time.monotonic() > deadline:
            raise BenchError(
                f"the server does not list its models ({answer.error}); start it, or name it with "
                "--base-url"
            )
        await asyncio.sleep(RETRY_SECONDS)
    try:
        return json.loads(answer.body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(
            f"the server's /v1/models has no model ({answer.body[:100]!r}); give --model"
        ) from error


def _seconds_until(deadline: float) -> float:
    """Seconds for a GET: at most those of any and those left, but enough for one try."""
    return min(GET_SECONDS, max(RETRY_SECONDS, deadline - time.monotonic()))


def report_errors(outcome: Outcome) -> None:
    """Print each different failure once."""
    for error in sorted({answer.error for answer in outcome.answers if answer.error}):
        print(f"failed: {error}")
    silent = sum(
        bool(one.times) and not one.error and not one.is_counted for one in outcome.answers
    )
    if silent:
        print(
            f"{silent} answers came without the server's counts of tokens, so tokens a second are "
            "unknown; the server must follow stream_options.include_usage"
        )


def sweep_line(name: str, figures: Mapping[str, float]) -> str:
    """A level in one line: medians and 99th percentiles, where it has them."""
    pairs = " ".join(
        f"{metric} {figures[f'median_{metric}_ms']:8.2f} / {figures[f'p99_{metric}_ms']:8.2f}"
        for metric in TITLES
        if f"p99_{metric}_ms" in figures
    )
    counts = f"{figures['completed']}/{figures['completed'] + figures['failed']}"
    speed = figures.get("output_throughput")
    shown = " " * 8 + "?" if speed is None else f"{speed:9.1f}"
    return f"{name:>10} {counts:>8}  {pairs}  {shown} tok/s"


def vllm_result(
    folder: Folder, result: Mapping[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """The first series under the names of vLLM's result file."""
    (name, figures), *_ = result["series"].items()
    extra = details(folder.records()[name]) if given.save_detailed else {}
    facts = {**folder.environment, "date": folder.run.created, "workload": folder.run.settings}
    backend = given.backend or "openai"
    asked = {
        "backend": backend,
        "endpoint_type": backend,
        "label": given.label,
        "model_id": given.model or folder.environment["model"],
        "tokenizer_id": given.tokenizer or given.model,
        "num_prompts": given.num_prompts,
        "request_rate": "inf" if math.isinf(given.request_rate) else given.request_rate,
        "burstiness": given.burstiness,
        "max_concurrency": given.max_concurrency,
    }
    named = dict(pair.split("=", 1) for pair in given.metadata)
    return {**facts, **asked, **named, **figures, **folder.run.series[0].facts, **extra}


def main(arguments: list[str]) -> int:
    """Measure, print, write; the exit code."""
    return _measured(parser("serve").parse_args(arguments), "serve")


def replay(arguments: list[str]) -> int:
    """The same with the requests and times of a trace; the exit code."""
    made = parser("replay")
    made.add_argument("trace", type=Path, help="of Mooncake's, Azure's or AIPerf's form; or .gz")
    given = made.parse_args(arguments)
    if given.sweep:
        raise BenchError("a trace has times of its own; use several --time-scale, not --sweep")
    given.dataset_path = given.trace
    given.dataset_name = "sessions" if has_sessions(given.trace) else TRACES[0]
    return _measured(given, "replay")


def _measured(given: argparse.Namespace, command: str) -> int:
    if wrong := [text for text in given.metadata if "=" not in text]:
        raise BenchError(f"--metadata {wrong[0]!r} has no value; write KEY=VALUE")
    folder = in_loop(run(given, command))
    result = folder.finish()
    for name, figures in result["series"].items():
        if given.sweep:
            print(sweep_line(name, figures))
        else:
            print(table(figures, folder.run.percentiles))
    if given.save_result or given.append_result:
        stamp = folder.run.created.replace(":", "").replace("-", "")[:15]
        label = given.label or "jaxinfer"
        name = given.result_filename or f"{label}-{given.request_rate}qps-{stamp}.json"
        path, found = given.result_dir / name, vllm_result(folder, result, given)
        if given.append_result:
            with writing(path), path.open("a") as file:
                file.write(json.dumps(found) + "\n")
        else:
            write_report(path, found)
    return conclude(folder, result)


def conclude(folder: Folder, result: Mapping[str, Any]) -> int:
    """Print where the run is, its state and verdicts; 1 if it is partial or a gate fails."""
    print(f"{folder.path / 'report.md'}")
    failed = folder.run.state != COMPLETE
    for one in folder.run.series:
        if one.state != COMPLETE:
            print(f"{one.name} is {one.state}: {one.reason}")
        elif not result["series"][one.name].get("completed", 1):
            print(f"{one.name}: no request succeeded")
            failed = True
    for gate in result.get("gates", ()):
        why = f" ({gate['reason']})" if gate["reason"] else ""
        print(f"{gate['gate']}: {'holds' if gate['holds'] else 'fails'}: {gate['value']}{why}")
        failed |= not gate["holds"]
    return int(failed)
