"""A mixture of experts on vLLM or here, with routing of random weights that both share.

Run from the repository root, with an interpreter that has the engine:

    python bench/peers/routing.py jaxinfer CONFIG.json --routing uniform --output FILE
    python bench/peers/routing.py vllm CONFIG.json --routing normal --output FILE [--count]

What a step costs depends on how many distinct experts it reads, and an engine's dummy weights may
choose few: vLLM's choose the same 4 of gpt-oss' 32 for every token. ``loaded`` leaves the weights
as they are loaded; ``normal`` sets vLLM's to a normal distribution, except those of experts, so
that its routers choose nearly uniformly; ``uniform`` and ``same`` force jaxinfer's choices, to
random experts and to the first ones. ``--count`` runs vLLM without CUDA graphs and counts.

TPOT is (time of 65 tokens - time of 1) / 64 of a batch of prompts of 1,024 tokens, TTFT the median
of five, both in ms; offline is tokens/s of 128 prompts of 256 tokens with 64 new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

LENGTH, DECODED = 1024, 64  # tokens of a prompt, and after the first
COUNTED = 20  # decode steps whose experts are counted

type Prompts = list[dict[str, list[int]]]
type Generate = Callable[[Prompts, int], object]  # and the new tokens of each


def jaxinfer_engine(config: Path, routing: str) -> Generate:
    """Our engine, as a function."""
    from jaxinfer import LLM, SamplingParams

    llm = LLM(
        str(config),
        load_format="dummy",
        dummy_routing="auto" if routing == "loaded" else routing,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=128,
        max_model_len=8320,
    )

    def generate(prompts: Prompts, num_tokens: int) -> object:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate(prompts, sampling, use_tqdm=False)

    return generate


def vllm_engine(config: Path, routing: str, count: bool) -> tuple[Generate, Any]:
    """vLLM's engine as a function, and its model (a PyTorch module)."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(config.parent),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=128,
        max_model_len=8320,
        dtype="bfloat16",
        enforce_eager=count,
        disable_log_stats=True,
    )
    executor = llm.llm_engine.model_executor
    model = executor.driver_worker.model_runner.model
    torch.manual_seed(0)
    for name, weight in model.named_parameters() if routing == "normal" else ():
        if "experts" in name or not weight.dtype.is_floating_point:
            continue
        if name.endswith("weight") and "norm" in name:
            weight.data.fill_(1.0)
        elif name.endswith(("router.bias", "gate.bias")):
            weight.data.zero_()
        else:
            weight.data.normal_(0, 0.02)

    def generate(prompts: Prompts, num_tokens: int) -> object:
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        return llm.generate(prompts, sampling, use_tqdm=False)

    return generate, model


def distinct_experts(
    generate: Generate, model: Any, batches: dict[int, Prompts], per_token: int
) -> dict[str, float]:
    """Mean distinct experts of a layer and decode step, by the logits of vLLM's routers."""
    seen: dict[int, list[int]] = defaultdict(list)  # by tokens of the step

    def note(_: Any, __: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        chosen = logits.float().topk(per_token, dim=-1).indices
        seen[len(logits)].append(chosen.unique().numel())

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(note)
    for prompts in batches.values():
        generate(prompts, COUNTED)
    return {f"distinct_b{size}": mean(seen[size]) for size in batches}


def measured(
    generate: Generate, batches: dict[int, Prompts], prompts_of: Callable[[int, int], Prompts]
) -> dict[str, float]:
    """TPOT by batch, TTFT by length, offline throughput."""

    def seconds(prompts: Prompts, num_tokens: int) -> float:
        started = time.perf_counter()
        generate(prompts, num_tokens)
        return time.perf_counter() - started

    found: dict[str, float] = {}
    for size, prompts in batches.items():
        seconds(prompts, 2)
        times: dict[int, list[float]] = {1: [], 1 + DECODED: []}
        for count in (1, 1 + DECODED, 1 + DECODED, 1):
            times[count].append(seconds(prompts, count))
        found[f"tpot_b{size}"] = 1e3 * (min(times[1 + DECODED]) - min(times[1])) / DECODED
        print(f"tpot_b{size}", found[f"tpot_b{size}"], flush=True)
    for length in (512, 1024, 8192):
        prompts = prompts_of(1, length)
        seconds(prompts, 1)
        found[f"ttft_{length}"] = 1e3 * median(seconds(prompts, 1) for _ in range(5))
    prompts = prompts_of(128, 256)
    seconds(prompts, 64)
    found["offline"] = 128 * 64 / seconds(prompts, 64)
    return found


def main() -> None:
    """Measure or count, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("jaxinfer", "vllm"))
    parser.add_argument("config", type=Path)
    routings = ("loaded", "normal", "uniform", "same")
    parser.add_argument("--routing", choices=routings, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--count", action="store_true", help="vLLM only")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    config, ids = json.loads(given.config.read_text()), random.Random(0)

    def prompts_of(size: int, length: int) -> Prompts:
        most = config["vocab_size"] - 2000
        return [
            {"prompt_token_ids": [ids.randrange(100, most) for _ in range(length)]}
            for _ in range(size)
        ]

    batches = {size: prompts_of(size, LENGTH) for size in given.batches}
    if given.engine == "jaxinfer":
        report = measured(jaxinfer_engine(given.config, given.routing), batches, prompts_of)
    else:
        generate, model = vllm_engine(given.config, given.routing, given.count)
        if given.count:
            per_token = config["num_experts_per_tok"]
            report = distinct_experts(generate, model, batches, per_token)
        else:
            report = measured(generate, batches, prompts_of)
    settings = {"engine": given.engine, "model": given.config.parent.name, "routing": given.routing}
    given.output.write_text(json.dumps({**settings, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
