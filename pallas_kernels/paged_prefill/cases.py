"""Named calls of paged_prefill on the shapes of real models."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import shapes
from pallas_kernels.registry import Cost, Inputs
from pallas_kernels.shapes import PagedCase, paged_arrays

_SMOL, _QWEN = shapes.SMOLLM2_135M, shapes.QWEN3_0_6B

CASES = (
    PagedCase("smollm2_one_query", _SMOL, (1,), (1,)),
    PagedCase("smollm2_single_query_chunks", _SMOL, (40, 1, 17), (1, 1, 1), padding=5),
    PagedCase("smollm2_page_edges", _SMOL, (15, 16, 17), (15, 16, 17), padding=16),
    PagedCase("smollm2_tile_edges", _SMOL, (63, 64, 65, 128), (63, 64, 65, 1), max_pages=40),
    PagedCase("smollm2_last_of_context", _SMOL, (300, 130), (20, 70), padding=38),
    PagedCase("smollm2_empty_rows", _SMOL, (0, 9, 0, 0, 20, 0), (0, 9, 0, 0, 20, 0), padding=3),
    PagedCase("smollm2_only_padding", _SMOL, (0, 0), (0, 0), padding=16, max_pages=4),
    PagedCase("smollm2_many_short", _SMOL, tuple(range(1, 17)), tuple(range(1, 17)), padding=24),
    PagedCase("smollm2_window", _SMOL, (200, 9, 400), (100, 9, 3), window=8, padding=16),
    PagedCase("smollm2_window_blocks", _SMOL, (700,), (90,), window=300),
    PagedCase("gpt2_mha", shapes.GPT2, (33, 70), (33, 20)),
    PagedCase("llama3_70b_tp8_gqa8", shapes.LLAMA3_70B_TP8, (80,), (66,)),
    PagedCase("qwen2_5_7b_gqa7_page64", shapes.QWEN2_5_7B, (70, 64), (6, 64), page_size=64),
    PagedCase("llama3_8b_bf16", shapes.LLAMA3_8B, (40, 17), (9, 17), padding=6, dtype="bfloat16"),
    PagedCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, (65,), (30,), 64, dtype="bfloat16"),
    PagedCase("phi3_head96", shapes.PHI3_MINI, (20,), (20,)),
    PagedCase("gemma3_head256_window", shapes.GEMMA3_4B, (50,), (40,), window=32),
    PagedCase("qwen3_4b_long", shapes.QWEN3_4B, (4097, 100), (130, 100), tags=("full",)),
    PagedCase("smollm2_t512_ctx512", _SMOL, (512,), (512,), max_pages=512, tags=("bench",)),
    PagedCase("smollm2_t512_ctx4096", _SMOL, (4096,), (512,), max_pages=512, tags=("bench",)),
    PagedCase("smollm2_8x64", _SMOL, (64,) * 8, (64,) * 8, max_pages=512, tags=("bench",)),
    PagedCase("qwen3_0_6b_t512_ctx512", _QWEN, (512,), (512,), max_pages=512, tags=("bench",)),
    PagedCase("qwen3_0_6b_t512_ctx4096", _QWEN, (4096,), (512,), max_pages=512, tags=("bench",)),
)


def build(case: PagedCase, seed: int) -> Inputs:
    """Inputs of a case; padding queries are NaN."""
    rng = np.random.default_rng(seed)
    heads, real = case.heads, sum(case.query_lens)
    arrays = paged_arrays(case, len(case.seq_lens), rng)
    shape = (real + case.padding, heads.num_heads, heads.head_dim)
    q = rng.standard_normal(shape, np.float32)
    q[real:] = np.nan
    starts = np.cumsum((0, *case.query_lens)).astype(np.int32)
    args = (q.astype(jnp.dtype(case.dtype)), arrays.k_pages, arrays.v_pages, arrays.page_table)
    seq_lens = np.asarray(case.seq_lens, np.int32)
    static = {"scale": heads.head_dim**-0.5, "window": case.window}
    return Inputs((*args, seq_lens, starts), static)


def cost(case: PagedCase) -> Cost:
    """Every visible key and value read once, queries read and outputs written."""
    item, heads = jnp.dtype(case.dtype).itemsize, case.heads
    rows = range(len(case.seq_lens))
    keys = sum(case.touched_keys(row) for row in rows)
    head_rows = keys * heads.num_kv_heads + sum(case.query_lens) * heads.num_heads
    return Cost(
        bytes=2 * head_rows * heads.head_dim * item,
        flops=4 * sum(map(case.visible_keys, rows)) * heads.num_heads * heads.head_dim,
    )
