"""Named calls of route: the routers of real models, and small ones of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.route.ref import RouteArgs
from pallas_kernels.route.routing import Groups, Routing


@dataclass(frozen=True)
class RouteCase:
    """A router of ``count`` experts for ``tokens`` of width D."""

    name: str
    tokens: int
    width: int
    count: int
    routing: Routing
    bias: bool = False
    choice_bias: bool = False
    expert_scale: bool = False
    padded: bool = False
    given: bool = False
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


_XLA = ("ci", "cpu")  # that the Triton kernels do not support
SHIFTED = Routing(4, renormalised=True, shifted_among=32)
QWEN3 = Routing(8, renormalised=True)
GPT_OSS = Routing(4, renormalised=True)
V2_LITE = Routing(6)
V2 = Routing(6, scale=16.0, groups=Groups(8, 3, "best"))
V3 = Routing(8, "sigmoid", True, 2.5, Groups(8, 4, "best_two"))
GEMMA4 = Routing(8, renormalised=True, logit_scale=2816**-0.5)
KIMI_K2 = Routing(8, "sigmoid", True, 2.827)
KOLIBRI = Routing(6, "sigmoid", by_logits=True)
V4 = Routing(6, "sqrtsoftplus", True, 1.5)
PHIMOE = Routing(2, "sparsemixer", spread=0.5)
type _Model = tuple[str, tuple[int, int], Routing, tuple[bool, bool]]
_MODELS: tuple[_Model, ...] = (  # width and experts, bias and bias of the choice
    ("qwen3_30b", (2048, 128), QWEN3, (False, False)),
    ("gpt_oss_20b", (2880, 32), GPT_OSS, (True, False)),
    ("v2_lite", (2048, 64), V2_LITE, (False, False)),
    ("v3", (7168, 256), V3, (False, True)),
)
CASES = (
    RouteCase("mixtral", 5, 64, 8, Routing(2, renormalised=True)),
    RouteCase("odd", 3, 48, 7, Routing(3)),
    RouteCase("one_expert", 2, 32, 1, Routing(1)),
    RouteCase("gpt_oss", 5, 64, 12, GPT_OSS, bias=True, padded=True),
    RouteCase("gpt_oss_bf16", 5, 64, 12, GPT_OSS, bias=True, dtype="bfloat16"),
    RouteCase("groups", 9, 64, 32, V2),
    RouteCase("sigmoid_groups", 9, 64, 32, V3, choice_bias=True),
    RouteCase("kimi_k2", 2, 64, 24, KIMI_K2, choice_bias=True),
    RouteCase(
        "gemma4", 3, 64, 24, GEMMA4._replace(logit_scale=3.0), expert_scale=True, padded=True
    ),
    RouteCase("kolibri", 9, 64, 24, KOLIBRI, choice_bias=True, padded=True),
    RouteCase("phimoe", 9, 64, 16, PHIMOE, padded=True),
    RouteCase("v4", 9, 64, 24, V4, choice_bias=True, padded=True, tags=_XLA),
    RouteCase("v4_given", 9, 64, 24, V4, padded=True, given=True, tags=_XLA),
    RouteCase("qwen3_bf16", 40, 256, 128, QWEN3, padded=True, dtype="bfloat16"),
    RouteCase("v3_bf16", 17, 256, 256, V3, choice_bias=True, dtype="bfloat16"),
    # logits of few tokens by a kernel of their own: tiles with rests, and one token, by XLA
    RouteCase("few_gpt_oss_t8_bf16", 8, 200, 32, GPT_OSS, bias=True, padded=True, dtype="bfloat16"),
    RouteCase("few_v2_t3_bf16", 3, 300, 32, V2, dtype="bfloat16", padded=True),
    RouteCase("few_odd_t17_bf16", 17, 203, 60, V2_LITE, dtype="bfloat16", padded=True),
    RouteCase("few_v3_t64_bf16", 64, 384, 256, V3, choice_bias=True, dtype="bfloat16"),
    RouteCase("few_wide_t64_f16", 64, 1160, 512, QWEN3, padded=True, dtype="float16"),
    RouteCase(
        "few_gemma4_t5_bf16", 5, 264, 128, GEMMA4, expert_scale=True, padded=True, dtype="bfloat16"
    ),
    RouteCase("few_phimoe_t3_bf16", 3, 200, 16, PHIMOE, padded=True, dtype="bfloat16"),
    RouteCase("shifted_t5", 5, 64, 24, QWEN3._replace(shifted_among=20), padded=True),
    RouteCase("few_shifted_t8_bf16", 8, 200, 32, SHIFTED, bias=True, padded=True, dtype="bfloat16"),
    RouteCase("one_token_bf16", 1, 136, 60, QWEN3, dtype="bfloat16"),
    *(
        RouteCase(
            f"{name}_t{tokens}",
            tokens,
            *sizes,
            routing,
            *biases,
            padded=True,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for name, sizes, routing, biases in _MODELS
        for tokens in (1, 8, 64, 1024, 8192)
    ),
)


def build(case: RouteCase, seed: int) -> Inputs:
    """Logits near 1 whose order is clear: the best of distinct ones, on any device."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    x = normal(rng, (case.tokens, case.width), dtype)
    w = normal(rng, (case.count, case.width), dtype, case.width**-0.5)
    bias = normal(rng, (case.count,), dtype, 0.3) if case.bias else None
    choice_bias = rng.uniform(0, 0.5, case.count).astype(np.float32) if case.choice_bias else None
    is_token = np.arange(case.tokens) % 3 < 2 if case.padded else None
    args: dict[str, Any] = {
        "x": x,
        "w": w,
        "bias": bias,
        "choice_bias": choice_bias,
        "expert_scale": rng.uniform(0.5, 2, case.count).astype(dtype)
        if case.expert_scale
        else None,
        "is_token": is_token,
        "given": _given(case, rng) if case.given else None,
    }
    return Inputs((RouteArgs(**args, routing=case.routing),))


def _given(case: RouteCase, rng: np.random.Generator) -> np.ndarray:  # int32[T, k]
    """Distinct experts of each token."""
    first = rng.integers(case.count, size=(case.tokens, 1), dtype=np.int32)
    return (first + np.arange(case.routing.chosen, dtype=np.int32)) % case.count


def cost(case: RouteCase) -> Cost:
    """The router and the tokens read once."""
    values = case.width * (case.count + case.tokens)
    results = case.tokens * case.routing.chosen * 8
    flops = 2 * case.tokens * case.width * case.count
    return Cost(bytes=values * jnp.dtype(case.dtype).itemsize + results, flops=flops)
