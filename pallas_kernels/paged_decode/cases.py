"""Named calls of paged_decode on the shapes of real models."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels import shapes
from pallas_kernels.registry import Cost, Inputs
from pallas_kernels.shapes import Heads, PagedCase, paged_arrays

_FP8 = "float8_e4m3fn"


def _bench(model: str, heads: Heads, dtype: str) -> tuple[PagedCase, ...]:
    """The grid that serving meets: batch 1, 8 and 64 at contexts 128, 1024 and 4096."""
    return tuple(
        PagedCase(
            f"{model}_b{rows}_ctx{context}",
            heads,
            (context,) * rows,
            max_pages=512,
            dtype=dtype,
            tags=("bench",),
        )
        for rows in (1, 8, 64)
        for context in (128, 1024, 4096)
    )


CASES = (
    PagedCase("smollm2_length1", shapes.SMOLLM2_135M, (1,)),
    PagedCase("smollm2_page_edges", shapes.SMOLLM2_135M, (15, 16, 17, 1, 33), max_pages=40),
    PagedCase("smollm2_padding_rows", shapes.SMOLLM2_135M, (5, 0, 40), padding=5, max_pages=40),
    PagedCase("smollm2_only_padding", shapes.SMOLLM2_135M, (0, 0), padding=2, max_pages=4),
    PagedCase("smollm2_blocks", shapes.SMOLLM2_135M, (127, 128, 129, 255, 256, 257, 511, 513, 912)),
    PagedCase("smollm2_window", shapes.SMOLLM2_135M, (1, 7, 8, 9, 300, 600), window=8),
    PagedCase("smollm2_window_blocks", shapes.SMOLLM2_135M, (1, 200, 600, 1000), window=300),
    PagedCase("smollm2_bf16", shapes.SMOLLM2_135M, (90, 17), max_pages=8, dtype="bfloat16"),
    PagedCase("gpt2_mha", shapes.GPT2, (3, 64, 100), max_pages=64),
    PagedCase("llama3_70b_tp8_gqa8", shapes.LLAMA3_70B_TP8, (31, 32, 130)),
    PagedCase("qwen2_5_7b_gqa7", shapes.QWEN2_5_7B, (20, 65), page_size=64),
    PagedCase("qwen3_0_6b_page64", shapes.QWEN3_0_6B, (63, 64, 65, 129), page_size=64),
    PagedCase("llama3_8b_bf16", shapes.LLAMA3_8B, (17, 200), padding=1, dtype="bfloat16"),
    PagedCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, (64, 1), page_size=64, dtype="bfloat16"),
    PagedCase("llama3_8b_fp8_pages", shapes.LLAMA3_8B, (17, 70), dtype="bfloat16", kv_dtype=_FP8),
    PagedCase("gpt2_f16", shapes.GPT2, (60, 17), dtype="float16"),
    PagedCase("phi3_head96", shapes.PHI3_MINI, (40, 3)),
    PagedCase("phi3_head96_bf16", shapes.PHI3_MINI, (40, 3), dtype="bfloat16"),
    PagedCase("gemma3_head256_bf16", shapes.GEMMA3_4B, (40,), window=32, dtype="bfloat16"),
    PagedCase("gemma3_head256_window", shapes.GEMMA3_4B, (40, 90), window=32),
    PagedCase("qwen3_4b_long", shapes.QWEN3_4B, (8192, 1, 4097, 0), max_pages=1024, tags=("full",)),
    *_bench("smollm2", shapes.SMOLLM2_135M, "float32"),
    *_bench("qwen3_0_6b", shapes.QWEN3_0_6B, "float32"),
)


def build(case: PagedCase, seed: int) -> Inputs:
    """Inputs of a case; queries of padding rows are NaN."""
    rng = np.random.default_rng(seed)
    real, heads = len(case.seq_lens), case.heads
    rows = real + case.padding
    arrays = paged_arrays(case, rows, rng)
    seq_lens = np.zeros(rows, np.int32)
    seq_lens[:real] = case.seq_lens
    q = rng.standard_normal((rows, heads.num_heads, heads.head_dim), np.float32)
    q[seq_lens == 0] = np.nan
    args = (q.astype(jnp.dtype(case.dtype)), arrays.k_pages, arrays.v_pages, arrays.page_table)
    return Inputs((*args, seq_lens), {"scale": heads.head_dim**-0.5, "window": case.window})


def cost(case: PagedCase) -> Cost:
    """Every visible key and value read once, queries read and outputs written."""
    heads = case.heads
    item = jnp.dtype(case.dtype).itemsize
    kv_item = jnp.dtype(case.kv_dtype or case.dtype).itemsize
    keys = sum(case.touched_keys(row) for row in range(len(case.seq_lens)))
    components = keys * heads.num_kv_heads * kv_item + len(case.seq_lens) * heads.num_heads * item
    return Cost(
        bytes=2 * components * heads.head_dim,
        flops=4 * keys * heads.num_heads * heads.head_dim,
    )
