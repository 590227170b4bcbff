"""Named calls of paged_prefill on the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import PagedCase, paged_arrays, sinks_of, slopes_of
from pallas_kernels.paged_prefill.ref import PrefillArgs

_SMOL, _QWEN = shapes.SMOLLM2_135M, shapes.QWEN3_0_6B
_SMOL_TP3 = shapes.SMOLLM2_135M_TP3
_XLA = ("ci", "cpu")  # of calls that no kernel of a GPU supports
_FP8 = str(BITS)


def _prompts_with_sinks() -> tuple[PagedCase, ...]:
    """Prompt steps of gpt-oss-20b on a GPU: the layers with a window, and those without."""
    return tuple(
        PagedCase(
            f"gpt_oss_20b_t{tokens}{f'_window{window}' if window else ''}",
            shapes.GPT_OSS_20B,
            (tokens,),
            (tokens,),
            max_pages=2048,
            sinks=True,
            window=window,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for window in (None, 128)
        for tokens in (512, 1024, 8192)
    )


def _prompts_of_gemma4() -> tuple[PagedCase, ...]:
    """Prompt steps of Gemma 4 26B-A4B on a GPU: the layers with a window, and those without."""
    layers = (("window", shapes.GEMMA4_26B, 1024), ("full", shapes.GEMMA4_26B_FULL, None))
    return tuple(
        PagedCase(
            f"gemma4_26b_{name}_t{tokens}",
            heads,
            (tokens,),
            (tokens,),
            max_pages=2048,
            window=window,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for name, heads, window in layers
        for tokens in (512, 8192)
    )


def _prompt_steps(*steps: tuple[str, int, int, int, int]) -> tuple[PagedCase, ...]:
    """Prompt steps of Qwen3-4B on a GPU, from (name, rows, queries, context, page size)."""
    return tuple(
        PagedCase(
            f"qwen3_4b_{name}",
            shapes.QWEN3_4B,
            (context,) * rows,
            (queries,) * rows,
            page_size=size,
            max_pages=2048 * 16 // size,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for name, rows, queries, context, size in steps
    )


def _few_queries() -> tuple[PagedCase, ...]:
    """A few queries of contexts that are long enough for several splits of the keys."""
    gpt_oss, wide = shapes.GPT_OSS_20B_TP8, shapes.GEMMA4_E2B_FULL
    ragged: dict[str, Any] = {"dtype": "bfloat16", "padding": 4}
    return (
        PagedCase("smollm2_tp3_splits", _SMOL_TP3, (4200, 0, 600, 40), (3, 0, 9, 5), padding=4),
        # more tiles and splits than CTAs
        PagedCase("gpt2_splits", shapes.GPT2, (520, *(5,) * 22), (2, *(1,) * 22), dtype="bfloat16"),
        PagedCase("smollm2_tp3_splits_window", _SMOL_TP3, (1500, 9), (20, 9), window=700),
        PagedCase("qwen2_5_7b_tp4_splits", shapes.Heads(7, 1, 128), (1300,), (20,), page_size=64),
        PagedCase("gpt_oss_tp8_splits_sinks", gpt_oss, (1100, 300), (3, 30), sinks=True, **ragged),
        PagedCase("gpt_oss_tp8_splits_window", gpt_oss, (900,), (9,), window=600, sinks=True),
        PagedCase(  # a query does not see the last split, which has two keys
            "qwen3_4b_tp8_splits_bf16",
            shapes.QWEN3_4B_TP8,
            (1026, 3),
            (4, 3),
            max_pages=128,
            **ragged,
        ),
        PagedCase(
            "qwen3_4b_tp8_splits_fp8", shapes.QWEN3_4B_TP8, (800,), (9,), kv_dtype=_FP8, **ragged
        ),
        PagedCase(
            "gpt_oss_tp8_splits_fp8", gpt_oss, (800,), (9,), sinks=True, kv_dtype=_FP8, **ragged
        ),
        PagedCase("heads2_dim256_splits", shapes.Heads(2, 1, 256), (700,), (9,), cap=0.5, **ragged),
        PagedCase(
            "heads2_dim256_splits_fp8",
            shapes.Heads(2, 1, 256),
            (700,),
            (9,),
            kv_dtype=_FP8,
            **ragged,
        ),
        PagedCase("gemma4_head512_splits", wide, (600,), (3,), **ragged),
    )


def _hits() -> tuple[PagedCase, ...]:
    """Rests of prefix hits in a bucket of 128 tokens and 8 rows, and prompts that fill one."""
    qwen3, qwen3_5 = ("qwen3_4b", shapes.QWEN3_4B), ("qwen3_5_4b", shapes.QWEN3_5_4B)
    gpt_oss = "gpt_oss_20b", shapes.GPT_OSS_20B
    steps = (
        *((qwen3, 1, 16, context) for context in (256, 4096, 8192, 16384)),
        *((qwen3_5, 1, 16, context) for context in (256, 4096, 16384)),
        *((qwen3, 1, 1, 16384), (qwen3, 1, 64, 16384), (qwen3, 8, 16, 4096)),
        *((qwen3, 1, 128, 128), (qwen3, 8, 16, 16), (gpt_oss, 1, 16, 4096)),
    )
    bench = tuple(
        PagedCase(
            f"{name}_{rows}x{queries}_of_{context}",
            heads,
            (context,) * rows + (0,) * (8 - rows),
            (queries,) * rows + (0,) * (8 - rows),
            max_pages=2048,
            padding=128 - rows * queries,
            sinks=heads == shapes.GPT_OSS_20B,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for (name, heads), rows, queries, context in steps
    )
    # results are compared at the sizes that have all splits
    short = (case for case in bench if max(case.seq_lens) == 4096)
    return *bench, *(replace(x, name=f"{x.name}_right", tags=("full",)) for x in short)


def _fp8() -> tuple[PagedCase, ...]:
    """Pages of 8 bits with each other field of a case, in float32 and as a GPU serves them."""
    gpt_oss, wide = shapes.GPT_OSS_20B_TP8, shapes.GEMMA4_E2B_FULL
    fp8: dict[str, Any] = {"kv_dtype": _FP8, "padding": 2}
    cases = (
        PagedCase("smollm2_tp3_fp8", _SMOL_TP3, (70, 0, 150), (66, 0, 3), **fp8),
        PagedCase("gpt_oss_tp8_fp8", gpt_oss, (300,), (40,), window=128, sinks=True, **fp8),
        PagedCase("smollm2_tp3_fp8_cap", _SMOL_TP3, (70,), (9,), cap=0.5, **fp8),
    )
    steps = _prompt_steps(
        *(("t8192_ctx8192", 1, 8192, 8192, 16), ("t8192_32x256", 32, 256, 256, 16)),
        ("t512_ctx512", 1, 512, 512, 16),
        ("t8192_ctx16384", 1, 8192, 16384, 16),
    )
    # of the converted pages 15 are those of the first three rows, or of two
    ragged = (70, 0, 150, 90, 9), (66, 0, 3, 20, 9)
    # The second row's window begins with a block of 128 keys, but its first tile one key earlier.
    windows = (21, 316, 150), (9, 21, 40)
    return (
        *cases,
        *(replace(x, name=f"{x.name}_bf16", dtype="bfloat16", tags=("full",)) for x in cases),
        PagedCase(
            "qwen3_4b_many_fp8",
            shapes.QWEN3_4B,
            (300, 1, 2000, 0, 77),
            (300, 1, 900, 0, 64),
            dtype="bfloat16",
            tags=("full",),
            **fp8,
        ),
        PagedCase("smollm2_tp3_ragged_fp8", _SMOL_TP3, *ragged, tags=("full",), **fp8),
        PagedCase(
            "smollm2_tp3_ragged_fp8_bf16",
            _SMOL_TP3,
            *ragged,
            dtype="bfloat16",
            tags=("full",),
            **fp8,
        ),
        *(
            PagedCase(
                f"smollm2_tp3_ragged_window_fp8{suffix}",
                _SMOL_TP3,
                *windows,
                window=40,
                dtype=dtype,
                tags=("full",),
                **fp8,
            )
            for suffix, dtype in (("", "float32"), ("_bf16", "bfloat16"))
        ),
        PagedCase(
            "heads2_dim256_fp8", shapes.Heads(2, 1, 256), (40,), (9,), dtype="bfloat16", **fp8
        ),
        PagedCase("gemma4_fp8", wide, (90,), (9,), dtype="bfloat16", **fp8),
        *(replace(x, name=f"{x.name}_fp8", kv_dtype=_FP8) for x in steps),
    )


CASES = (
    PagedCase("smollm2_one_query", _SMOL, (1,), (1,)),
    PagedCase("smollm2_single_query_chunks", _SMOL, (40, 1, 17), (1, 1, 1), padding=5),
    PagedCase("smollm2_page_edges", _SMOL, (15, 16, 17), (15, 16, 17), padding=16),
    PagedCase("smollm2_tile_edges", _SMOL, (63, 64, 65, 128), (63, 64, 65, 1), max_pages=40),
    PagedCase("smollm2_last_of_context", _SMOL, (130, 304), (70, 20), padding=38),
    PagedCase("smollm2_empty_rows", _SMOL, (0, 9, 0, 0, 20, 0), (0, 9, 0, 0, 20, 0), padding=3),
    PagedCase("smollm2_only_padding", _SMOL, (0, 0), (0, 0), padding=16, max_pages=4),
    PagedCase(
        "smollm2_many_short",
        _SMOL,
        tuple(range(1, 17)),
        tuple(range(1, 17)),
        max_pages=40,
        padding=24,
    ),
    PagedCase("smollm2_window", _SMOL, (200, 9, 400), (100, 9, 3), window=8, padding=16),
    PagedCase("smollm2_window_blocks", _SMOL, (700,), (90,), window=300),
    PagedCase("gpt2_mha", shapes.GPT2, (33, 70), (33, 20)),
    PagedCase("llama3_70b_tp8_gqa8", shapes.LLAMA3_70B_TP8, (80,), (66,)),
    PagedCase("qwen2_5_7b_gqa7_page64", shapes.QWEN2_5_7B, (70, 64), (6, 64), page_size=64),
    PagedCase("llama3_8b_bf16", shapes.LLAMA3_8B, (40, 17), (9, 17), padding=6, dtype="bfloat16"),
    PagedCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, (65,), (30,), 64, dtype="bfloat16"),
    PagedCase("qwen2_5_7b_gqa7_bf16", shapes.QWEN2_5_7B, (90, 20), (19, 20), dtype="bfloat16"),
    PagedCase(
        "qwen3_4b_tp8_ragged_bf16",
        shapes.QWEN3_4B_TP8,
        (200, 9, 0, 90, 300, 0, 0),
        (70, 9, 0, 20, 1, 0, 0),
        padding=30,
        dtype="bfloat16",
    ),
    PagedCase("qwen3_4b_tp8_page64", shapes.QWEN3_4B_TP8, (320,), (70,), 64, dtype="bfloat16"),
    PagedCase(
        "smollm2_tp3_tile_edges_bf16", _SMOL_TP3, (21, 150, 43), (21, 22, 43), dtype="bfloat16"
    ),
    PagedCase("smollm2_tp3_window_bf16", _SMOL_TP3, (400,), (66,), window=130, dtype="bfloat16"),
    PagedCase(
        "smollm2_tp3_only_padding_f16", _SMOL_TP3, (0, 0), (0, 0), padding=65, dtype="float16"
    ),
    PagedCase("llama3_8b_fp8", shapes.LLAMA3_8B, (70,), (17,), dtype="bfloat16", kv_dtype=_FP8),
    PagedCase("gpt2_f16", shapes.GPT2, (60, 17), (9, 17), dtype="float16"),
    PagedCase("phi3_head96", shapes.PHI3_MINI, (20,), (20,)),
    PagedCase("phi3_head96_bf16", shapes.PHI3_MINI, (80,), (5,), dtype="bfloat16"),
    PagedCase("gemma3_head256_bf16", shapes.GEMMA3_4B, (90,), (9,), window=40, dtype="bfloat16"),
    PagedCase("gemma3_head256_window", shapes.GEMMA3_4B, (50,), (40,), window=32),
    PagedCase("gemma4_head512", shapes.GEMMA4_E2B_FULL, (50, 0), (20, 0), padding=3),
    PagedCase("gemma4_head512_bf16", shapes.GEMMA4_E2B_FULL, (90,), (9,), dtype="bfloat16"),
    PagedCase("smollm2_tp3_cap", shapes.SMOLLM2_135M_TP3, (70, 9), (70, 3), cap=0.5),
    PagedCase(
        "gpt2_slopes", shapes.GPT2, (60, 0, 170), (9, 0, 70), padding=3, slopes=True, tags=_XLA
    ),
    PagedCase(
        "smollm2_tp3_slopes_window", _SMOL_TP3, (200,), (66,), slopes=True, window=130, tags=_XLA
    ),
    PagedCase(
        "gpt2_slopes_root", shapes.GPT2, (60, 0, 170), (9, 0, 70), slopes=True, root=True, tags=_XLA
    ),
    PagedCase(
        "gpt2_sink_values",
        shapes.GPT2,
        (60, 0, 90),
        (9, 0, 70),
        padding=3,
        sink_values=True,
        tags=_XLA,
    ),
    PagedCase("gpt_oss_sinks", shapes.GPT_OSS_20B, (70, 0), (70, 0), padding=3, sinks=True),
    PagedCase("gpt_oss_sinks_window", shapes.GPT_OSS_20B, (200,), (9,), sinks=True, window=128),
    PagedCase(
        "gpt_oss_tp8_sinks_bf16",
        shapes.GPT_OSS_20B_TP8,
        (400, 20),
        (50, 20),
        sinks=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    PagedCase(
        "smollm2_tp3_sinks_window_bf16",
        _SMOL_TP3,
        (150,),
        (66,),
        sinks=True,
        window=40,
        dtype="bfloat16",
        tags=("full",),
    ),
    PagedCase(
        "gpt_oss_many_sinks_window",
        shapes.GPT_OSS_20B,
        (300, 1, 2000, 0, 77),
        (300, 1, 900, 0, 64),
        padding=99,
        sinks=True,
        window=128,
        dtype="bfloat16",
        tags=("full",),
    ),
    PagedCase(  # enough tokens for Mosaic's three compute warpgroups
        "gpt_oss_tp8_4200_tokens",
        shapes.GPT_OSS_20B_TP8,
        (900, 350) * 7,
        (300,) * 14,
        sinks=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    PagedCase(
        "gemma4_26b_many",
        shapes.GEMMA4_26B_FULL,
        (300, 1, 2000, 0, 77),
        (300, 1, 900, 0, 64),
        padding=99,
        dtype="bfloat16",
        tags=("full",),
    ),
    PagedCase("qwen3_4b_long", shapes.QWEN3_4B, (4097, 100), (130, 100), tags=("full",)),
    PagedCase(
        "qwen3_4b_many",
        shapes.QWEN3_4B,
        (300, 1, 2000, 0, 77),
        (300, 1, 900, 0, 64),
        padding=99,
        dtype="bfloat16",
        tags=("full",),
    ),
    *_prompt_steps(
        ("t8192_ctx8192", 1, 8192, 8192, 16),
        ("t8192_ctx8192_page64", 1, 8192, 8192, 64),
        ("t8192_ctx16384", 1, 8192, 16384, 16),
        ("t8192_32x256", 32, 256, 256, 16),
        ("t1024_ctx1024", 1, 1024, 1024, 16),
        ("t512_ctx512", 1, 512, 512, 16),
        ("t256_ctx256", 1, 256, 256, 16),
    ),
    *_prompts_with_sinks(),
    *_prompts_of_gemma4(),
    *_fp8(),
    *_few_queries(),
    *_hits(),
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
    args: dict[str, Any] = {
        "q": q.astype(jnp.dtype(case.dtype)),
        "k_pages": arrays.k_pages,
        "v_pages": arrays.v_pages,
        "page_table": arrays.page_table,
        "seq_lens": np.asarray(case.seq_lens, np.int32),
        "query_start_loc": starts,
        **sinks_of(case, rng, shape[0]),
        "k_scales": arrays.k_scales,
        "v_scales": arrays.v_scales,
        "slopes": slopes_of(case),
    }
    static: dict[str, Any] = {"window": case.window, "cap": case.cap, "root": case.root}
    return Inputs((PrefillArgs(**args, scale=heads.head_dim**-0.5, **static),))


def cost(case: PagedCase) -> Cost:
    """Visible keys and values read once, queries read and outputs written."""
    heads, rows = case.heads, range(len(case.seq_lens))
    item = jnp.dtype(case.dtype).itemsize
    kv_item = jnp.dtype(case.kv_dtype or case.dtype).itemsize
    keys = sum(case.touched_keys(row) for row in rows)
    scales = keys * heads.num_kv_heads * 4 if case.kv_dtype == _FP8 else 0
    components = keys * heads.num_kv_heads * kv_item + sum(case.query_lens) * heads.num_heads * item
    return Cost(
        bytes=2 * (components * heads.head_dim + scales),
        flops=4 * sum(map(case.visible_keys, rows)) * heads.num_heads * heads.head_dim,
    )
