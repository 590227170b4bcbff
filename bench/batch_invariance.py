"""Counts answers whose bits depend on their batch: ``python -m bench.batch_invariance``.

Prompts of different lengths are answered one at a time, then in groups, and once more from reused
pages; their next turns are answered from pages that decode rows have written, and from none.
Answers that differ in any bit are counted, and the time of each way is printed. With ``--kernels
OP=IMPL,...`` it shows which kernels of a GPU make the difference.

``--price`` also measures the time per token of 1, 8 and 64 sequences, and the time to the first
token of a prompt. ``--both`` runs all of it without and with ``--batch-invariant``, each in its own
process:

    python -m bench.batch_invariance --both --price --model bench/shapes/qwen3-4b \\
        --load-format dummy --skip-tokenizer-init
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from pallas_kernels.harness.pins import invariant_pins
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm

LENGTHS = (1, 5, 17, 70, 400, 40, 9, 700, 128, 3, 33, 64, 250, 8, 90, 16)
GROUPS = (2, 3, 8, 16)
ROWS = (1, 8, 64)  # sequences whose time per token is measured
CONTEXT, TOKENS, PROMPT, REPEATS = 128, 65, 1024, 5
GEMM = (2560, 6144)  # inputs and outputs
GEMM_ROWS = (1, 2, 7, 16, 33, 64, 65, 1000)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--kernels")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-weights", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    given = parser.parse_args()
    if given.both:
        own = [argument for argument in sys.argv[1:] if argument != "--both"]
        found: Any = {name: _in_own_process([*own, *flags]) for name, flags in BOTH.items()}
    else:
        found = _measured(given)
    print(json.dumps(found, indent=1))


BOTH = {"with --batch-invariant": ("--batch-invariant",), "without": ()}


def _in_own_process(arguments: Sequence[str]) -> Any:
    """The result of another run, whose device memory is free again when it ends."""
    command = [sys.executable, "-m", "bench.batch_invariance", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _measured(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one engine."""
    llm = LLM(
        given.model,
        dtype=given.dtype,
        kernels=given.kernels,
        cpu_weights=given.cpu_weights,
        load_format=given.load_format,
        skip_tokenizer_init=given.skip_tokenizer_init,
        batch_invariant=given.batch_invariant,
        max_model_len=2048,
        max_num_seqs=max(*ROWS, *GROUPS) if given.price else max(GROUPS),
    )
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, **vars(given)}
    if given.batch_invariant:
        found["GEMMs with other bits"] = _gemms()
    sampling = SamplingParams(
        temperature=0.8, seed=5, max_tokens=given.max_tokens, logprobs=2, ignore_eos=True
    )
    found |= _differences(llm, sampling)
    return found | (_price(llm) if given.price else {})


def _differences(llm: LLM, sampling: SamplingParams) -> dict[str, Any]:
    """Answers that are not the same alone and in company, and the time of each way."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 5000, length).tolist() for length in LENGTHS]
    found: dict[str, Any] = {}
    _answers(llm, prompts[:1], sampling)
    llm.reset_prefix_cache()
    since = time.perf_counter()
    alone = [one for prompt in prompts for one in _answers(llm, [prompt], sampling)]
    found["seconds alone"] = time.perf_counter() - since
    for count in GROUPS:
        llm.reset_prefix_cache()
        since = time.perf_counter()
        own = [
            one
            for first in range(0, len(prompts), count)
            for one in _answers(llm, prompts[first : first + count], sampling)
        ]
        found[f"seconds in groups of {count}"] = time.perf_counter() - since
        found[f"different in groups of {count}"] = _different(own, alone)
    found["different from reused pages"] = _different(_answers(llm, prompts, sampling), alone)
    turns = [[*prompt, *answer[0], 3, 4] for prompt, answer in zip(prompts, alone, strict=True)]
    next_turns = _answers(llm, turns, sampling)
    llm.reset_prefix_cache()
    cold = [one for turn in turns for one in _answers(llm, [turn], sampling)]
    found["different in the next turn"] = _different(next_turns, cold)
    return found


type Answer = tuple[tuple[int, ...], tuple[Any, ...]]  # tokens, and their logprobs


def _answers(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[Answer]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
    return [
        (
            tuple(output.outputs[0].token_ids),
            tuple(
                tuple(sorted((token, one.logprob) for token, one in step.items()))
                for step in output.outputs[0].logprobs or ()
            ),
        )
        for output in outputs
    ]


def _different(own: list[Answer], others: list[Answer]) -> dict[str, int]:
    pairs = list(zip(own, others, strict=True))
    tokens = sum(a[0] != b[0] for a, b in pairs)
    return {"tokens": tokens, "tokens or logprobs": sum(a != b for a, b in pairs)}


def _price(llm: LLM) -> dict[str, Any]:
    """Times in ms, medians of ``REPEATS``: per token of several sequences, and to the first one."""
    found: dict[str, Any] = {}
    for rows in ROWS:
        times = [
            _seconds(llm, prompts, TOKENS) - _seconds(llm, prompts, 1)
            for prompts in _fresh(rows, CONTEXT)
        ]
        found[f"ms per token of {rows}"] = 1e3 * median(times[1:]) / (TOKENS - 1)
    times = [_seconds(llm, prompts, 1) for prompts in _fresh(1, PROMPT)]
    return found | {f"ms to the first token of {PROMPT}": 1e3 * median(times[1:])}


def _fresh(rows: int, length: int) -> Iterator[list[list[int]]]:
    """Prompts that no cache has; the first of them warm up."""
    rng = np.random.default_rng(rows + length)
    for _ in range(1 + REPEATS):
        yield rng.integers(10, 5000, (rows, length)).tolist()


def _seconds(llm: LLM, prompts: list[list[int]], count: int) -> float:
    llm.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    given = [{"prompt_token_ids": one} for one in prompts]
    since = time.perf_counter()
    llm.generate(given, sampling, use_tqdm=False)
    return time.perf_counter() - since


def _gemms() -> list[int]:
    """The numbers of rows of which a GEMM's rows have other bits than those of the most rows."""
    pinned = invariant_pins(jax.devices()[0].platform).of("skinny_gemm")
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    x = jax.random.normal(jax.random.key(0), (max(GEMM_ROWS), GEMM[0]), dtype)
    w = jax.random.normal(jax.random.key(1), GEMM, dtype)
    gemm = jax.jit(lambda x: skinny_gemm(GemmArgs(x=x, w=w, wide=True), pinned))
    whole = np.asarray(gemm(x))
    return [rows for rows in GEMM_ROWS if (np.asarray(gemm(x[:rows])) != whole[:rows]).any()]


if __name__ == "__main__":
    main()
