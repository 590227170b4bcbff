"""Named calls of latent_prefill on the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import LatentCase, LatentHeads, latent_pools, paged_arrays

_LITE = shapes.DEEPSEEK_V2_LITE


def _prompt_steps(*steps: tuple[str, LatentHeads, int, int, int]) -> tuple[LatentCase, ...]:
    """Prompt steps on a GPU, from (name, sizes, rows, queries, context)."""
    return tuple(
        LatentCase(
            name,
            (context,) * rows,
            (queries,) * rows,
            sizes=sizes,
            page_size=16,
            max_pages=2048,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for name, sizes, rows, queries, context in steps
    )


def _few_queries() -> tuple[LatentCase, ...]:
    """A few queries of contexts that are long enough for several splits."""
    ragged: dict[str, Any] = {"padding": 4, "max_pages": 70}
    real = LatentCase(
        "v2_lite_splits",
        (1500, 20, 700),
        (30, 20, 9),
        sizes=_LITE,
        max_pages=2048,
        dtype="bfloat16",
        tags=("full", "gpu"),
    )
    one = replace(real, name="kimi_k2_splits", seq_lens=(900,), query_lens=(30,))
    hit = replace(one, name="v2_lite_1x30_of_8192", seq_lens=(8192,), padding=98)
    return (
        # rows with several splits, with one, without earlier tokens and without queries
        LatentCase("tiny_splits", (1100, 5, 0, 300, 40), (3, 5, 0, 17, 1), **ragged),
        LatentCase("tiny_splits_bf16", (1100, 300), (3, 70), dtype="bfloat16", **ragged),
        LatentCase("tiny_splits_fp8", (700, 9), (20, 9), kv_dtype=str(BITS), **ragged),
        real,
        replace(one, sizes=shapes.KIMI_K2),
        replace(one, name="v2_lite_splits_fp8", kv_dtype=str(BITS)),
        replace(hit, tags=("bench", "gpu")),
    )


CASES = (
    LatentCase("tiny_fp8", (20, 130, 3), (5, 40, 3), padding=3, kv_dtype=str(BITS)),
    LatentCase(
        "two_groups_fp8",
        (70, 40),
        (33, 40),
        sizes=LatentHeads(3, 32, 16, 32, 256),
        page_size=64,
        dtype="bfloat16",
        kv_dtype=str(BITS),
    ),
    LatentCase(
        "v2_lite_fp8",
        (600,),
        (512,),
        sizes=_LITE,
        max_pages=64,
        dtype="bfloat16",
        kv_dtype=str(BITS),
        tags=("full", "gpu"),
    ),
    LatentCase(
        "tiny_ragged",
        (40, 1, 0, 17, 130, 65, 15, 16, 128),
        (1, 1, 0, 17, 70, 65, 15, 16, 1),
        padding=21,
        max_pages=40,
    ),
    LatentCase("tiny_only_padding", (0, 0), (0, 0), padding=16, max_pages=4),
    LatentCase("tiny_bf16", (200, 9, 90), (100, 9, 3), padding=7, page_size=64, dtype="bfloat16"),
    LatentCase(
        "v2_lite_bf16",
        (70, 150),
        (70, 21),
        padding=3,
        sizes=_LITE,
        dtype="bfloat16",
        tags=("full",),
    ),
    LatentCase(
        "v2_lite_long_bf16",
        (4097, 100, 2000),
        (130, 100, 900),
        padding=99,
        sizes=_LITE,
        dtype="bfloat16",
        tags=("full",),
    ),
    *_few_queries(),
    *_prompt_steps(
        ("v2_lite_t512", _LITE, 1, 512, 512),
        ("v2_lite_t1024", _LITE, 1, 1024, 1024),
        ("v2_lite_t8192", _LITE, 1, 8192, 8192),
        ("v2_lite_32x256", _LITE, 32, 256, 256),
        ("v2_lite_t512_ctx4096", _LITE, 1, 512, 4096),
        ("v2_lite_t8192_ctx16384", _LITE, 1, 8192, 16384),
    ),
)


def build(case: LatentCase, seed: int) -> Inputs:
    """Inputs of a case; queries and entries of padding are NaN."""
    rng = np.random.default_rng(seed)
    sizes, real, dtype = case.sizes, sum(case.query_lens), jnp.dtype(case.dtype)
    arrays, tokens = paged_arrays(case, len(case.seq_lens), rng), real + case.padding
    pools, pages = latent_pools(arrays, sizes, case.dtype)
    starts = np.cumsum((0, *case.query_lens)).astype(np.int32)
    q = rng.standard_normal((tokens, sizes.num_heads, sizes.nope_dim + sizes.rope_dim), np.float32)
    entries = np.full((tokens, sizes.entry), np.nan, dtype)
    q[real:] = np.nan
    for row, (length, count) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        position = np.arange(max(length - count, 0), length)  # tests of compilation cut contexts
        slots = arrays.page_table[row, position // case.page_size], position % case.page_size
        entries[starts[row + 1] - len(position) : starts[row + 1]] = pages[slots]

    def weight(head_dim: int) -> np.ndarray:
        shape = (sizes.num_heads * head_dim, sizes.rank)
        return shapes.normal(rng, shape, dtype, sizes.rank**-0.5)

    args: dict[str, Any] = {
        "q": q.astype(dtype),
        "entries": entries,
        "k_up": weight(sizes.nope_dim),
        "v_up": weight(sizes.value_dim),
        **pools,
        "page_table": arrays.page_table,
        "seq_lens": np.asarray(case.seq_lens, np.int32),
        "query_start_loc": starts,
    }
    return Inputs((LatentPrefillArgs(**args, scale=sizes.scale),))


def cost(case: LatentCase) -> Cost:
    """Entries, queries and weights read once, outputs written; keys and values expanded once."""
    sizes, rows = case.sizes, range(len(case.seq_lens))
    item, tokens = jnp.dtype(case.dtype).itemsize, sum(case.query_lens)
    keys = sum(case.touched_keys(row) for row in rows)
    expanded = sizes.num_heads * (sizes.nope_dim + sizes.value_dim)
    of_head = sizes.nope_dim + sizes.rope_dim + sizes.value_dim
    components = keys * sizes.entry + expanded * sizes.rank + tokens * sizes.num_heads * of_head
    pairs = sum(map(case.visible_keys, rows))
    return Cost(
        bytes=components * item,
        flops=2 * (keys * expanded * sizes.rank + pairs * sizes.num_heads * of_head),
    )
