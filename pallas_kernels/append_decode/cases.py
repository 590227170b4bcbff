"""Named calls of append_decode on the shapes of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.numerics import Values, heads_of_new_token
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import (
    Heads,
    PagedCase,
    comparable,
    paged_arrays,
    poison,
    sinks_of,
    slopes_of,
)


@dataclass(frozen=True)
class DecodeCase(PagedCase):
    """Contexts that end with the new token; ``rotary`` is False for models without rope (GPT-2).

    Without ``arrivals`` the op allocates the counters, without ``appends`` the new token is in the
    pages.
    """

    norms: bool = False
    norm_dtype: str | None = None  # of the norms' weights, if it is another one
    rotary: bool = True
    arrivals: bool = True
    values: Values = "projected"
    appends: bool = True


_XLA = ("ci", "cpu")  # of calls that no kernel of a GPU supports
_FP8 = str(BITS)
_FLOAT32_NORMS: Mapping[str, Any] = MappingProxyType({"dtype": "bfloat16", "norm_dtype": "float32"})
_SMOL, _QWEN = shapes.SMOLLM2_135M, shapes.QWEN3_0_6B
_SMOL_TP3, _GPT_OSS = shapes.SMOLLM2_135M_TP3, shapes.GPT_OSS_20B_TP8


def _odd_groups() -> tuple[DecodeCase, ...]:
    """For kernels of a GPU: groups of 1, 3, 5, 7, 12 and 16 heads of 128 components, and of 16 of
    others.
    """
    return tuple(
        DecodeCase(f"{name}_bf16", heads, (70, 1, 300, 17), dtype="bfloat16", tags=("full",))
        for name, heads in (
            ("heads8_gqa1", Heads(8, 8, 128)),
            ("llama3_2_3b_gqa3", shapes.LLAMA3_2_3B),
            ("qwen3_14b_gqa5", shapes.QWEN3_14B),
            ("qwen2_5_7b_gqa7", shapes.QWEN2_5_7B),
            ("glm4_5_tp8_gqa12", shapes.GLM4_5_TP8),
            ("glm4_9b_gqa16", shapes.GLM4_9B),
            ("heads32_dim64_gqa16", Heads(32, 2, 64)),
            ("heads32_dim256_gqa16", Heads(32, 2, 256)),
        )
    )


def _with_windows_and_sinks() -> tuple[DecodeCase, ...]:
    """For kernels of a GPU: windows that begin within a page, and groups of all sizes."""
    rows = tuple(range(1, 600, 13))
    return tuple(
        DecodeCase(
            f"{name}_bf16",
            heads,
            lens,
            padding=1,
            sinks=sinks,
            window=window,
            page_size=size,
            norms=heads.head_dim == 128,
            dtype="bfloat16",
            tags=("full",),
        )
        for name, heads, lens, window, sinks, size in (
            ("gpt_oss_tp8_sinks_window", shapes.GPT_OSS_20B_TP8, (300, 129, 3), 128, True, 16),
            ("smollm2_tp3_sinks_window_of_one", _SMOL_TP3, (70,), 1, True, 16),
            ("qwen3_4b_tp8_window_page64", shapes.QWEN3_4B_TP8, (321, 64), 100, False, 64),
            ("gpt_oss_rows_sinks", shapes.GPT_OSS_20B, rows, None, True, 16),
            ("gpt_oss_rows_sinks_window", shapes.GPT_OSS_20B, rows, 128, True, 16),
            ("gpt_oss_long_sinks_window", shapes.GPT_OSS_20B, (4097, 130), 128, True, 64),
            ("smollm2_rows_sinks_window_of_one", _SMOL, rows, 1, True, 16),
            ("qwen3_4b_rows_window_page8", shapes.QWEN3_4B, rows, 300, False, 8),
        )
    )


def _decode_steps() -> tuple[DecodeCase, ...]:
    """Decode steps on a GPU, with the contexts of docs/performance.md."""
    shapes_of_steps = (
        *((rows, 1056, 16, "") for rows in (1, 8, 16, 32, 64, 128, 256, 512)),
        (64, 1056, 64, ""),
        *((rows, 1056, 16, _FP8) for rows in (1, 8, 64, 256)),
        *((rows, 16416, 16, _FP8) for rows in (1, 8)),
        (1, 16416, 16, ""),
        (8, 16416, 16, ""),
    )
    return tuple(
        DecodeCase(
            f"qwen3_4b_step_b{rows}_ctx{context}_page{size}{'_fp8' if kv_dtype else ''}",
            shapes.QWEN3_4B,
            (context,) * rows,
            page_size=size,
            max_pages=2048 * 16 // size,
            dtype="bfloat16",
            kv_dtype=kv_dtype,
            tags=("bench", "gpu"),
            norms=True,
        )
        for rows, context, size, kv_dtype in shapes_of_steps
    )


def _steps_of_four_kv_heads() -> tuple[DecodeCase, ...]:
    """Decode steps of Qwen3-30B-A3B on a GPU: one row has half as many CTAs as with 8 kv heads."""
    return tuple(
        DecodeCase(
            f"qwen3_30b_step_b{rows}_ctx{context}",
            shapes.QWEN3_30B_A3B,
            (context,) * rows,
            max_pages=2048,
            dtype="bfloat16",
            tags=("bench", "gpu"),
            norms=True,
        )
        for rows, context in ((1, 1056), (1, 16416), (8, 1056), (64, 1056))
    )


def _steps_of_two_kv_heads() -> tuple[DecodeCase, ...]:
    """Decode steps of GLM-4 9B on a GPU: 16 query heads share a kv head."""
    return tuple(
        DecodeCase(
            f"glm4_9b_step_b{rows}_ctx{context}",
            shapes.GLM4_9B,
            (context,) * rows,
            max_pages=2048,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for rows, context in ((1, 1056), (8, 1056), (64, 1056), (256, 1056), (8, 16416))
    )


def _steps_with_sinks() -> tuple[DecodeCase, ...]:
    """Decode steps of gpt-oss-20b on a GPU: the layers with a window, and those without."""
    return tuple(
        DecodeCase(
            f"gpt_oss_20b_step_b{rows}_ctx{context}{f'_window{window}' if window else ''}",
            shapes.GPT_OSS_20B,
            (context,) * rows,
            max_pages=2048,
            sinks=True,
            window=window,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for window in (None, 128)
        for rows, context in ((1, 1056), (8, 1056), (64, 1056), (256, 1056), (8, 16416))
    )


def _gemma4(dtype: str) -> tuple[DecodeCase, ...]:
    """Heads of 512, values with a norm and those made of keys, and layers that append nothing."""
    suffix, wide = {"float32": "", "bfloat16": "_bf16"}[dtype], shapes.GEMMA4_E2B_FULL
    few, common = Heads(2, 1, 256), {"norms": True, "dtype": dtype}
    return (
        DecodeCase(f"gemma4_keys{suffix}", wide, (300, 3), values="keys", padding=1, **common),
        DecodeCase(f"gemma4_window{suffix}", few, (70,), window=32, values="normalised", **common),
        DecodeCase(f"gemma4_shared{suffix}", wide, (33, 0, 1), appends=False, **common),
        DecodeCase(f"gemma4_shared_window{suffix}", few, (70,), window=9, appends=False, **common),
    )


def _steps_of_wide_heads() -> tuple[DecodeCase, ...]:
    """Decode steps on a GPU: layers of Gemma 4 26B-A4B with and without a window, Qwen3.5-4B."""
    layers: tuple[tuple[str, Heads, int | None, Values], ...] = (
        ("gemma4_26b_window", shapes.GEMMA4_26B, 1024, "normalised"),
        ("gemma4_26b_full", shapes.GEMMA4_26B_FULL, None, "keys"),
        ("qwen3_5_4b", shapes.QWEN3_5_4B, None, "projected"),
    )
    return tuple(
        DecodeCase(
            f"{name}_b{rows}_ctx{context}",
            heads,
            (context,) * rows,
            max_pages=2048,
            window=window,
            values=values,
            dtype="bfloat16",
            tags=("bench", "gpu"),
            norms=True,
        )
        for name, heads, window, values in layers
        for rows, context in ((1, 1056), (8, 1056), (64, 1056), (1, 16416))
    )


def _fp8() -> tuple[DecodeCase, ...]:
    """Pages of 8 bits with each other field of a case; wide heads only as a GPU serves them."""
    full, few = shapes.GEMMA4_E2B_FULL, Heads(2, 1, 256)
    common: dict[str, Any] = {"kv_dtype": _FP8, "padding": 1}
    wide: dict[str, Any] = {"norms": True, "dtype": "bfloat16", **common}
    narrow = (
        DecodeCase("smollm2_tp3_fp8", _SMOL_TP3, (1, 16, 17, 0, 200), **common),
        DecodeCase("gpt2_fp8_no_rope", Heads(2, 2, 64), (3, 64), rotary=False, **common),
        DecodeCase("gpt_oss_tp8_fp8", _GPT_OSS, (300, 3), window=128, sinks=True, **common),
        DecodeCase("smollm2_tp3_fp8_cap", _SMOL_TP3, (40,), cap=0.5, **common),
        DecodeCase("heads2_dim80_fp8", Heads(2, 1, 80), (33, 2), **common),
    )
    return (
        *narrow,
        *(replace(x, name=f"{x.name}_bf16", dtype="bfloat16", tags=("full",)) for x in narrow),
        DecodeCase("gemma4_fp8_keys", full, (70, 3), values="keys", **wide),
        DecodeCase("gemma4_fp8_window", few, (70,), window=32, values="normalised", **wide),
        DecodeCase("gemma4_fp8_shared", few, (33, 0, 1), appends=False, **wide),
    )


def _contexts(model: str, heads: Heads) -> tuple[DecodeCase, ...]:
    """Decode steps on a CPU: batch 1, 8 and 64 at contexts 128, 1024 and 4096."""
    return tuple(
        DecodeCase(
            f"{model}_b{rows}_ctx{context}",
            heads,
            (context,) * rows,
            max_pages=512,
            tags=("bench",),
        )
        for rows in (1, 8, 64)
        for context in (128, 1024, 4096)
    )


CASES = (
    DecodeCase("smollm2_first_token", _SMOL, (1,)),
    DecodeCase("smollm2_page_edges", _SMOL, (15, 16, 17, 1, 33), max_pages=40),
    DecodeCase("smollm2_padding_rows", _SMOL, (5, 0, 40), padding=3, max_pages=40),
    DecodeCase("smollm2_only_padding", _SMOL, (0,), padding=2, max_pages=4),
    DecodeCase("smollm2_blocks", _SMOL, (64, 65, 66, 128, 129, 513, 528)),
    DecodeCase("smollm2_own_arrivals", _SMOL, (513, 3), arrivals=False),
    DecodeCase("smollm2_window", _SMOL, (1, 2, 8, 9, 10, 300), window=8),
    DecodeCase("smollm2_window_of_one", _SMOL, (1, 2, 70), window=1),
    DecodeCase("smollm2_window_blocks", _SMOL, (1, 301, 1000), window=300),
    DecodeCase("gpt2_no_rope", shapes.GPT2, (3, 64, 100), rotary=False, max_pages=64),
    DecodeCase("gpt2_no_rope_f16", shapes.GPT2, (60, 17), rotary=False, dtype="float16"),
    DecodeCase("llama3_70b_tp8_gqa8", shapes.LLAMA3_70B_TP8, (31, 32, 130)),
    DecodeCase("qwen2_5_7b_gqa7", shapes.QWEN2_5_7B, (20, 65), page_size=64),
    DecodeCase("qwen3_0_6b_page64", _QWEN, (63, 64, 65, 129), norms=True, page_size=64),
    DecodeCase("qwen3_5_bf16", Heads(8, 1, 256), (17, 70), norms=True, **_FLOAT32_NORMS),
    DecodeCase("qwen3_4b_bf16", shapes.QWEN3_4B, (17, 90), padding=1, norms=True, dtype="bfloat16"),
    DecodeCase(
        "qwen3_4b_fp8", shapes.QWEN3_4B, (17, 70), norms=True, dtype="bfloat16", kv_dtype=_FP8
    ),
    DecodeCase("smollm2_blocks_bf16", _SMOL, (64, 65, 66, 513, 0, 1), dtype="bfloat16"),
    DecodeCase("llama3_70b_tp8_gqa8_bf16", shapes.LLAMA3_70B_TP8, (31, 130), dtype="bfloat16"),
    DecodeCase(
        "qwen3_4b_tp8_page64_bf16",
        shapes.QWEN3_4B_TP8,
        (63, 64, 65, 321),
        norms=True,
        page_size=64,
        dtype="bfloat16",
    ),
    DecodeCase("phi3_head96_bf16", shapes.PHI3_MINI, (40, 3), dtype="bfloat16"),
    DecodeCase("gemma3_head256", shapes.GEMMA3_4B, (40, 90), norms=True, window=32),
    DecodeCase("gpt_oss_sinks", shapes.GPT_OSS_20B, (40, 0, 3), sinks=True),
    DecodeCase("gpt_oss_sinks_window", shapes.GPT_OSS_20B, (300, 5), sinks=True, window=128),
    DecodeCase("qwen3_4b_long", shapes.QWEN3_4B, (8192, 1, 4097, 0), norms=True, tags=("full",)),
    DecodeCase(
        "qwen3_4b_many_rows_bf16",
        shapes.QWEN3_4B,
        tuple(range(1, 600, 13)),
        padding=2,
        norms=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    *_odd_groups(),
    *_with_windows_and_sinks(),
    *_decode_steps(),
    *_steps_of_four_kv_heads(),
    *_steps_of_two_kv_heads(),
    *_steps_with_sinks(),
    *_gemma4("float32"),
    *_gemma4("bfloat16"),
    DecodeCase(
        "qwen3_5_4b_rows_bf16",
        shapes.QWEN3_5_4B,
        tuple(range(1, 600, 13)),
        padding=2,
        norms=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    DecodeCase(
        "gemma4_26b_window_rows_bf16",
        shapes.GEMMA4_26B,
        (*range(1, 600, 13), 1500),
        padding=2,
        window=1024,
        values="normalised",
        norms=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    DecodeCase(
        "gemma4_values_bf16",
        Heads(4, 2, 256),
        (200, 0, 300),
        values="normalised",
        norms=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    DecodeCase("smollm2_tp3_cap", _SMOL_TP3, (70, 0, 16), cap=0.5),
    DecodeCase(
        "gpt2_slopes", shapes.GPT2, (3, 0, 300), rotary=False, slopes=True, padding=1, tags=_XLA
    ),
    DecodeCase(
        "smollm2_tp3_slopes_window", _SMOL_TP3, (300, 9), slopes=True, window=140, tags=_XLA
    ),
    DecodeCase(
        "gpt2_slopes_root",
        shapes.GPT2,
        (3, 0, 300),
        rotary=False,
        slopes=True,
        root=True,
        tags=_XLA,
    ),
    DecodeCase(
        "gpt2_sink_values", shapes.GPT2, (3, 0, 300), rotary=False, sink_values=True, tags=_XLA
    ),
    DecodeCase("shared_sinks", _SMOL_TP3, (70, 0, 16), sinks=True, appends=False),
    DecodeCase(
        "gemma4_26b_rows",
        shapes.GEMMA4_26B_FULL,
        tuple(range(1, 900, 29)),
        padding=2,
        values="keys",
        norms=True,
        dtype="bfloat16",
        tags=("full",),
    ),
    *_steps_of_wide_heads(),
    *_fp8(),
    *_contexts("smollm2", _SMOL),
    *_contexts("qwen3_0_6b", _QWEN),
)


def build(case: DecodeCase, seed: int) -> Inputs:
    """Inputs of a case. A slot that is written holds NaN, and so do the heads of padding rows."""
    rng = np.random.default_rng(seed)
    real, heads, dtype = len(case.seq_lens), case.heads, jnp.dtype(case.dtype)
    rows, h = real + case.padding, heads.head_dim
    arrays = paged_arrays(case, rows, rng)
    seq_lens = np.zeros(rows, np.int32)
    seq_lens[:real] = case.seq_lens
    for row in np.flatnonzero(seq_lens) if case.appends else ():
        page, offset = divmod(seq_lens[row] - 1, case.page_size)
        poison(arrays.pools, (arrays.page_table[row, page], offset))
    new = heads_of_new_token(case.values) * heads.num_kv_heads if case.appends else 0
    qkv = rng.standard_normal((rows, heads.num_heads + new, h), np.float32)
    qkv[seq_lens == 0] = np.nan
    angles = rng.uniform(-np.pi, np.pi, (rows, h // 2)).astype(np.float32)
    norms = None
    if case.norms:
        norms = rng.uniform(0.5, 1.5, (1 + case.appends, h)).astype(case.norm_dtype or dtype)
    arrivals = np.zeros(rows * heads.num_kv_heads, np.int32) if case.arrivals else None
    args: dict[str, Any] = {
        "qkv": qkv.astype(dtype),
        "cos": np.cos(angles) if case.rotary else None,
        "sin": np.sin(angles) if case.rotary else None,
        "qk_norms": norms,
        "k_pages": arrays.k_pages,
        "v_pages": arrays.v_pages,
        "page_table": arrays.page_table,
        "seq_lens": seq_lens,
        "arrivals": arrivals,
        **sinks_of(case, rng, rows),
        "k_scales": arrays.k_scales,
        "v_scales": arrays.v_scales,
        "slopes": slopes_of(case),
    }
    static: dict[str, Any] = {"window": case.window, "values": case.values, "cap": case.cap}
    static["root"] = case.root
    return Inputs((DecodeArgs(**args, scale=h**-0.5, eps=1e-6, **static, appends=case.appends),))


def observable(outputs: Any) -> Any:
    """See ``lib.shapes.comparable``."""
    out, *pools = outputs
    return comparable(out, pools)


def cost(case: DecodeCase) -> Cost:
    """Visible keys and values read once; queries, new keys, new values and angles read; outputs and
    new slots written.
    """
    heads, rows = case.heads, len(case.seq_lens)
    item = jnp.dtype(case.dtype).itemsize
    kv_item = jnp.dtype(case.kv_dtype or case.dtype).itemsize
    keys = sum(case.touched_keys(row) for row in range(rows))
    # The new token is counted among the keys: its slots are written, the others read.
    pages = 2 * keys * heads.num_kv_heads * kv_item
    scales = 2 * keys * heads.num_kv_heads * 4 if case.kv_dtype == _FP8 else 0
    tokens = rows * (2 * (heads.num_heads + heads.num_kv_heads) * item + 4)
    return Cost(
        bytes=(pages + tokens) * heads.head_dim + scales,
        flops=4 * keys * heads.num_heads * heads.head_dim,
    )
