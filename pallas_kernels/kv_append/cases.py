"""Named calls of kv_append on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import Heads, random_pools

_FP8 = str(BITS)


@dataclass(frozen=True)
class KvAppendCase:
    """``num_tokens`` real tokens, then ``padding`` tokens that go to the sink page."""

    name: str
    heads: Heads
    num_tokens: int
    padding: int = 0
    page_size: int = 16
    num_pages: int = 32
    dtype: str = "float32"
    kv_dtype: str = ""  # of the pages; empty: as the tokens
    tags: tuple[str, ...] = ("ci",)


CASES = (
    KvAppendCase("smollm2_one_token", shapes.SMOLLM2_135M, 1),
    KvAppendCase("smollm2_padded", shapes.SMOLLM2_135M, 17, padding=47),
    KvAppendCase("gpt2_only_padding", shapes.GPT2, 0, padding=3),
    KvAppendCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, 65, 3, 64, 8, "bfloat16"),
    KvAppendCase("phi3_head96", shapes.PHI3_MINI, 5, padding=3),
    KvAppendCase("gemma3_head256", shapes.GEMMA3_4B, 5, padding=3),
    KvAppendCase("smollm2_fp8", shapes.SMOLLM2_135M, 5, padding=2, kv_dtype=_FP8),
    KvAppendCase(
        "phi3_head96_fp8", shapes.PHI3_MINI, 3, padding=1, dtype="bfloat16", kv_dtype=_FP8
    ),
    KvAppendCase("smollm2_decode64", shapes.SMOLLM2_135M, 64, 0, 16, 4096, tags=("bench",)),
    KvAppendCase("smollm2_chunk512", shapes.SMOLLM2_135M, 512, 0, 16, 4096, tags=("bench",)),
    KvAppendCase("qwen3_4b_chunk512", shapes.QWEN3_4B, 512, 0, 16, 2048, tags=("bench",)),
)


def build(case: KvAppendCase, seed: int) -> Inputs:
    """Random pages and tokens; padding tokens are NaN. Only slots of the sink are written twice.

    The last token goes to the pool's last slot.
    """
    rng = np.random.default_rng(seed)
    dtype, heads = jnp.dtype(case.dtype), case.heads
    token = (heads.num_kv_heads, heads.head_dim)
    shape = (case.num_pages, case.page_size, *token)
    pools = random_pools(shape, case.kv_dtype or case.dtype, rng)
    news = []
    for _ in range(2):
        new = np.full((case.num_tokens + case.padding, *token), np.nan, dtype)
        new[: case.num_tokens] = rng.standard_normal((case.num_tokens, *token), np.float32)
        news.append(new)
    last = case.num_pages * case.page_size - 1
    owned = np.arange(case.page_size, last)
    slots = np.arange(case.num_tokens + case.padding) % case.page_size
    slots[: case.num_tokens] = rng.choice(owned, case.num_tokens, replace=False)
    slots[max(case.num_tokens - 1, 0) : case.num_tokens] = last
    args: dict[str, Any] = {
        "k": news[0],
        "v": news[1],
        "k_pages": pools[0],
        "v_pages": pools[1],
        "slot_mapping": slots.astype(np.int32),
        "k_scales": pools[2] if len(pools) > 2 else None,
        "v_scales": pools[3] if len(pools) > 2 else None,
    }
    return Inputs((KvAppendArgs(**args),))


def cost(case: KvAppendCase) -> Cost:
    """Each token's K and V read once and written once."""
    heads, item = case.heads, jnp.dtype(case.dtype).itemsize
    entry = heads.head_dim * (item + jnp.dtype(case.kv_dtype or case.dtype).itemsize)
    entry += 4 if case.kv_dtype == _FP8 else 0
    return Cost(2 * case.num_tokens * heads.num_kv_heads * entry, 0)
