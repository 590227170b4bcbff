"""Named calls of qk_rope_append on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.numerics import Values, heads_of_new_token
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import Heads, random_pools
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs

_FP8 = str(BITS)


@dataclass(frozen=True)
class RopeCase:
    """``num_tokens`` real tokens, then ``padding`` tokens that go to the sink page."""

    name: str
    heads: Heads
    num_tokens: int
    padding: int = 0
    norms: bool = False
    page_size: int = 16
    num_pages: int = 16
    dtype: str = "float32"
    kv_dtype: str = ""  # of the pages; empty: as the heads
    tags: tuple[str, ...] = ("ci",)
    values: Values = "projected"


def _decode_step(rows: int, page_size: int = 16, kv_dtype: str = "") -> RopeCase:
    """A decode step's tokens on a GPU, each in a page of its own."""
    name = f"qwen3_4b_step_b{rows}_page{page_size}{'_fp8' if kv_dtype else ''}"
    sizes = (page_size, 2 * rows + 1, "bfloat16", kv_dtype, ("bench", "gpu"))
    return RopeCase(name, shapes.QWEN3_4B, rows, 0, True, *sizes)


CASES = (
    RopeCase("smollm2_one_token", shapes.SMOLLM2_135M, 1),
    RopeCase("smollm2_padded", shapes.SMOLLM2_135M, 9, padding=7),
    RopeCase("smollm2_many", shapes.SMOLLM2_135M, 70, padding=2),
    RopeCase("gpt2_heads_only_padding", shapes.GPT2, 0, padding=3),
    RopeCase("llama3_8b_f16", shapes.LLAMA3_8B, 3, dtype="float16"),
    RopeCase("llama3_70b_tp8", shapes.LLAMA3_70B_TP8, 5),
    RopeCase("qwen3_0_6b", shapes.QWEN3_0_6B, 4, norms=True, padding=1),
    RopeCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, 20, 3, True, 64, 8, "bfloat16"),
    RopeCase("qwen3_4b_fp8_pages", shapes.QWEN3_4B, 4, 0, True, 16, 8, "bfloat16", _FP8),
    RopeCase("gemma4_keys_fp8", Heads(4, 2, 256), 3, 1, True, kv_dtype=_FP8, values="keys"),
    RopeCase("phi3_head96_fp8", shapes.PHI3_MINI, 2, padding=1, kv_dtype=_FP8),
    RopeCase("phi3_head96_bf16", shapes.PHI3_MINI, 4, padding=1, dtype="bfloat16"),
    RopeCase("gemma3_head256", shapes.GEMMA3_4B, 5, norms=True, padding=3),
    RopeCase("gemma4_keys", shapes.GEMMA4_E2B_FULL, 3, norms=True, padding=1, values="keys"),
    RopeCase("gemma4_values", Heads(4, 2, 256), 5, norms=True, padding=2, values="normalised"),
    RopeCase("smollm2_decode64", shapes.SMOLLM2_135M, 64, 0, False, 16, 4096, tags=("bench",)),
    RopeCase("qwen3_0_6b_chunk512", shapes.QWEN3_0_6B, 512, 0, True, 16, 4096, tags=("bench",)),
    *(_decode_step(rows) for rows in (1, 8, 32, 64, 128, 256)),
    _decode_step(64, page_size=64),
    *(_decode_step(rows, kv_dtype=_FP8) for rows in (1, 64, 256)),
    RopeCase(
        "qwen3_4b_chunk4096",
        shapes.QWEN3_4B,
        4096,
        norms=True,
        num_pages=2048,
        dtype="bfloat16",
        tags=("bench", "gpu"),
    ),
)


def build(case: RopeCase, seed: int) -> Inputs:
    """Random heads, angles and pages. Only slots of the sink are written twice.

    The last token goes to the pool's last slot.
    """
    rng = np.random.default_rng(seed)
    dtype, heads = jnp.dtype(case.dtype), case.heads
    tokens, h = case.num_tokens + case.padding, heads.head_dim
    num_heads = heads.num_heads + heads_of_new_token(case.values) * heads.num_kv_heads
    qkv = rng.standard_normal((tokens, num_heads, h), np.float32).astype(dtype)
    angles = rng.uniform(-np.pi, np.pi, (tokens, h // 2)).astype(np.float32)
    norms = rng.uniform(0.5, 1.5, (2, h)).astype(dtype) if case.norms else None
    shape = (case.num_pages, case.page_size, heads.num_kv_heads, h)
    pools = random_pools(shape, case.kv_dtype or case.dtype, rng)
    last = case.num_pages * case.page_size - 1
    owned = np.arange(case.page_size, last)
    slots = np.arange(tokens) % case.page_size
    slots[: case.num_tokens] = rng.choice(owned, case.num_tokens, replace=False)
    slots[max(case.num_tokens - 1, 0) : case.num_tokens] = last
    args: dict[str, Any] = {
        "qkv": qkv,
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "qk_norms": norms,
        "k_pages": pools[0],
        "v_pages": pools[1],
        "slot_mapping": slots.astype(np.int32),
        "k_scales": pools[2] if len(pools) > 2 else None,
        "v_scales": pools[3] if len(pools) > 2 else None,
    }
    return Inputs((RopeAppendArgs(**args, eps=1e-6, values=case.values),))


def cost(case: RopeCase) -> Cost:
    """Each token's heads read once and written once, its angles read."""
    heads, item = case.heads, jnp.dtype(case.dtype).itemsize
    kv_item = jnp.dtype(case.kv_dtype or case.dtype).itemsize
    q, kv = heads.num_heads, 2 * heads.num_kv_heads
    token = ((2 * q + kv) * item + kv * kv_item) * heads.head_dim + 4 * heads.head_dim
    token += 4 * kv if case.kv_dtype == _FP8 else 0
    return Cost(case.num_tokens * token, 6 * case.num_tokens * (q + kv // 2) * heads.head_dim)
