"""The error of an engine's numerics: greedy tokens and logprobs against a float32 reference.

Run from the repository root; prompts are pieces of a text for real weights, else random ids:

    .venv/bin/python -m bench.accuracy --model PATH --text README.md --output FILE
    .venv/bin/python -m bench.accuracy --model bench/shapes/qwen3-4b/config.json \\
        --load-format dummy --variants no-overlap,bundle,xla --output FILE

    .venv/bin/python -m bench.accuracy --model GGUF --text README.md --engine dtype=float32 \\
        --variants float32,int4,int8,fp8 --llama-cpp PYTHON --output FILE

The reference is ``models.forward``, plain jnp without pages or kernels, on the engine's weights
cast to float32, over prompt and answer at once; weights that the engine keeps quantised are
dequantised, and those that it quantises itself (variants int4, int8, fp8) are the original ones.
``--llama-cpp`` is an interpreter with llama-cpp-python; its answers are scored in the same way. A
token's regret is the reference's logprob of its
best token minus that of the chosen token. Next to each figure is its floor: the same figure of
``forward`` in the engine's dtype, which is the effect of rounding alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import structs

from bench.accuracy.cases import Workload, make_prompts
from bench.accuracy.scorer import Answer, Scorer, Scores
from bench.step.__main__ import setting
from bench.step.cases import GREEDY
from bench.step.file import Row, environment, facts, merged_report, read_report
from jaxinfer import LLM
from jaxinfer.bench.circumstances import write_report
from jaxinfer.core.config import (
    COMPILED,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_PAGE_SIZE,
    EngineConfig,
    cache_root,
    prepare_backend,
)
from jaxinfer.core.progress import NoProgress
from jaxinfer.engine.start.build import plan_engine, write_planned
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import resolve_source
from pallas_kernels.harness.pins import ALL_XLA

XLA = ",".join(f"{op}={impl}" for op, impl in ALL_XLA.pairs)
QUANTIZED = ("int4", "int8", "fp8")
FP8_PAGES = "fp8-pages"
VARIANTS = ("no-overlap", "bundle", "xla", "float32", *QUANTIZED, FP8_PAGES)
# these change the values, others only the kernels
WITH_LOGPROBS = ("float32", *QUANTIZED, FP8_PAGES)
LLAMA_CPP = Path(__file__).parents[1] / "peers" / "llama_cpp_logprobs.py"


def generate(
    settings: Mapping[str, Any], prompts: Sequence[list[int]], work: Workload, scored: list[bool]
) -> tuple[list[list[Answer]], int]:
    """Greedy answers of a new engine, a list for each run; and the number of steps it compiled.

    ``scored``: whether each run requests logprobs, which other executables compute.
    """
    llm = LLM(**settings)
    runs: list[list[Answer]] = []
    for with_logprobs in scored:
        sampling = [
            structs.replace(GREEDY, max_tokens=count, logprobs=0 if with_logprobs else None)
            for count in work.answer_lengths()
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        runs.append([_answer(output.prompt_token_ids, output.outputs[0]) for output in outputs])
    compiled = llm.stats().num_compiled
    del llm
    gc.collect()  # frees its memory for the next engine or the reference
    return runs, compiled


def _answer(prompt: list[int], output: Any) -> Answer:
    tokens, found = tuple(output.token_ids), output.logprobs
    if found is not None:
        found = tuple(at[token].logprob for at, token in zip(found, tokens, strict=True))
    return Answer(tuple(prompt), tokens, found)


def regret_rows(case: str, answers: Sequence[Answer], scorer: Scorer) -> list[Row]:
    """Regret of a run's tokens and, if it has them, the error of their logprobs."""
    scores = Scores(*(np.concatenate(part) for part in zip(*map(scorer, answers), strict=True)))
    rows = _figures(case, "regret", scores.best - scores.chosen, scores.best - scores.floor_best)
    share = float(np.mean(scores.best == scores.chosen))
    floor = float(np.mean(scores.best == scores.floor_best))
    rows.append(_row("regret_zero_share", case, share, floor))
    if answers[0].logprobs is not None:
        ours = np.concatenate([answer.logprobs or () for answer in answers])
        errors = (np.abs(of - scores.chosen) for of in (ours, scores.floor_chosen))
        rows += _figures(case, "logprob_difference", *errors)
    return rows


def _figures(case: str, metric: str, ours: np.ndarray, floor: np.ndarray) -> list[Row]:
    kinds = {"mean": np.mean, "p99": lambda x: np.percentile(x, 99), "max": np.max}
    return [
        _row(f"{metric}_{kind}", case, float(of(ours)), float(of(floor)))
        for kind, of in kinds.items()
    ]


def _row(metric: str, case: str, value: float, floor: float | None, **more: Any) -> Row:
    shown = "" if floor is None else f"  floor {floor:12.6f}"
    extra_text = (f"{name} {what}" for name, what in more.items())
    print(f"{metric:24} {case:12} {value:12.6f}{shown}", *extra_text, flush=True)
    least = None if floor is None else round(floor, 7)
    return {"metric": metric, "case": case, "value": round(value, 7), "floor": least, **more}


def equality_row(
    case: str, answers: Sequence[Answer], default: Sequence[Answer], scorer: Scorer
) -> Row:
    """How many answers equal the default's; ``margin``: the reference's at the first difference."""
    margins: list[float] = []
    for ours, theirs in zip(answers, default, strict=True):
        different = np.flatnonzero(np.not_equal(ours.tokens, theirs.tokens))
        if different.size:
            at = different[0]
            margins.append(float(abs(scorer(ours).chosen[at] - scorer(theirs).chosen[at])))
    margin = round(max(margins, default=0.0), 7)
    return _row(
        "equal_sequences", case, len(answers) - len(margins), None, of=len(answers), margin=margin
    )


def variant_settings(name: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with one change; a bundle is compiled into the folder."""
    match name:
        case "bundle":
            write_planned(plan_engine(EngineConfig(**settings)), folder / "bundle")
            undecided = {k: v for k, v in settings.items() if k not in COMPILED}
            return {**undecided, "bundle": folder / "bundle"}
        case "xla":
            return {**settings, "kernels": XLA}
        case "float32":
            return {**settings, "cpu_weights": "float32"}
        case "int4" | "int8" | "fp8":
            return {**settings, "quantization": name, "cpu_weights": "auto"}
        case "fp8-pages":
            return {**settings, "kv_cache_dtype": "fp8"}
        case _:
            return {**settings, "overlap": False}


def llama_cpp(
    python: str, model: str, prompts: Sequence[list[int]], work: Workload
) -> list[Answer]:
    """llama.cpp's greedy answers; raises ``CalledProcessError`` if it fails."""
    given = json.dumps({"prompts": prompts, "max_tokens": work.answer_lengths()})
    command = [python, str(LLAMA_CPP), model, str(os.cpu_count() or 1)]
    ended = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    answers = json.loads(ended.stdout)["answers"]
    return [
        Answer(tuple(prompt), tuple(answer["tokens"]), tuple(answer["logprobs"]))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def measure(
    arguments: argparse.Namespace, work: Workload, settings: Mapping[str, Any]
) -> tuple[list[Row], dict[str, int]]:
    """The rows, and the number of executables that each engine compiled."""
    cache_dir = cache_root(settings.get("cache_dir"))
    source = resolve_source(
        arguments.model,
        load_format=arguments.load_format,
        cache_dir=cache_dir,
        progress=NoProgress(),
    )
    prompts = make_prompts(source, arguments.text, work, arguments.seed)
    runs: dict[str, list[Answer]] = {}
    compiled: dict[str, int] = {}
    (runs["plain"], runs["logprobs"]), compiled["default"] = generate(
        settings, prompts, work, [False, True]
    )
    for name in arguments.variants:
        with TemporaryDirectory() as folder:
            changed = variant_settings(name, settings, Path(folder))
            scored = [name in WITH_LOGPROBS]
            (runs[name],), compiled[name] = generate(changed, prompts, work, scored)
    if arguments.llama_cpp:
        runs["llama.cpp"] = llama_cpp(arguments.llama_cpp, arguments.model, prompts, work)
    model = build_model(source.hf_config, settings["dtype"])
    params = load_params(
        model,
        source,
        placement=default_placement(),
        cache_dir=cache_dir,
        seed=settings["seed"],
        progress=NoProgress(),
    )
    scorer = Scorer(source, settings["dtype"], params, max(work.lengths()))
    rows = [row for case, answers in runs.items() for row in regret_rows(case, answers, scorer)]
    others = [case for case in runs if case != "plain"]
    rows += [equality_row(case, runs[case], runs["plain"], scorer) for case in others]
    return rows, compiled


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="as ``jaxinfer generate`` takes it")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--text", type=Path, help="prompts are pieces of it; else random ids")
    parser.add_argument("--longest", type=int, metavar="TOKENS", help="the longest prompt")
    parser.add_argument("--variants", type=_variants, default=[], metavar="VARIANT,...")
    parser.add_argument(
        "--engine", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of every engine, such as dtype=float32",
    )  # fmt: skip
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="score llama.cpp's answers as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit of the sources, if they are no checkout")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/accuracy.json"))
    return parser.parse_args(argv)


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(VARIANTS)}")
    return names


def main(argv: list[str] | None = None, work: Workload | None = None) -> None:
    """Generate, score, write."""
    arguments, work = parse_arguments(argv), work or Workload()
    prepare_backend(DEFAULT_GPU_MEMORY_UTILIZATION)  # before `facts` starts JAX's backend
    if arguments.longest is not None:
        work = replace(work, longest=arguments.longest)
    given = dict(arguments.engine)
    settings = {
        "model": arguments.model,
        "load_format": arguments.load_format,
        "skip_tokenizer_init": True,
        "seed": arguments.seed,
        "dtype": "bfloat16",
        **work.engine_settings(given.get("page_size", DEFAULT_PAGE_SIZE)),
        **given,
    }
    path = Path(arguments.model)
    named = path.parent.name if path.name == "config.json" else path.name
    about = {**facts(arguments.commit), "model": named}
    report, begin = read_report(arguments.output, about), time.perf_counter()
    rows, compiled = measure(arguments, work, settings)
    note = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - begin, 1),
        "workload": asdict(work),
        "text": arguments.text and arguments.text.name,
        "engine": {k: v for k, v in settings.items() if k not in ("model", "cache_dir")},
        "compiled": compiled,
        "environment": environment(),
    }
    write_report(arguments.output, merged_report(report, "accuracy", note, rows))


if __name__ == "__main__":
    main()
