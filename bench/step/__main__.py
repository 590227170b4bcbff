"""The public API on one device: TPOT, TTFT, offline tokens per second, start, memory.

Run from the repository root, all groups or some, which are merged in one file:

    .venv/bin/python -m bench.step --output FILE
    .venv/bin/python -m bench.step --only tpot,ttft --batches 1 8 64 --prompts 512 --output FILE

Weights are random and prompts are random token ids: speed depends on neither. Prefix caching is off
except in its own ablation: the same prompts run several times, and a cache would skip the prefill
that is measured. Floors are for the devices in ``floor.CEILINGS``. Rows of a mixture of experts
state how many distinct experts a step read (``experts``); random weights may choose few of them,
unless ``--engine dummy_routing=uniform`` spreads their choices. Groups that follow each other with
the same settings share an engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from bench.step import cases
from bench.step.busy import busy_seconds
from bench.step.cases import GREEDY, SAMPLED, Prompts, Workload, middle
from bench.step.experts import DistinctExperts, share_of
from bench.step.file import Row, environment, facts, merged_report, read_report
from bench.step.memory import SMI, measure_memory
from bench.step.start import measure_starts, start_rows
from jaxinfer import LLM
from jaxinfer.bench.circumstances import write_report
from jaxinfer.bench.floor import CEILINGS, Floor, decode_bytes
from jaxinfer.core.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    prepare_backend,
)
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.models.costs import Costs, costs_of

SHAPES = Path(__file__).parents[1] / "shapes"
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
# The replacements of the kernels that a decode step of these models or a single prompt runs: the
# next choice; for attention it is Triton's, as XLA's steps of 64 rows take half a second. A pin of
# a kernel that norm_gemm replaces switches norm_gemm off as well.
KERNELS = {
    "append_decode": "triton",
    "norm_gemm": "unfused",
    "paged_prefill": "triton",
    "publish": "xla",
    "qk_rope_append": "xla",
    "residual_norm": "xla",
    "sample": "xla",
    "skinny_gemm": "xla",
    "swiglu_gemm": "xla",
}
ABLATIONS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "no-overlap": {"overlap": False},
    "no-links": {"kernels": "links=none"},
    "prefix-caching": {"enable_prefix_caching": True},
    "page-64": {"page_size": 64},
    **{f"{name}-by-{impl}": {"kernels": f"{name}={impl}"} for name, impl in KERNELS.items()},
}


class Bench:
    """One call: the model shapes, the settings of the command line, and the engines."""

    def __init__(self, arguments: argparse.Namespace, work: Workload) -> None:
        self.work, self.seed = work, arguments.seed
        self._commit: str | None = arguments.commit
        self.label: str | None = arguments.label
        self.config: Path = arguments.config
        self.gpt2_config: Path = arguments.gpt2_config
        self._given: dict[str, Any] = dict(arguments.engine)
        self.used: dict[str, Any] = {}  # settings of the engines of the current group
        self._counts: bool = not arguments.uncounted
        self._engine: tuple[LLM, DistinctExperts] | None = None

    def facts(self) -> dict[str, Any]:
        """The facts that all rows of a file share."""
        return {**facts(self._commit), "model": self.config.parent.name}

    def settings(self, config: Path, **more: Any) -> dict[str, Any]:
        """Arguments of ``LLM``: the group's, overridden by those of the command line."""
        always = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": self.seed}
        return {"model": str(config), **always, **more, **self._given}

    def engine(self, config: Path, **more: Any) -> tuple[LLM, DistinctExperts]:
        """An engine: the last one if its settings are the same, else a new one in its memory."""
        settings = self.settings(config, **{"enable_prefix_caching": False, **more})
        if config == self.config:
            settings.setdefault("max_model_len", self.work.max_model_len)
        planned = plan_engine(engine_config(None, settings)).program
        self.model = planned.model.whole  # ``llm.model`` would copy what several devices hold
        if config == self.config:
            settings.setdefault("num_pages", self.work.num_pages(planned.limits))
        if self._engine is None or self.used != settings:
            self._engine = None
            gc.collect()
            llm = LLM(**settings)
            length = self.work.tpot_input + cases.DECODED if self._counts else 0
            self._engine = llm, DistinctExperts(llm, length)
        self.used = settings
        return self._engine

    def share(self, costs: Costs) -> float | None:
        """The share of experts that steps read; None: what uniform choices lead to."""
        return costs.expert_share if self.used.get("dummy_routing") == "same" else None

    def prompts(self, config: Path) -> Prompts:
        """Prompts of the model's vocabulary."""
        return Prompts(json.loads(config.read_text())["vocab_size"], self.seed)


def floor_of(costs: Costs) -> Floor | None:
    """The floor on this device; None if its ceilings have not been measured."""
    import jax

    ceiling = CEILINGS.get(jax.devices()[0].device_kind)
    return ceiling and Floor(costs, ceiling)


def row(metric: str, case: str, samples: list[float], floor: float | None, **more: Any) -> Row:
    """A row of the file; it is also printed."""
    value = middle(samples)
    least = None if floor is None else round(floor, 4)
    samples = [round(sample, 4) for sample in samples]
    floor_text = "" if least is None else f"  floor {least:10.3f}"
    if "distinct_experts" in more:
        floor_text += f"  {more['distinct_experts']:g} of {more['experts']} experts"
    print(f"{metric:16} {case:20} {value:12.3f}{floor_text}", flush=True)
    return {"metric": metric, "case": case, "value": value, "floor": least, **more} | {
        "samples": samples
    }


def _decode_floor_ms(
    floor: Floor | None, batch: int, tokens_in: int, distinct: float | None = None
) -> float | None:
    return floor and 1e3 * floor.decode(batch, _mean_context(tokens_in), distinct)


def _mean_context(tokens_in: int) -> float:
    """Mean context of the steps that TPOT covers: the k-th reads k tokens more than the prompt."""
    return tokens_in + (1 + cases.DECODED) / 2


def tpot(bench: Bench) -> Iterator[Row]:
    """TPOT by batch, and at a long context next to the prediction from the shorter one."""
    work, config = bench.work, bench.config
    llm, experts = bench.engine(config)
    prompts, costs = bench.prompts(config), costs_of(bench.model)
    floor, short = floor_of(costs), dict[int, float]()
    for batch in work.tpot_batches:
        samples = cases.tpot_ms(llm, prompts(batch, work.tpot_input), work.repeats)
        found = experts.decode(prompts(batch, work.tpot_input))
        share = share_of(found) or bench.share(costs)
        least = _decode_floor_ms(floor, batch, work.tpot_input, share)
        yield row("tpot_ms", f"b{batch}", samples, least, input=work.tpot_input, **found)
        short[batch] = middle(samples)
    for batch in work.long_batches:
        samples = cases.tpot_ms(llm, prompts(batch, work.long_input), work.repeats)
        least = _decode_floor_ms(floor, batch, work.long_input, bench.share(costs))
        size, longer = (
            decode_bytes(costs, batch, _mean_context(tokens))
            for tokens in (work.tpot_input, work.long_input)
        )
        predicted = round(short[batch] * longer / size, 4)  # the floors' ratio
        case = f"b{batch}/{work.long_input}"
        yield row("tpot_ms", case, samples, least, predicted=predicted)


def ttft(bench: Bench) -> Iterator[Row]:
    """TTFT of a single prompt by its length, in an engine that could hold a full batch."""
    work, config = bench.work, bench.config
    llm, experts = bench.engine(config)
    prompts, costs = bench.prompts(config), costs_of(bench.model)
    floor = floor_of(costs)
    for length in work.ttft_inputs:
        samples = cases.ttft_ms(llm, prompts(1, length)[0], work.repeats)
        found = experts.prompt(prompts(1, length)[0])
        least = floor and 1e3 * floor.prefill(1, length, share_of(found) or bench.share(costs))
        yield row("ttft_ms", str(length), samples, least, **found)


def offline(bench: Bench) -> Iterator[Row]:
    """Output tokens per second of many prompts at once, greedy and sampled."""
    llm, _ = bench.engine(bench.config)
    for case in SAMPLINGS:
        yield _offline(bench, llm, bench.config, case, case)


def _offline(bench: Bench, llm: LLM, config: Path, sampling: str, case: str) -> Row:
    count, tokens_in, tokens_out = bench.work.offline
    prompts, costs = bench.prompts(config)(count, tokens_in), costs_of(bench.model)
    floor = floor_of(costs)
    samples = cases.offline_tok_s(llm, prompts, SAMPLINGS[sampling], tokens_out, bench.work.repeats)
    most = floor and count * tokens_out / floor.generate(
        count, tokens_in, tokens_out, bench.share(costs)
    )
    return row("offline_tok_s", case, samples, most, size=[count, tokens_in, tokens_out])


def gpt2(bench: Bench) -> Iterator[Row]:
    """A small model, limited by the host: speeds, and the share of time the device computes."""
    work, config = bench.work, bench.gpt2_config
    llm, _ = bench.engine(config)
    single, floor = bench.prompts(config)(1, work.gpt2_input), floor_of(costs_of(bench.model))
    many, tokens_out = bench.prompts(config)(*work.offline[:2]), work.offline[2]
    samples = cases.tpot_ms(llm, single, work.repeats)
    least = _decode_floor_ms(floor, 1, work.gpt2_input)
    yield row("tpot_ms", "gpt2/b1", samples, least, input=work.gpt2_input)
    yield _offline(bench, llm, config, "sampled", "gpt2/sampled")
    calls: dict[str, Callable[[], float]] = {
        "gpt2/b1": lambda: cases.seconds_of(llm, single, GREEDY, 1 + cases.DECODED),
        "gpt2/sampled": lambda: cases.seconds_of(llm, many, SAMPLED, tokens_out),
    }
    for case, call in calls.items():
        seconds = middle(work.repeats.of(call))
        busy = busy_seconds(call)
        if busy is None:
            print(f"device_busy      {case:20} the profiler shows no GPU here")
        else:
            yield row("device_busy", case, [busy / seconds], None, busy_s=busy)


def start(bench: Bench) -> Iterator[Row]:
    """Process starts of an engine of default sizes; see ``bench.step.start``."""
    rows = start_rows(measure_starts(bench.settings(bench.config), bench.work.warm_starts))
    bench.used = bench.settings(bench.config)
    for each in rows:
        each["floor"] = None
        print(f"{each['metric']:24} {each['case']:12} {each['value']:12.3f}", flush=True)
    yield from rows


def memory(bench: Bench) -> Iterator[Row]:
    """Share of the card that an engine of default sizes takes; see ``bench.step.memory``."""
    bench.used = bench.settings(bench.config)
    rows = measure_memory(bench.used, bench.work.memory_sequences)
    if rows is None:
        print(f"card_share       there is no {SMI} here, so no card to ask")
    for each in rows or ():
        print(f"{each['metric']:16} {each['case']:20} {each['value']:12.3f}  asked {each['asked']}")
        yield each | {"floor": None, "samples": [each["value"]]}


def ablation(bench: Bench) -> Iterator[Row]:
    """TPOT and TTFT, one setting changed at a time; with ``--label``, the defaults by that name."""
    changes = ABLATIONS if bench.label is None else {bench.label: {}}
    for name, change in changes.items():
        yield from _ablated(bench, name, change)


def _ablated(bench: Bench, name: str, change: Mapping[str, Any]) -> Iterator[Row]:
    work = bench.work
    most, length = max(work.ablation_batches), work.ablation_input
    # only the measured shapes, so that the engine starts sooner
    sizes = {"max_num_seqs": most, "decode_bucket_start": most, "mixed_bucket_start": most}
    sizes |= {"prefill_bucket_start": length, "prefill_bucket_factor": 1 << 20}
    fresh = _fresh_prompts(bench.prompts(bench.config))
    llm, _ = bench.engine(bench.config, **sizes, **change)

    def ttft_ms() -> float:
        return 1e3 * cases.seconds_of(llm, next(fresh)(1, length), GREEDY, 1)

    for batch in work.ablation_batches:
        samples = _fresh_tpot(llm, fresh, batch, work)
        case = f"{name}/b{batch}"
        yield row("ablation_tpot_ms", case, samples, None, environment=environment())
    samples, case = work.repeats.of(ttft_ms), f"{name}/{length}"
    yield row("ablation_ttft_ms", case, samples, None, environment=environment())


def _fresh_prompts(prompts: Prompts) -> Iterator[Prompts]:
    """Prompts that no call has seen, which a prefix cache cannot contain."""
    return (Prompts(prompts.vocab_size, prompts.seed + i) for i in count(1))


def _fresh_tpot(llm: LLM, fresh: Iterator[Prompts], batch: int, work: Workload) -> list[float]:
    def run(tokens: int) -> float:
        return cases.seconds_of(llm, next(fresh)(batch, work.tpot_input), GREEDY, tokens)

    return work.repeats.of(lambda: 1e3 * cases.tpot_seconds(run))


# These run first: their processes need the device, which this process has not taken yet.
OWN_PROCESSES = ("start", "memory")
GROUPS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "start": start,
    "memory": memory,
    "tpot": tpot,
    "ttft": ttft,
    "offline": offline,
    "gpt2": gpt2,
    "ablation": ablation,
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", type=_groups, default=list(GROUPS), metavar="GROUP,...")
    parser.add_argument("--config", type=Path, default=SHAPES / "qwen3-4b" / "config.json")
    parser.add_argument("--gpt2-config", type=Path, default=SHAPES / "gpt2" / "config.json")
    parser.add_argument(
        "--engine", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of every engine, such as max_num_batched_tokens=4096",
    )  # fmt: skip
    parser.add_argument("--label", help="name of an ablation made by a variable or --engine")
    parser.add_argument(
        "--batches", type=int, nargs="+", help="rows of tpot, without the cases of a long context"
    )
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens of the prompts of ttft")
    parser.add_argument(
        "--uncounted", action="store_true", help="do not count experts, which takes memory"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit of the sources, if they are no checkout")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/step.json"))
    return parser.parse_args(argv)


def _groups(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in names]


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE of a command line; the value is JSON, or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: list[str] | None = None, work: Workload | None = None) -> None:
    """Measure group by group; the file is complete after each row."""
    arguments = parse_arguments(argv)
    prepare_backend(DEFAULT_GPU_MEMORY_UTILIZATION)  # before `facts` starts JAX's backend
    work = work or Workload()
    if arguments.batches:
        work = replace(work, tpot_batches=tuple(arguments.batches), long_batches=())
    if arguments.prompts:
        work = replace(work, ttft_inputs=tuple(arguments.prompts))
    bench = Bench(arguments, work)
    for group in arguments.only:
        if group not in OWN_PROCESSES:
            # raises before the measurement if the rows could not be merged
            read_report(arguments.output, bench.facts())
        begin, rows = time.perf_counter(), list[Row]()
        for each in GROUPS[group](bench):
            rows.append(each)
            note = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.perf_counter() - begin, 1),
                "engine": {k: v for k, v in bench.used.items() if k not in ("model", "cache_dir")},
                "environment": environment(),
            }
            report = merged_report(read_report(arguments.output, bench.facts()), group, note, rows)
            write_report(arguments.output, report)


if __name__ == "__main__":
    main()
