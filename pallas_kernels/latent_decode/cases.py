"""Named calls of latent_decode on the shapes of real models."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.latent_pages import num_groups
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import (
    LatentCase,
    LatentHeads,
    as_floats,
    latent_pools,
    paged_arrays,
    poison,
)

_LITE = shapes.DEEPSEEK_V2_LITE
_TINY_WIDE = LatentHeads(70, 32, 16, 32, 64)  # more heads than a tile of the kernel


def _decode_steps() -> tuple[LatentCase, ...]:
    """Decode steps on a GPU; of DeepSeek-V3 and Kimi-K2 with all heads on one device."""
    models = (("v2_lite", _LITE), ("kimi_k2", shapes.KIMI_K2), ("v3", shapes.DEEPSEEK_V3))
    return tuple(
        LatentCase(
            f"{model}_step_b{rows}_ctx{context}",
            (context,) * rows,
            sizes=sizes,
            page_size=16,
            max_pages=2048,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for model, sizes in models
        for rows, context in ((1, 1056), (8, 1056), (64, 1056), (1, 16416), (8, 16416), (64, 4128))
    )


def _fp8() -> tuple[LatentCase, ...]:
    """Pages of 8 bits: one group of components, two, and those of the published sizes."""
    common: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": str(BITS)}
    two = LatentHeads(3, 32, 16, 32, 256)
    steps = {"page_size": 16, "max_pages": 2048, "tags": ("bench", "gpu")}
    return (
        LatentCase("tiny_fp8", (15, 16, 17, 1, 0, 65, 130), padding=2, kv_dtype=str(BITS)),
        LatentCase("two_groups_fp8", (40, 129, 0), sizes=two, page_size=64, **common),
        LatentCase("v2_lite_fp8", (300, 0, 1), sizes=_LITE, **common, tags=("full",)),
        LatentCase(
            "v3_step_b64_ctx4128_fp8", (4128,) * 64, sizes=shapes.DEEPSEEK_V3, **common, **steps
        ),
        LatentCase("v2_lite_step_b64_ctx1056_fp8", (1056,) * 64, sizes=_LITE, **common, **steps),
    )


CASES = (
    *_fp8(),
    LatentCase(
        "tiny_edges", (15, 16, 17, 1, 0, 33, 64, 65, 66, 128, 129, 513), padding=3, max_pages=40
    ),
    LatentCase("tiny_only_padding", (0,), padding=2, max_pages=4, tags=("full",)),
    LatentCase("tiny_wide_bf16", (40, 129), sizes=_TINY_WIDE, page_size=64, dtype="bfloat16"),
    LatentCase("v2_lite_bf16", (65, 129, 300, 0, 1), sizes=_LITE, dtype="bfloat16", tags=("full",)),
    LatentCase(
        "v3_bf16",
        (130, 31),
        sizes=shapes.DEEPSEEK_V3,
        page_size=64,
        dtype="bfloat16",
        tags=("full",),
    ),
    LatentCase(
        "v2_lite_long_bf16", (8192, 1, 4097, 0), sizes=_LITE, dtype="bfloat16", tags=("full",)
    ),
    LatentCase(
        "v3_many_rows_bf16",
        tuple(range(1, 600, 13)),
        sizes=shapes.DEEPSEEK_V3,
        padding=2,
        dtype="bfloat16",
        tags=("full",),
    ),
    *_decode_steps(),
)


def build(case: LatentCase, seed: int) -> Inputs:
    """Inputs of a case. The new token's slot holds NaN, and so do the queries of padding rows."""
    rng = np.random.default_rng(seed)
    real, sizes, dtype = len(case.seq_lens), case.sizes, jnp.dtype(case.dtype)
    rows = real + case.padding
    arrays = paged_arrays(case, rows, rng)
    pools, _ = latent_pools(arrays, sizes, case.dtype)
    seq_lens = np.zeros(rows, np.int32)
    seq_lens[:real] = case.seq_lens
    for row in np.flatnonzero(seq_lens):
        page, offset = divmod(seq_lens[row] - 1, case.page_size)
        poison(tuple(pools.values()), (arrays.page_table[row, page], offset))
    # Absorbed queries are larger than those they are made of, and scores about as large.
    queries = rng.standard_normal((rows, sizes.num_heads, sizes.entry), np.float32)
    queries *= (sizes.scale**-2 / sizes.entry) ** 0.5
    entries = rng.standard_normal((rows, sizes.entry), np.float32)
    queries[seq_lens == 0] = entries[seq_lens == 0] = np.nan
    queries = queries.astype(dtype)
    args: dict[str, Any] = {
        "q_latent": queries[..., : sizes.rank],
        "q_rope": queries[..., sizes.rank :],
        "entries": entries.astype(dtype),
        **pools,
        "page_table": arrays.page_table,
        "seq_lens": seq_lens,
    }
    return Inputs((LatentDecodeArgs(**args, scale=sizes.scale),))


def observable(outputs: Any) -> Any:
    """All but page 0. Unwritten slots, NaN, become 0, so that a stray write is a difference."""
    out, *pools = outputs
    return (out, *(jnp.where(jnp.isnan(pool[1:]), 0, pool[1:]) for pool in map(as_floats, pools)))


def cost(case: LatentCase) -> Cost:
    """Entries read once, queries and new entries read, outputs and new entries written."""
    sizes, rows = case.sizes, len(case.seq_lens)
    item = jnp.dtype(case.dtype).itemsize
    entry = sizes.entry * item
    if case.kv_dtype:
        entry = sizes.rank + 4 * num_groups(sizes.rank) + 2 * sizes.rope_dim
    keys = sum(case.seq_lens)
    tokens = rows * (sizes.num_heads * (sizes.entry + sizes.rank) + sizes.entry)
    return Cost(
        bytes=keys * entry + tokens * item,
        flops=2 * keys * sizes.num_heads * (sizes.entry + sizes.rank),
    )
