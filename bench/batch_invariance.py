"""Counts answers whose bits depend on their batch: ``python -m bench.batch_invariance``.

Prompts of different lengths are answered one at a time, then in groups, and once more from reused
pages; answers that differ in any bit are counted, and the time of each way is printed. With
``--kernels OP=IMPL,...`` it shows which kernels of a GPU make the difference.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

from jaxinfer import LLM, SamplingParams

LENGTHS = (1, 5, 17, 70, 400, 40, 9, 700, 128, 3, 33, 64, 250, 8, 90, 16)
GROUPS = (2, 3, 8, 16)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--kernels")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-weights", default="auto")
    given = parser.parse_args()
    llm = LLM(
        given.model,
        dtype=given.dtype,
        kernels=given.kernels,
        cpu_weights=given.cpu_weights,
        batch_invariant=given.batch_invariant,
        max_model_len=2048,
        max_num_seqs=max(GROUPS),
    )
    sampling = SamplingParams(
        temperature=0.8, seed=5, max_tokens=given.max_tokens, logprobs=2, ignore_eos=True
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 5000, length).tolist() for length in LENGTHS]
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, **vars(given)}
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
    print(json.dumps(found, indent=1))


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


if __name__ == "__main__":
    main()
