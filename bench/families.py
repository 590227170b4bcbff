"""Compares an engine's logprobs with those of the dense model, for the shapes of public models.

Run from the repository root, on the device to be tested; a name chooses shapes that contain it:
``python -m bench.families [NAME...] [--output FILE]``. Weights are random, and there are four
layers. For prompts of several lengths the engine generates greedily, and ``LanguageModel.forward``,
plain XLA without pages, scores the same tokens. A kernel may be wrong for some numbers of heads or
some widths only, so each case is one of these.

Exits with 1 if logprobs differ by more than bfloat16 explains: in the median, and for a model
without experts at any token. (Where two experts have nearly the same score, rounding may choose the
other one, and the token's logits differ by far more.) A wrong kernel's differ by several nats.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.circumstances import host_circumstances, write_report

CONFIGS = Path("tests/data/configs.json")  # of public models
# Widths of public models with other mixers, in a few layers with few experts, one model a line.
MIXERS = Path("bench/shapes/mixers.json")
# Their engines have few executables, and chunks in which the longest prompts are continued.
COARSE = {
    "max_num_batched_tokens": 256,
    "prefill_bucket_start": 256,
    "decode_bucket_start": 8,
    "mixed_bucket_start": 8,
}
MAX_MEDIAN, MAX_DIFFERENCE = 0.05, 0.15
# Per-layer embeddings and two norms a block multiply the rounding: on a CPU, where engine and dense
# form are both XLA's, the greatest is 0.45 in bfloat16 (median 0.044), and 0.0001 in float32.
MAX_OF_NOISY = {"gemma-4-e2b": 0.6}
PROMPT_TOKENS = (1, 5, 70, 300, 40, 40, 40)
OUTPUT_TOKENS, LAYERS = 8, 4
NEXT_TOKENS = 30  # of a second turn, which finds the longest prompt and its answer
# Heads, KV heads, hidden and inner size of models whose configs are those of another size.
LIKE_QWEN3 = {"qwen3-14b": (40, 8, 5120, 17408), "qwen3-8b": (32, 8, 4096, 12288)}
LIKE_LLAMA = {"llama-3.2-3b": (24, 8, 3072, 8192), "glm-4-9b": (32, 2, 4096, 13696)}
SIZES = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
GLM = {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}

GEMMA4_26B = Path("bench/shapes/gemma4-26b-a4b/config.json")
GEMMA4_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "sliding_window": 128,  # shorter than the longest prompt
    "vocab_size_per_layer_input": 32064,
}
GEMMA4_E2B = {  # the last two layers use the keys and values of the first two
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": LAYERS // 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
}
GEMMA4_EXPERTS = ("moe_intermediate_size", "num_experts", "top_k_experts")


def configs() -> dict[str, dict[str, Any]]:
    """The configs by name, with four layers and a small vocabulary."""
    found: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_text("utf-8"))
    llama = {**found["qwen2.5-7b-instruct"], **LLAMA, "head_dim": 128}
    made = {name: {**found["qwen3-4b"], **_sizes(of)} for name, of in LIKE_QWEN3.items()}
    made |= {name: {**llama, **_sizes(of)} for name, of in LIKE_LLAMA.items()}
    made["glm-4-9b"] |= GLM
    made["glm-small"] = {**made["glm-4-9b"], "intermediate_size": 6144}
    made["gemma-4-26b-a4b"] = json.loads(GEMMA4_26B.read_text("utf-8")) | GEMMA4_LAYERS
    made["gemma-4-e2b"] = made["gemma-4-26b-a4b"] | GEMMA4_E2B
    for key in GEMMA4_EXPERTS:
        del made["gemma-4-e2b"][key]
    for config in found.values():
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:LAYERS]
        if section := config.get("linear_attn_config"):  # of Kimi Linear, whose lists count from 1
            for key in ("kda_layers", "full_attn_layers"):
                section[key] = [layer for layer in section[key] if layer <= LAYERS]
    small = {"num_hidden_layers": LAYERS, "vocab_size": 32064}
    tokens = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2}
    every = {name: {**config, **small, **tokens} for name, config in {**found, **made}.items()}
    return every | mixers()


def mixers() -> dict[str, dict[str, Any]]:
    """The configs of ``MIXERS`` by name."""
    return json.loads(MIXERS.read_text("utf-8"))  # type: ignore[no-any-return]


def _sizes(sizes: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(SIZES, sizes, strict=True))


def differences(
    config: dict[str, Any], folder: Path, share: float, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """How far the logprobs are apart: median, greatest by the prompt's number of tokens.

    ``sizes`` are further settings of the engine.
    """
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        gpu_memory_utilization=share,
        **{"max_num_batched_tokens": 512, **sizes},
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 30000, n).tolist() for n in PROMPT_TOKENS]
    greedy = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    longest = PROMPT_TOKENS.index(max(PROMPT_TOKENS))
    answer = outputs[longest].outputs[0].token_ids
    prompts.append([*prompts[longest], *answer, *rng.integers(3, 30000, NEXT_TOKENS).tolist()])
    outputs += llm.generate([{"prompt_token_ids": prompts[-1]}], greedy, use_tqdm=False)
    every: dict[int, list[float]] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        tokens = [*prompt, *made.token_ids]  # padded, so that one compilation serves all
        padding = [0] * (len(prompts[-1]) + OUTPUT_TOKENS - len(tokens))
        logits = llm.model.forward([*tokens, *padding]).astype(jnp.float32)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for i, (token, found) in enumerate(zip(made.token_ids, made.logprobs or (), strict=True)):
            difference = abs(found[token].logprob - float(logprobs[len(prompt) - 1 + i, token]))
            every.setdefault(len(prompt), []).append(difference)
    return {
        "experts": bool(llm.model.model.config.experts),
        "reused": outputs[-1].num_cached_tokens,
        "median": round(float(np.median(sum(every.values(), start=[]))), 4),
        "greatest": {str(tokens): round(max(found), 4) for tokens, found in every.items()},
    }


def is_right(name: str, found: dict[str, Any]) -> bool:
    """True if the differences are those of bfloat16: see the module."""
    greatest, bound = max(found["greatest"].values()), MAX_OF_NOISY.get(name, MAX_DIFFERENCE)
    return found["median"] <= MAX_MEDIAN and (found["experts"] or greatest <= bound)


def main() -> None:
    """Compare the shapes on the command line."""
    parser = argparse.ArgumentParser(description="an engine's logprobs against the dense model's")
    parser.add_argument("names", nargs="*", help="parts of names of shapes; default: all")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    options = parser.parse_args()
    chosen = {
        name: config
        for name, config in configs().items()
        if not options.names or any(part in name for part in options.names)
    }
    found: dict[str, dict[str, Any]] = {}
    for name, config in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            sizes = COARSE if name in mixers() else {}
            found[name] = differences(config, Path(folder), options.gpu_memory_utilization, sizes)
        gc.collect()  # the engine's memory, for the next
        print(name, found[name], flush=True)
        if options.output:  # after each model: a limit of time may end the others
            report = {**host_circumstances(), "device": jax.devices()[0].device_kind}
            write_report(options.output, {**report, "differences": found})
    if not all(is_right(*one) for one in found.items()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
