"""``jaxinfer bench throughput`` and ``latency``: ``LLM.generate`` without a server.

Both time whole calls of ``LLM.generate``: the throughput of many prompts at once, and the latency
of one batch, call after call.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.arguments import (
    Parser,
    add_output,
    add_profile,
    add_workload,
    count,
    json_object,
    percents,
    request_fields,
    settings_of,
)
from jaxinfer.bench.circumstances import write_report
from jaxinfer.bench.figures import duration, table
from jaxinfer.bench.folder import TRACE, Folder, default_path, finished, now
from jaxinfer.bench.numbers import mean, percentile, rotated
from jaxinfer.bench.offer import NotReady
from jaxinfer.bench.offline_peer import OfflinePeer
from jaxinfer.bench.records import MISSING, Record, Run, Series
from jaxinfer.bench.requests import FILES, Requests
from jaxinfer.bench.results import OURS
from jaxinfer.bench.serve import conclude
from jaxinfer.bench.vllm_flags import (
    OFFLINE_REFUSED,
    OFFLINE_WITHOUT_EFFECT,
    REFUSED,
    add_told,
)
from jaxinfer.bench.workload import Query, fingerprint
from jaxinfer.core.errors import BenchError

if TYPE_CHECKING:
    from jaxinfer import LLM, AsyncLLM

type ReadSettings = Callable[[list[str]], dict[str, Any]]  # the engine's flags, as its settings

type Call = Callable[[Sequence[Query]], list[Record]]  # one call: a record for each prompt

PEERS: Mapping[str, str] = MappingProxyType(  # that ``throughput`` knows, and what takes --args
    {"vllm": "LLM", "sglang": "Engine"}
)
# flags of a load that needs a server
OF_SERVERS = (
    *("endpoint", "request_rate", "burstiness", "ramp_up_strategy", "max_concurrency"),
    *("num_warmups", "time_scale"),
)
GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0.0})  # unless a flag says otherwise
LATENCY_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)  # vLLM's


def parser() -> Parser:
    """The command line of ``throughput``."""
    made = Parser("throughput", "Tokens a second of many prompts at once, without a server.")
    add_workload(made)
    made.add_argument("--num-iters", type=count, default=3, help="calls that are timed")
    made.add_argument("--num-iters-warmup", type=int, default=1, help="calls that are not")
    made.add_argument("--output-json", type=Path, help="also vLLM's JSON file")
    add_told(made, OFFLINE_WITHOUT_EFFECT, [*OFFLINE_REFUSED, *REFUSED])
    made.add_argument("--backends", type=_backends, default=(OURS,), help=_backends.__doc__)
    for name, takes in PEERS.items():
        group = made.add_argument_group(f"{name}, in turns with jaxinfer, on the same device")
        group.add_argument(f"--python-{name}", default=sys.executable, metavar="PATH")
        group.add_argument(f"--model-{name}")
        group.add_argument(f"--args-{name}", type=json_object, default={}, help=f"of {takes}, JSON")
    add_profile(made)
    add_output(made)
    return made


def throughput(arguments: list[str], read_settings: ReadSettings) -> int:
    """Tokens a second of many prompts given at once, next to other engines'; the exit code."""
    made = parser()
    given, more = made.parse_known_args(arguments)
    requests, settings = Requests(given), read_settings(more)
    _check_load(made, given, requests)
    fields = {**GREEDY, **request_fields(given)}
    run = Run(
        command="throughput",
        created=now(),
        settings=named(settings) | settings_of(given),
        gates=given.gate,
        metrics=("e2el",),
    )
    folder = Folder.create(given.output or default_path("throughput"), run)
    with finished(folder), _peers(given, settings, folder) as peers:
        llm = engine_of(settings)  # while the peers start as well
        folder.environment |= device_of(llm)
        if given.vocab_size is None and given.tokenizer is None:
            given.vocab_size = llm.model.config.vocab_size
        calls: dict[str, Call] = {OURS: lambda queries: _timed(llm, queries, fields)}
        for name, peer in peers.items():
            calls[name] = _calls_of(name, peer, fields, folder)
        for number in range(-given.num_iters_warmup, given.num_iters):
            # other prompts than before: no prefix is cached
            queries = requests.queries(given.num_prompts, given.num_iters_warmup + number)
            for name in rotated(list(calls), number):
                _call(name, calls[name], queries, number, folder)
        if given.profile:
            last = given.num_iters_warmup + given.num_iters
            profile_call(llm, requests.queries(given.num_prompts, last), fields, given, folder)
    if given.output_json:
        write_report(given.output_json, vllm_throughput(folder.records()["call-0"]))
    return _printed(folder)


def vllm_throughput(records: Sequence[Record]) -> dict[str, Any]:
    """One call under the names of ``vllm bench throughput --output-json``."""
    seconds = duration(records)
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    return {
        "elapsed_time": seconds,
        "num_requests": len(records),
        "total_num_tokens": tokens,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second": tokens / seconds,
    }


def vllm_latency(records: Sequence[Record], percents: Sequence[float]) -> dict[str, Any]:
    """The calls under the names of ``vllm bench latency --output-json``."""
    seconds = [record.latency_ns / 1e9 for record in records]
    return {
        "avg_latency": mean(seconds),
        "latencies": seconds,
        "percentiles": {f"{percent:g}": percentile(seconds, percent) for percent in percents},
    }


def _check_load(made: Parser, given: argparse.Namespace, requests: Requests) -> None:
    """Raise ``BenchError`` for flags and datasets that only a server's load has."""
    changed = [name for name in OF_SERVERS if getattr(given, name) != made.get_default(name)]
    if changed:
        raise BenchError(
            f"--{changed[0].replace('_', '-')} is of requests to a server, and `throughput` gives "
            "all prompts at once; leave it out, or use `jaxinfer bench serve`"
        )
    is_chat = given.dataset_name == "sessions" or (
        given.dataset_name in FILES
        and any(isinstance(one.prompt, list) and one.messages for one in requests.queries(1))
    )
    if is_chat:
        raise BenchError(
            "`throughput` takes texts and token ids, no messages; use `jaxinfer bench serve "
            "--endpoint /v1/chat/completions`"
        )


def _backends(text: str) -> tuple[str, ...]:
    """jaxinfer, and with commas vllm, sglang"""
    names = tuple(dict.fromkeys(text.split(",")))
    if OURS not in names or set(names) - {OURS, *PEERS}:
        known = f"{OURS} and any of {', '.join(PEERS)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {known}")
    return names


@contextmanager
def _peers(
    given: argparse.Namespace, settings: Mapping[str, Any], folder: Folder
) -> Generator[dict[str, OfflinePeer]]:
    """The other engines' processes while they are needed."""
    peers: dict[str, OfflinePeer] = {}
    with ExitStack() as stack:
        for name in given.backends:
            if name == OURS:
                continue
            own = {key: getattr(given, f"{key}_{name}") for key in ("python", "model", "args")}
            model = own["model"] or settings.get("model")
            if model is None:
                raise BenchError(f"{name} has no model; give --model or --model-{name}")
            peer = OfflinePeer(name, own["python"], model, own["args"], folder.log_path(name))
            peers[name] = stack.enter_context(peer)
        yield peers


def _calls_of(name: str, peer: OfflinePeer, fields: Mapping[str, Any], folder: Folder) -> Call:
    """Timed calls of a peer, once it is ready; every call of one that has ended raises
    ``NotReady``.
    """
    reason = ""
    try:
        folder.environment.setdefault("engines", {})[name] = peer.wait()
    except NotReady as error:
        reason = str(error)

    def call(queries: Sequence[Query]) -> list[Record]:
        nonlocal reason
        if reason:
            raise NotReady(reason)
        try:
            return peer.call(queries, fields)
        except NotReady as error:
            reason = str(error)
            raise

    return call


def _call(name: str, call: Call, queries: Sequence[Query], number: int, folder: Folder) -> None:
    """Add one call's series, or say why there is none; calls below 0 are warm-ups."""
    series = Series(
        name=f"call-{number}" if name == OURS else f"{name}-{number}",
        backend=name,
        round=number,
        requests=len(queries),
        workload=fingerprint(queries, [0.0] * len(queries)),
    )
    try:
        records = call(queries)
    except NotReady as error:
        series.state, series.reason, records = MISSING, str(error), []
    if number >= 0:
        folder.add(series, records)


def latency(arguments: list[str], read_settings: ReadSettings) -> int:
    """Milliseconds of one batch from call to return; the exit code."""
    made = Parser("latency", "Milliseconds of one batch of prompts, without a server.")
    made.add_argument("--input-len", type=count, default=32)
    made.add_argument("--output-len", type=count, default=128)
    made.add_argument("--batch-size", type=count, default=8)
    made.add_argument("--num-iters-warmup", type=int, default=10)
    made.add_argument("--num-iters", type=count, default=30)
    made.add_argument("--metric-percentiles", type=percents, default=LATENCY_PERCENTILES)
    made.add_argument("--output-json", type=Path, help="also vLLM's JSON file")
    add_told(made, OFFLINE_WITHOUT_EFFECT, [one for one in REFUSED if "--n" in one.flags.split()])
    add_profile(made)
    add_output(made)
    given, more = made.parse_known_args(arguments)
    settings = read_settings(more)
    llm = engine_of(settings)
    run = Run(
        command="latency",
        created=now(),
        settings=named(settings) | settings_of(given),
        gates=given.gate,
        percentiles=tuple(given.metric_percentiles),
        metrics=("e2el",),
    )
    vocab_size = llm.model.config.vocab_size
    fields = {**GREEDY, "ignore_eos": True}
    folder = Folder.create(given.output or default_path("latency"), run, device_of(llm))
    with finished(folder):
        records: list[Record] = []
        start = time.perf_counter_ns()
        for number in range(given.num_iters_warmup + given.num_iters):
            if number == given.num_iters_warmup:
                start = time.perf_counter_ns()
            queries = _batch(number, given, vocab_size)  # new prompts: no prefix is cached
            began = time.perf_counter_ns() - start
            rows = _timed(llm, queries, fields)
            if number >= given.num_iters_warmup:
                records.append(_whole(rows, began))
        folder.add(Series(name="latency", requests=len(records)), records)
        if given.profile:
            last = given.num_iters_warmup + given.num_iters
            profile_call(llm, _batch(last, given, vocab_size), fields, given, folder)
    if given.output_json:
        write_report(given.output_json, vllm_latency(records, given.metric_percentiles))
    return _printed(folder)


def profile_call(
    llm: LLM,
    queries: Sequence[Query],
    fields: Mapping[str, Any],
    given: argparse.Namespace,
    folder: Folder,
) -> None:
    """Trace the first steps of one more call, and write its kernels to the run's folder.

    Raises ``BenchError`` if the trace has no events of a device.
    """
    from jaxinfer.bench.profile import profiled_in

    llm.start_profile(folder.path / TRACE, given.profile_num_steps)
    try:
        _timed(llm, queries, fields)
    finally:
        written = llm.stop_profile()
    folder.add_profile(profiled_in(written, folder.path))


def _batch(number: int, given: argparse.Namespace, vocab_size: int) -> list[Query]:
    from jaxinfer.bench.workload import RandomLengths, random_queries

    lengths = RandomLengths(input_len=given.input_len, output_len=given.output_len)
    return random_queries(lengths, range(vocab_size), given.batch_size, seed=number)


def _whole(rows: Sequence[Record], began: int) -> Record:
    """One record for a call: its tokens are those of the batch."""
    return Record(
        start_ns=began,
        gaps_ns=rows[0].gaps_ns,
        end_ns=rows[0].end_ns,
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
    )


def engine_of(settings: Mapping[str, Any]) -> LLM:
    """The engine of these settings."""
    from jaxinfer import LLM
    from jaxinfer.engine.start.progress import progress_on

    own = dict(settings)
    return LLM(own.pop("model", None), progress=progress_on(sys.stderr), **own)


def named(settings: Mapping[str, Any]) -> dict[str, str]:
    """An engine's settings as text, for the run's description."""
    return {f"engine_{name}": str(value) for name, value in sorted(settings.items())}


def device_of(llm: LLM | AsyncLLM) -> dict[str, Any]:
    import jax

    devices = {device for leaf in jax.tree.leaves(llm.model.params) for device in leaf.devices()}
    return {"device": min(device.device_kind for device in devices), "num_devices": len(devices)}


def _timed(llm: LLM, queries: Sequence[Query], fields: Mapping[str, Any]) -> list[Record]:
    """One call of ``LLM.generate``: a record for each prompt, all of the call's duration."""
    from jaxinfer import SamplingParams

    prompts = [
        query.prompt if isinstance(query.prompt, str) else {"prompt_token_ids": query.prompt}
        for query in queries
    ]
    sampling = [SamplingParams(**fields, max_tokens=query.max_tokens) for query in queries]
    start = time.perf_counter_ns()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    spent = time.perf_counter_ns() - start
    if len(outputs) != len(queries):
        raise BenchError(f"{len(queries)} prompts have {len(outputs)} answers; report this")
    return [
        Record(
            gaps_ns=[spent],
            end_ns=spent,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=len(output.outputs[0].token_ids),
        )
        for output in outputs
    ]


def _printed(folder: Folder) -> int:
    result = folder.finish()
    for figures in result["series"].values():
        if math.isfinite(figures.get("duration", math.nan)):
            print(table(figures, folder.run.percentiles))
    return conclude(folder, result)
