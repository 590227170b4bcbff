"""``jaxinfer bench throughput`` and ``latency``: ``LLM.generate`` without a server.

Both time whole calls of ``LLM.generate``: the throughput of many prompts at once, and the latency
of one batch, call after call.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.arguments import (
    Parser,
    add_output,
    add_profile,
    add_workload,
    count,
    percents,
    settings_of,
)
from jaxinfer.bench.figures import table
from jaxinfer.bench.folder import TRACE, Folder, default_path, finished, now
from jaxinfer.bench.records import Record, Run, Series
from jaxinfer.bench.requests import Requests
from jaxinfer.bench.serve import conclude
from jaxinfer.bench.workload import Query
from jaxinfer.core.errors import BenchError

if TYPE_CHECKING:
    from jaxinfer import LLM

type ReadSettings = Callable[[list[str]], dict[str, Any]]  # the engine's flags, as its settings

LATENCY_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)  # vLLM's


def throughput(arguments: list[str], read_settings: ReadSettings) -> int:
    """Tokens a second of many prompts given at once; the exit code."""
    parser = Parser("throughput", "Tokens a second of many prompts at once, without a server.")
    add_workload(parser)
    parser.add_argument("--num-iters", type=count, default=3, help="calls that are timed")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="calls that are not")
    add_profile(parser)
    add_output(parser)
    given, more = parser.parse_known_args(arguments)
    requests = Requests(given)
    llm, settings = _engine(more, read_settings)
    if given.vocab_size is None and given.tokenizer is None:
        given.vocab_size = llm.model.config.vocab_size
    run = Run(
        command="throughput",
        created=now(),
        settings=settings | settings_of(given),
        gates=given.gate,
        metrics=("e2el",),
    )
    folder = Folder.create(given.output or default_path("throughput"), run, _device(llm))
    with finished(folder):
        for number in range(-given.num_iters_warmup, given.num_iters):
            # other prompts than before: no prefix is cached
            queries = requests.queries(given.num_prompts, given.num_iters_warmup + number)
            records = _timed(llm, queries, given)
            if number < 0:
                continue
            folder.add(Series(name=f"call-{number}", round=number, requests=len(queries)), records)
        if given.profile:
            last = given.num_iters_warmup + given.num_iters
            profile_call(llm, requests.queries(given.num_prompts, last), given, folder)
    return _printed(folder)


def latency(arguments: list[str], read_settings: ReadSettings) -> int:
    """Milliseconds of one batch from call to return; the exit code."""
    parser = Parser("latency", "Milliseconds of one batch of prompts, without a server.")
    parser.add_argument("--input-len", type=count, default=32)
    parser.add_argument("--output-len", type=count, default=128)
    parser.add_argument("--batch-size", type=count, default=8)
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--num-iters", type=count, default=30)
    parser.add_argument("--metric-percentiles", type=percents, default=LATENCY_PERCENTILES)
    add_profile(parser)
    add_output(parser)
    given, more = parser.parse_known_args(arguments)
    llm, settings = _engine(more, read_settings)
    run = Run(
        command="latency",
        created=now(),
        settings=settings | settings_of(given),
        gates=given.gate,
        percentiles=tuple(given.metric_percentiles),
        metrics=("e2el",),
    )
    vocab_size = llm.model.config.vocab_size
    given.temperature, given.ignore_eos = 0.0, True
    folder = Folder.create(given.output or default_path("latency"), run, _device(llm))
    with finished(folder):
        records: list[Record] = []
        start = time.perf_counter_ns()
        for number in range(given.num_iters_warmup + given.num_iters):
            if number == given.num_iters_warmup:
                start = time.perf_counter_ns()
            queries = _batch(number, given, vocab_size)  # new prompts: no prefix is cached
            began = time.perf_counter_ns() - start
            rows = _timed(llm, queries, given)
            if number >= given.num_iters_warmup:
                records.append(_whole(rows, began))
        folder.add(Series(name="latency", requests=len(records)), records)
        if given.profile:
            last = given.num_iters_warmup + given.num_iters
            profile_call(llm, _batch(last, given, vocab_size), given, folder)
    return _printed(folder)


def profile_call(
    llm: LLM, queries: Sequence[Query], given: argparse.Namespace, folder: Folder
) -> None:
    """Trace the first steps of one more call, and write its kernels to the run's folder.

    Raises ``BenchError`` if the trace has no events of a device.
    """
    from jaxinfer.bench.profile import profiled_in

    llm.start_profile(folder.path / TRACE, given.profile_num_steps)
    try:
        _timed(llm, queries, given)
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


def _engine(more: list[str], read_settings: ReadSettings) -> tuple[LLM, dict[str, str]]:
    """The engine of the remaining flags, and those as text."""
    from jaxinfer import LLM
    from jaxinfer.engine.start.progress import progress_on

    settings = read_settings(more)
    named = {f"engine_{name}": str(value) for name, value in sorted(settings.items())}
    return LLM(settings.pop("model", None), progress=progress_on(sys.stderr), **settings), named


def _device(llm: LLM) -> dict[str, Any]:
    import jax

    devices = {device for leaf in jax.tree.leaves(llm.model.params) for device in leaf.devices()}
    return {"device": min(device.device_kind for device in devices), "num_devices": len(devices)}


def _timed(llm: LLM, queries: Sequence[Query], given: argparse.Namespace) -> list[Record]:
    """One call of ``LLM.generate``: a record for each prompt, all of the call's duration."""
    from jaxinfer import SamplingParams

    prompts = [
        query.prompt if isinstance(query.prompt, str) else {"prompt_token_ids": query.prompt}
        for query in queries
    ]
    temperature = 0.0 if given.temperature is None else given.temperature
    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=query.max_tokens, ignore_eos=given.ignore_eos
        )
        for query in queries
    ]
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
