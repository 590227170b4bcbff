"""``jaxinfer bench compare``: the same requests to several engines, round by round.

In each round every engine gets the same prompts at the same times; the next round has other ones,
so that no prefix is cached, and begins with another engine. One server runs at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxinfer.bench.arguments import (
    Parser,
    add_profile,
    add_report,
    add_timeout,
    add_workload,
    count,
    extra_body,
    headers_of,
    positive,
    report_fields,
    request_fields,
    settings_of,
)
from jaxinfer.bench.backends import BACKENDS, Peer
from jaxinfer.bench.client import Client
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.monitor import Sample, missing_telemetry
from jaxinfer.bench.numbers import rotated
from jaxinfer.bench.offer import NotReady, in_loop
from jaxinfer.bench.profile import profile_server
from jaxinfer.bench.records import COMPLETE, MISSING, PARTIAL, Record, Run, Series
from jaxinfer.bench.report import number as shown
from jaxinfer.bench.requests import Load, Requests
from jaxinfer.bench.results import OURS
from jaxinfer.bench.serve import Target, conclude, first_model, level_size, rates_of
from jaxinfer.bench.server_process import CommandProcess, free_port
from jaxinfer.bench.workload import Query, body_of
from jaxinfer.core.errors import BenchError

EXIT_SECONDS = 5.0  # between a server's last byte and its exit status


def parser() -> Parser:
    """The command line."""
    made = Parser("compare", (__doc__ or "").splitlines()[0])
    made.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=list(BACKENDS),
        help=f"default: {','.join(BACKENDS)}",
    )
    made.add_argument("--model", help="of every engine that has no --model-NAME")
    made.add_argument("--rounds", type=count, default=3)
    made.add_argument("--prompts", choices=("auto", "ids", "text"), default="auto")
    made.add_argument("--ready-check-timeout-sec", type=positive, default=600)
    made.add_argument(
        "--header", nargs="*", default=[], metavar="NAME=VALUE", help="to all engines"
    )
    add_timeout(made)
    made.add_argument("--sweep", metavar="RATES", help="several rates in each round: 1,4,8")
    made.add_argument("--resume", action="store_true", help="measure what --output lacks")
    for name in BACKENDS:
        group = made.add_argument_group(name)
        group.add_argument(f"--python-{name}", default=sys.executable, metavar="PATH")
        group.add_argument(f"--url-{name}", metavar="URL", help="a server that runs already")
        group.add_argument(f"--command-{name}", help="with {model} and {port}, in its place")
        group.add_argument(f"--model-{name}")
        group.add_argument(f"--args-{name}", type=shlex.split, default=[], metavar="FLAGS")
        group.add_argument(f"--extra-body-{name}", type=extra_body, default={}, metavar="JSON")
    add_workload(made)
    add_report(made)
    add_profile(made)
    return made


def peers_of(given: argparse.Namespace) -> list[Peer]:
    """The engines of the command line; raises ``BenchError`` for one without a model."""
    if unknown := [name for name in given.backends if name not in BACKENDS]:
        raise BenchError(f"{unknown[0]!r} is no backend; choose among {', '.join(BACKENDS)}")
    peers: list[Peer] = []
    for name in dict.fromkeys(given.backends):
        own = {key: getattr(given, f"{key}_{name}") for key in ("python", "url", "command", "args")}
        model = getattr(given, f"model_{name}") or given.model
        if model is None and own["url"] is None:
            raise BenchError(f"{name} has no model; give --model or --model-{name}")
        peers.append(
            Peer(
                backend=BACKENDS[name],
                model=model or "",
                python=own["python"],
                url=own["url"],
                command=own["command"],
                more=tuple(own["args"]),
                extra_body=getattr(given, f"extra_body_{name}"),
            )
        )
    return peers


@dataclass
class Level:
    """One round of one engine at one rate."""

    series: Series
    queries: list[Query]
    times: list[float]


class Comparison:
    """The rounds of a run: what each engine is sent, and what came of it."""

    def __init__(self, given: argparse.Namespace, peers: Sequence[Peer], folder: Folder) -> None:
        self.given, self.peers, self.folder = given, peers, folder
        self.requests = Requests(given)
        self.rates = rates_of(given.sweep) if given.sweep else [given.request_rate]
        needs_text = not all(peer.backend.takes_token_ids for peer in peers)
        self.texts = given.prompts == "text" or (given.prompts == "auto" and needs_text)
        self.absent: dict[str, str] = {}  # why a backend cannot be started
        self.versions: dict[str, str] = {}
        folder.environment["engines"] = self.versions

    def run(self) -> None:
        """Measure every series that the folder lacks."""
        done = {one.name for one in self.folder.run.series if one.state == COMPLETE}
        for peer in self.peers:
            try:
                self.versions[peer.name] = peer.version()
            except NotReady as error:
                self.absent[peer.name] = str(error)
        if any(peer.url is None for peer in self.peers):
            self.folder.environment |= missing_telemetry(os.getpid())
        by_name = {peer.name: peer for peer in self.peers}
        for round_ in range(self.given.rounds):
            loads = [self._queries(number, round_) for number in range(len(self.rates))]
            for name in rotated(list(by_name), round_):
                levels = [
                    Level(self._series(name, rate, round_), *load)
                    for rate, load in zip(self.rates, loads, strict=True)
                ]
                if missing := [one for one in levels if one.series.name not in done]:
                    self._measure(by_name[name], missing)

    def _queries(self, number: int, round_: int) -> tuple[list[Query], list[float]]:
        """The requests of a round at one of the rates; no two of them have a prompt in common."""
        given, rate = self.given, self.rates[number]
        count = level_size(rate) if given.sweep else given.num_prompts
        load = self.requests.load("", count, rate, round_ * len(self.rates) + number)
        return self.requests.as_sent(load.queries, self.texts), load.times

    def _series(self, name: str, rate: float, round_: int) -> Series:
        at = f"-rate-{rate:g}" if self.given.sweep else ""
        offered = None if math.isinf(rate) else rate
        return Series(name=f"{name}-{round_}{at}", backend=name, round=round_, rate=offered)

    def _measure(self, peer: Peer, levels: Sequence[Level]) -> None:
        """Start an engine, offer it each level, end it; levels it did not reach are missing."""
        left = list(levels)
        try:
            if reason := self.absent.get(peer.name):
                raise NotReady(reason)
            self._started(peer, left)
            reason = "its server ended at the level before"
        except NotReady as error:
            reason = self.absent[peer.name] = str(error)
        for level in left:
            level.series.state, level.series.reason = MISSING, reason
            self._add(level.series, [])

    def _add(
        self, series: Series, records: Sequence[Record], samples: Sequence[Sample] = ()
    ) -> None:
        self.folder.add(series, records, samples)
        words = series.reason or f"{len(records)} requests"
        print(f"{series.name}: {series.state}: {words}", flush=True)

    def _started(self, peer: Peer, left: list[Level]) -> None:
        if peer.url is not None:
            in_loop(self._offer(peer, peer.url, None, left))
            return
        port, last = free_port(), left[-1].series
        log = self.folder.log_path(left[0].series.name).open("wb")
        with tempfile.TemporaryDirectory() as profiles:
            command, key = peer.command_line(port), ""
            if self.given.profile and peer.name == OURS and last.round == self.given.rounds - 1:
                key = secrets.token_hex()
                command += ["--profiler-dir", profiles, "--admin-api-key", key]
            try:
                process = CommandProcess(command, log)
            except NotReady:
                log.close()
                raise
            with process:
                url = f"http://127.0.0.1:{port}"
                in_loop(self._offer(peer, url, process, left))
                if key and last.state == COMPLETE:
                    in_loop(self._profile(peer, url, key, process))

    async def _profile(self, peer: Peer, url: str, key: str, process: CommandProcess) -> None:
        """After the last round of our own server, trace it under the last rate's load."""
        given, rate = self.given, self.rates[-1]
        count = level_size(rate) if given.sweep else given.num_prompts
        load = self.requests.load("", count, rate, given.rounds * len(self.rates))
        queries = self.requests.as_sent(load.queries, self.texts)
        with closing(Client(url, {"Authorization": f"Bearer {key}"})) as client:
            model = await self._model(peer, client, process.until)
            target = Target(client, model, given.endpoint, shows_progress=False)
            same = self._load(peer, model, queries, load.times)
            offer = partial(target.offered, same, given.max_concurrency)
            await profile_server(client, offer, given.profile_num_steps, self.folder)

    async def _offer(
        self, peer: Peer, url: str, process: CommandProcess | None, left: list[Level]
    ) -> None:
        """Offer the levels one after the other, and take each from the list once it is added."""
        given, begin = self.given, time.perf_counter()
        until = process.until if process else _awaited
        headers, seconds = headers_of(given.header), given.request_timeout_sec
        with closing(Client(url, headers, seconds=seconds)) as client:
            model = await self._model(peer, client, until)
            if not self.versions.get(peer.name):
                self.versions[peer.name] = await version_of(client, peer.backend.version_route)
            target = Target(
                *(client, model, given.endpoint, process.pid if process else None),
                shows_progress=not given.disable_tqdm,
            )
            first = self.requests.as_sent(self.requests.warm_up(), self.texts)
            warm = self._load(peer, model, first, [0.0])
            await until(target.warm_up(warm, given.num_warmups, given.ready_check_timeout_sec))
            left[0].series.facts["ready_s"] = time.perf_counter() - begin
            while left:
                series = left[0].series
                load = self._load(peer, model, left[0].queries, left[0].times)
                records = await target.measure(
                    load, series, given.max_concurrency, given.save_detailed
                )
                if not peer.backend.streams_usage and series.state == COMPLETE:
                    records = await counted(target, load.bodies, records)
                seconds = EXIT_SECONDS if series.state != COMPLETE else 0.0
                if process and (end := await process.end_within(seconds)):
                    series.state, series.reason = PARTIAL, end
                self._add(series, records, target.samples)
                target.check_ended()
                left.pop(0)
                if series.state != COMPLETE:
                    return

    def _load(self, peer: Peer, model: str, queries: list[Query], times: list[float]) -> Load:
        """The requests as this server takes them."""
        given, fields = self.given, peer.fields(request_fields(self.given))
        usage = "stream_options" not in peer.backend.omitted
        if not peer.backend.streams_usage and any(query.continues for query in queries):
            raise NotReady("its streams have no token counts, and these turns cannot be sent again")
        if not peer.backend.streams_usage and fields.get("temperature") != 0:
            raise NotReady(
                "its streams have no token counts, so each request is sent again, and without "
                "--temperature 0 the second answer would be another one"
            )
        bodies = [body_of(one, given.endpoint, model, fields, usage=usage) for one in queries]
        return Load(queries, bodies, times)

    async def _model(self, peer: Peer, client: Client, until: Any) -> str:
        """The name that requests give to the model."""
        if not peer.backend.lists_models:
            return peer.model
        seconds = self.given.ready_check_timeout_sec
        try:
            return await until(first_model(client, seconds))
        except NotReady:
            raise
        except BenchError as error:
            raise NotReady(f"it was not ready in {seconds:g} s ({error})") from error


async def _awaited[T](wait: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, for a server that another program started."""
    return await wait


async def version_of(client: Client, route: str) -> str:
    """The version in the answer of a server's route; "" of a server without that route."""
    answer = await client.get(route)
    try:
        return str(json.loads(answer.body)["version"])
    except (ValueError, LookupError, TypeError):
        return ""


async def counted(
    target: Target, bodies: Sequence[bytes], records: Sequence[Record]
) -> list[Record]:
    """The records with the server's counts, which its streams lack: each request is sent again
    without a stream, after the measurement.
    """
    found: list[Record] = []
    for body, record in zip(bodies, records, strict=True):
        asked = {**json.loads(body), "stream": False}
        answer = await target.client.post(target.endpoint, json.dumps(asked).encode())
        found.append(record.with_counts(answer.prompt_tokens, answer.output_tokens))
    return found


def main(arguments: list[str]) -> int:
    """Measure, print, write; the exit code."""
    given = parser().parse_args(arguments)
    peers = peers_of(given)
    started = [one.name for one in peers if one.url is None and one.command is None]
    if given.profile and OURS not in started:
        raise BenchError(
            "--profile is of jaxinfer's server, which `compare` must start itself; name jaxinfer "
            "among --backends, without --url-jaxinfer, or leave --profile out"
        )
    described = Run(
        command="compare", created=now(), settings=settings_of(given), **report_fields(given)
    )
    path = given.output or default_path("compare")
    resumed = given.resume and path.exists() and any(path.iterdir())
    folder = Folder.resume(path, described) if resumed else Folder.create(path, described)
    with finished(folder):
        Comparison(given, peers, folder).run()
    result = folder.finish()
    for title, one in result["ratios"].items():
        if one["reason"]:
            print(f"{title}: {one['reason']}")
        for figure, row in one["figures"].items():
            if figure.startswith(("p50", "p99", "output")):
                print(f"{figure:20} {shown(row['median']):>8} of {title}")
    return conclude(folder, result)
