"""The flags that several commands of ``jaxinfer bench`` take; names and defaults are vLLM's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxinfer.bench.client import REQUEST_SECONDS
from jaxinfer.bench.figures import METRICS, TITLES
from jaxinfer.bench.gates import gates_of
from jaxinfer.bench.offer import rate_of
from jaxinfer.bench.vllm_flags import CHAT, COMPLETIONS, Backend
from jaxinfer.bench.vllm_flags import DATASETS as FOREIGN_DATASETS
from jaxinfer.core.errors import BenchError

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
DATASETS = (
    *("random", "prefix_repetition", "custom", "sharegpt", "humaneval"),
    *("mooncake", "azure", "sessions"),
)
# Flags that say where files go or what is shown; they do not belong to what was measured.
NOT_MEASURED = frozenset(
    (
        *("command", "output", "result_dir", "result_filename", "save_result", "resume", "gate"),
        *("disable_tqdm", "profile", "profile_num_steps", "append_result", "output_json"),
        "api_key",
    )
)


class Parser(argparse.ArgumentParser):
    """A parser that takes vLLM's spelling with underscores too, and knows no abbreviations."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"jaxinfer bench {command}", description=description, allow_abbrev=False
        )

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """``--request_rate`` as ``--request-rate``."""
        dashed = []
        for argument in args or ():
            flag, equals, value = argument.partition("=")
            dashed.append(
                (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value
            )
        return super().parse_known_args(dashed, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with 2, as the other commands do for wrong usage."""
        self.exit(2, f"Usage: {self.prog} [OPTIONS]\n\nError: {message}\n")


def add_server(parser: argparse.ArgumentParser) -> None:
    """The server that is measured."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend", action=Backend, help="openai-chat and others: the route of chats, or not"
    )
    server.add_argument("--base-url", help="instead of --host and --port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE")
    server.add_argument("--api-key", help="also from JAXINFER_API_KEY or OPENAI_API_KEY")
    server.add_argument("--insecure", action="store_true", help="do not check its certificate")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--served-model-name", help="of requests, if --model is the tokenizer's")
    server.add_argument(
        "--ready-check-timeout-sec", type=not_negative, default=600, help="0: do not wait"
    )
    add_timeout(server)
    server.add_argument("--server-pid", type=int, help="also report memory of its process tree")
    server.add_argument("--device", help="name of the server's accelerator, for the report")


def add_timeout(parser: Any) -> None:
    """How long the client waits for an answer."""
    parser.add_argument(
        "--request-timeout-sec",
        type=positive,
        default=REQUEST_SECONDS,
        help="after which an answer has failed; default: 6 hours",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The requests and their times."""
    load = parser.add_argument_group("workload")
    load.add_argument("--endpoint", default=COMPLETIONS, help=f"or {CHAT}")
    load.add_argument("--dataset-name", type=_dataset, choices=DATASETS, default="random")
    load.add_argument(
        "--dataset-path",
        type=Path,
        help="JSON lines with 'prompt' (custom, humaneval), ShareGPT's JSON, a trace, or turns of "
        "sessions; or .gz",
    )
    load.add_argument("--num-prompts", type=count, default=1000, help="or sessions")
    load.add_argument("--random-input-len", "--input-len", type=count, default=1024)
    load.add_argument("--random-output-len", type=count, default=128)
    load.add_argument(
        "--random-range-ratio",
        type=_ratios,
        default=(0.0,),
        help='of both lengths, or \'{"input": 0.3, "output": 0.5}\'',
    )
    load.add_argument("--random-prefix-len", "--prefix-len", type=int, default=0)
    load.add_argument("--prefix-repetition-prefix-len", type=count, default=256)
    load.add_argument("--prefix-repetition-suffix-len", type=count, default=256)
    load.add_argument("--prefix-repetition-num-prefixes", type=count, default=10)
    load.add_argument("--prefix-repetition-output-len", type=count, default=128)
    load.add_argument(
        *("--output-len", "--custom-output-len", "--sharegpt-output-len", "--hf-output-len"),
        type=_output_len,
        help="of every answer, in every dataset; -1 or not given: as the dataset says",
    )
    load.add_argument("--disable-shuffle", action="store_true", help="the rows of a file in order")
    load.add_argument("--no-oversample", action="store_true", help="no row of a file twice")
    load.add_argument(
        "--time-scale", type=positive, default=1.0, help="of a file's times and pauses"
    )
    load.add_argument("--max-input-len", type=count, help="of a trace's prompts; cut to it")
    load.add_argument("--max-output-len", type=count, help="of a trace's answers; cut to it")
    load.add_argument(
        "--tokenizer", help="whose ids to draw: as of `jaxinfer serve`, or a tokenizer.json"
    )
    load.add_argument("--vocab-size", type=count, help="instead of --tokenizer")
    load.add_argument("--request-rate", type=_rate, default=math.inf, help="a second; or inf")
    load.add_argument("--burstiness", type=positive, default=1.0, help="1 is Poisson")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    load.add_argument("--ramp-up-start-rps", type=positive, help="the rate at the first request")
    load.add_argument("--ramp-up-end-rps", type=positive, help="and at the last")
    load.add_argument("--max-concurrency", type=count, help="open requests, or sessions")
    load.add_argument("--num-warmups", type=int, default=0, help="requests before, unrecorded")
    load.add_argument("--seed", type=int, default=0)

    fields = parser.add_argument_group(
        "fields of the requests; the server's default when not given"
    )
    fields.add_argument("--ignore-eos", action="store_true")
    fields.add_argument("--temperature", type=float)
    fields.add_argument("--top-p", type=float)
    fields.add_argument("--top-k", type=int)
    fields.add_argument("--min-p", type=float)
    for name in PENALTIES:
        fields.add_argument(f"--{name.replace('_', '-')}", type=float)
    fields.add_argument("--logprobs", type=int)
    fields.add_argument("--extra-body", type=extra_body, default={}, help="a JSON object")


def add_report(parser: argparse.ArgumentParser) -> None:
    """The options of the report: its content and its place."""
    report = parser.add_argument_group("report")
    report.add_argument("--percentile-metrics", type=_names, default=list(TITLES))
    report.add_argument("--metric-percentiles", type=percents, default=[50.0, 90.0, 99.0])
    report.add_argument("--goodput", nargs="*", type=goodput_limit, metavar="METRIC:MS")
    report.add_argument("--save-detailed", action="store_true", help="records with their texts")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_output(report)


def add_output(parser: Any) -> None:
    """Where the run's folder goes, and its gates."""
    parser.add_argument("--output", type=Path, help="folder; default: bench-COMMAND-TIME")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        type=_gates,
        metavar="LIMIT",
        help="exit with 1 unless it holds: 'ttft_p99<200ms', 'tpot_p50<=1.0*vllm'; repeat it",
    )


def add_profile(parser: Any) -> None:
    """Flags of a profile: a window of steps after the measurement, and its length."""
    profile = parser.add_argument_group("profile")
    profile.add_argument(
        "--profile",
        action="store_true",
        help="after the measurement, trace some steps: kernels by op and step, beside floors",
    )
    profile.add_argument("--profile-num-steps", type=count, default=64, help="at most")


def settings_of(given: argparse.Namespace) -> dict[str, str]:
    """The flags that decide what is measured, as text; headers without their values, as keys."""
    shown = dict(vars(given))
    if "header" in shown:
        shown["header"] = [text.partition("=")[0] for text in shown["header"]]
    return {
        name: str(value)
        for name, value in sorted(shown.items())
        if value not in (None, False, [], {}) and name not in NOT_MEASURED
    }


def report_fields(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Run`` that come from the flags of ``add_report``."""
    return {
        "percentiles": tuple(given.metric_percentiles),
        "metrics": tuple(given.percentile_metrics),
        "goodput": dict(given.goodput or ()),
        "gates": given.gate,
    }


def request_fields(given: argparse.Namespace) -> dict[str, Any]:
    """The fields that every request has."""
    names = ("temperature", "top_p", "top_k", "min_p", *PENALTIES, "logprobs")
    named = {name: getattr(given, name) for name in names}
    fields = {name: value for name, value in named.items() if value is not None}
    if "logprobs" in fields and given.endpoint.endswith("/chat/completions"):
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return fields | ({"ignore_eos": True} if given.ignore_eos else {}) | given.extra_body


def headers_of(texts: list[str]) -> Mapping[str, str]:
    """``NAME=VALUE`` as headers; raises ``BenchError`` for another form."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, equals, _) in zip(texts, pairs, strict=True) if not equals]:
        raise BenchError(f"--header {wrong[0]!r} has no value; write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _dataset(text: str) -> str:
    name = text.replace("-", "_")
    if advice := FOREIGN_DATASETS.get(name):
        raise argparse.ArgumentTypeError(f"{text} is not a dataset here: {advice}")
    return name


def _output_len(text: str) -> int | None:
    return None if text == "-1" else count(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(METRICS)}")
    return names


def percents(text: str) -> list[float]:
    """Percentiles with commas between them."""
    numbers = [_number(part) for part in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are from 0 to 100")
    return numbers


def goodput_limit(text: str) -> tuple[str, float]:
    """``ttft:200``: a metric and its limit in ms."""
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{name}: a limit is on ttft, tpot or e2el")
    return name, _number(limit)


def _gates(text: str) -> str:
    try:
        gates_of(text)
    except BenchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def extra_body(text: str) -> dict[str, Any]:
    """A JSON object of fields that leave a request one streamed answer, as records have it."""
    fields = json_object(text)
    if own := fields.keys() & {"stream", "stream_options", "prompt", "messages", "model"}:
        raise argparse.ArgumentTypeError(f"{min(own)} is a field that the benchmark sets")
    several = [name for name in ("n", "best_of") if fields.get(name) not in (None, 1)]
    if several or fields.get("use_beam_search"):
        name = (*several, "use_beam_search")[0]
        raise argparse.ArgumentTypeError(f"{name}: a request has one answer in a benchmark")
    return fields


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: not a JSON object")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error


def _rate(text: str) -> float:
    try:
        return rate_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> float:
    """A finite number above 0."""
    if not (number := _number(text)) > 0 or math.isinf(number):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def not_negative(text: str) -> float:
    """A finite number, 0 or above."""
    return 0.0 if text in ("0", "0.0") else positive(text)


def _ratio(text: str) -> float:
    if not 0 <= (number := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return number


def _ratios(text: str) -> tuple[float, ...]:
    """One ratio, or those of inputs and outputs."""
    if not text.lstrip().startswith("{"):
        return (_ratio(text),)
    named = json_object(text)
    if named.keys() != {"input", "output"}:
        raise argparse.ArgumentTypeError(f"{text} has not one ratio of input and one of output")
    return _ratio(str(named["input"])), _ratio(str(named["output"]))


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)
