"""Engines on several fake CPU devices draw the tokens of one: ``python -m kit.parallel ...``.

A process, as the number of devices must be set before JAX starts. Prints "checked".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.weights.save import write_model
from kit.tiny_models import CONFIGS, random_params

SIZES: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_model_len": 96,
    "max_num_batched_tokens": 64,
    "prefill_bucket_start": 64,
    "mixed_bucket_start": 4,
    "decode_bucket_start": 4,
    "page_size": 8,
    "num_pages": 61,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
PROMPTS = ([5, 9, 3, 80], [7] * 20, list(range(3, 43)))
# sizes that four devices divide
MORE: dict[str, dict[str, Any]] = {
    "gemma4_all": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v2": {"n_routed_experts": 8},
    "qwen3_5": {"linear_num_key_heads": 4},
    "qwen3_5_moe": {"num_experts": 8, "linear_num_key_heads": 4},
    "qwen3_next": {"num_experts": 8, "linear_num_key_heads": 4},
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **MORE.get(name, {}), **changes}


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a model of random weights."""
    if not folder.exists():
        model = build_model(config, "float32")
        write_model(folder, model, random_params(model), None, {}, NoProgress())
    return folder


def sampling() -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=3, top_k=50, **common),
        SamplingParams(
            temperature=1.0,
            seed=4,
            presence_penalty=0.5,
            logit_bias={7: 2.0},
            logprobs=2,
            prompt_logprobs=1,
            **common,
        ),
    ]


def answers(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Tokens, and logprobs of the last request's prompt and answer."""
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], sampling())
    found = [*(outputs[-1].prompt_logprobs or []), *(outputs[-1].outputs[0].logprobs or [])]
    values = [next(iter(one.values())).logprob for one in found if one]
    return [list(output.outputs[0].token_ids) for output in outputs], values


def check_family(folder: Path, name: str, degrees: tuple[int, ...], **settings: Any) -> None:
    """Engines of a family on so many devices answer as one on one device."""
    path = written(folder / name, config_of(name))
    settings = {**SIZES, "cache_dir": str(folder / "cache"), **settings}
    (expected, logprobs) = answers(LLM(str(path), **settings))
    for degree in degrees:
        llm = LLM(str(path), tensor_parallel_size=degree, **settings)
        found, others = answers(llm)
        assert found == expected, (name, degree, found, expected)
        np.testing.assert_allclose(others, logprobs, atol=1e-3, err_msg=f"{name} on {degree}")
        del llm


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    jax.config.update("jax_num_cpu_devices", 4)
    for name in names or CONFIGS:
        check_family(folder, name, (2, 4))
        print(name, flush=True)
    print("checked")


if __name__ == "__main__":
    main()
