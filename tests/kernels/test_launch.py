"""Configurations of the kernels: heuristics, and tuned choices as data."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.append_decode import launch, mosaic_launch
from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness import tuned
from pallas_kernels.harness.registry import select
from pallas_kernels.latent_prefill import launch as latent_launch
from pallas_kernels.latent_prefill.api import OP as LATENT_PREFILL
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib import shapes
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.shapes import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    KIMI_K2,
    LatentHeads,
    PagedCase,
)
from pallas_kernels.paged_prefill import launch as prefill_launch
from pallas_kernels.paged_prefill.api import OP as PREFILL
from pallas_kernels.paged_prefill.cases import CASES as PREFILL_CASES
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.qk_rope_append.launch import heads_per_cta
from pallas_kernels.skinny_gemm import launch as gemm_launch
from pallas_kernels.skinny_gemm.cases import CASES as GEMM_CASES
from pallas_kernels.swiglu_gemm import launch as swiglu_launch
from pallas_kernels.swiglu_gemm.cases import CASES as SWIGLU_CASES

STEP = next(case for case in CASES if case.name == "qwen3_4b_step_b64_ctx1056_page16")


def call_of(
    rows: int, kv_heads: int, head_dim: int, pages: int, dtype: str = "bfloat16"
) -> DecodeArgs:
    """Shapes of a call, on which its configuration depends."""
    array: Any = jax.ShapeDtypeStruct
    pool = array((100, 16, kv_heads, head_dim), jnp.dtype(dtype))
    return DecodeArgs(
        qkv=array((rows, 6 * kv_heads, head_dim), jnp.dtype(dtype)),
        k_pages=pool,
        v_pages=pool,
        page_table=array((rows, pages), jnp.int32),
        seq_lens=array((rows,), jnp.int32),
        scale=1.0,
        eps=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "splits", "block"),
    [
        pytest.param(call_of(1, 8, 128, 2048), 32, 64, id="one_row_fills_the_gpu"),
        pytest.param(call_of(8, 8, 128, 2048), 4, 64, id="few_rows"),
        pytest.param(call_of(24, 8, 128, 2048), 1, 64, id="not_quite_two_splits"),
        pytest.param(call_of(256, 8, 128, 2048), 1, 64, id="many_rows"),
        pytest.param(call_of(1, 8, 128, 12), 2, 64, id="no_more_splits_than_blocks"),
        pytest.param(call_of(1, 1, 128, 1), 1, 64, id="one_page"),
        pytest.param(call_of(64, 8, 64, 64), 1, 64, id="narrow_heads_take_no_more_keys"),
        pytest.param(call_of(64, 8, 96, 64), 1, 64, id="head_dim_is_padded"),
        pytest.param(call_of(64, 4, 256, 64), 1, 32, id="wide_heads_take_fewer_keys"),
        pytest.param(call_of(1, 2, 512, 67), 32, 32, id="widest_heads_take_eight_warps"),
        pytest.param(call_of(64, 2, 512, 67), 2, 32, id="widest_heads_of_many_rows"),
        pytest.param(call_of(8, 8, 128, 64, "float32"), 4, 16, id="float32"),
    ],
)
def test_heuristic(call: DecodeArgs, splits: int, block: int) -> None:
    choice = launch.heuristic_config(call)
    assert (choice.splits, choice.block) == (splits, block)


@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [(1, 48, 1), (8, 48, 1), (16, 48, 2), (32, 48, 4), (512, 48, 8)],
)
def test_heads_per_cta(tokens: int, heads: int, expected: int) -> None:
    assert heads_per_cta(tokens, heads) == expected


@pytest.mark.parametrize(
    ("q", "dtype", "rows", "block"),
    [
        pytest.param((8192, 32, 128), "bfloat16", 128, 64, id="fills_the_gpu"),
        pytest.param((512, 32, 128), "bfloat16", 64, 64, id="smaller_tiles_for_few_queries"),
        pytest.param((8192, 9, 64), "float16", 128, 128, id="narrow_heads_take_more_keys"),
        pytest.param((16, 8, 256), "bfloat16", 128, 64, id="wide_heads_take_eight_warps"),
        pytest.param((16, 8, 512), "bfloat16", 128, 32, id="widest_heads_divide_their_values"),
        pytest.param((8192, 32, 128), "float32", 16, 16, id="float32"),
    ],
)
def test_heuristic_of_prefill(q: tuple[int, ...], dtype: str, rows: int, block: int) -> None:
    choice = prefill_launch.heuristic_config(jax.ShapeDtypeStruct(q, jnp.dtype(dtype)))
    assert (choice.rows, choice.block) == (rows, block)
    assert choice.value_columns == (256 if q[2] > 256 else 0)


def prefill_of(
    tokens: int, heads: int, kv_heads: int, head_dim: int, pages: int = 2048, **settings: Any
) -> PrefillArgs:
    """Shapes of a call in bfloat16, on which its splits depend."""
    array: Any = jax.ShapeDtypeStruct
    pool = array((100, 16, kv_heads, head_dim), jnp.bfloat16)
    return PrefillArgs(
        q=array((tokens, heads, head_dim), jnp.bfloat16),
        k_pages=pool,
        v_pages=pool,
        page_table=array((8, pages), jnp.int32),
        seq_lens=array((8,), jnp.int32),
        query_start_loc=array((9,), jnp.int32),
        scale=0.1,
        **settings,
    )


@pytest.mark.parametrize(
    ("call", "splits"),
    [
        pytest.param(prefill_of(128, 32, 8, 128), 16, id="qwen3_4b"),
        pytest.param(prefill_of(128, 16, 4, 256), 16, id="wide_heads_have_two_ctas"),
        pytest.param(prefill_of(16, 32, 32, 128), 4, id="kv_heads_take_a_quarter"),
        pytest.param(prefill_of(128, 32, 8, 128, 60), 2, id="no_more_than_the_pages_have"),
        pytest.param(prefill_of(128, 64, 8, 64, window=1024), 4, id="or_a_window"),
        pytest.param(prefill_of(128, 64, 8, 64, window=128), 1, id="narrow_window"),
        pytest.param(prefill_of(128, 32, 8, 128, 31), 1, id="short_context"),
        pytest.param(prefill_of(512, 32, 8, 128), 1, id="many_tokens"),
        pytest.param(prefill_of(16, 96, 96, 128), 1, id="kv_heads_fill_the_gpu"),
    ],
)
def test_splits_of_few_queries(call: PrefillArgs, splits: int) -> None:
    """With one, another kernel is chosen."""
    reason = prefill_launch.split_supports(call)
    assert (reason is None) == (splits > 1)
    assert call.q.shape[0] > 256 or prefill_launch.split_config(call).splits == splits
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        chosen = select(PREFILL, "gpu", (call,), {}).name
        assert chosen == ("mosaic" if reason else "split") or call.q.shape[0] < 64
        # a pin keeps the kernel that it names
        assert select(PREFILL, "gpu", (call,), {}, pinned="triton").name == "triton"


def latent_of(tokens: int, sizes: LatentHeads, pages: int = 2048) -> LatentPrefillArgs:
    """Shapes of a call of latent attention in bfloat16."""
    array: Any = jax.ShapeDtypeStruct
    heads = sizes.num_heads
    return LatentPrefillArgs(
        q=array((tokens, heads, sizes.nope_dim + sizes.rope_dim), jnp.bfloat16),
        entries=array((tokens, sizes.entry), jnp.bfloat16),
        k_up=array((heads * sizes.nope_dim, sizes.rank), jnp.bfloat16),
        v_up=array((heads * sizes.value_dim, sizes.rank), jnp.bfloat16),
        pages=array((100, 16, sizes.entry), jnp.bfloat16),
        page_table=array((8, pages), jnp.int32),
        seq_lens=array((8,), jnp.int32),
        query_start_loc=array((9,), jnp.int32),
        scale=0.1,
    )


@pytest.mark.parametrize(
    ("call", "splits", "items"),
    [
        pytest.param(latent_of(128, DEEPSEEK_V2_LITE), 8, 74, id="v2_lite"),
        pytest.param(latent_of(128, KIMI_K2), 2, 20, id="64_heads_take_half"),
        pytest.param(latent_of(128, DEEPSEEK_V3), 1, None, id="128_heads_fill_the_gpu"),
        pytest.param(latent_of(128, DEEPSEEK_V2_LITE, 60), 2, 20, id="few_pages"),
        pytest.param(latent_of(128, DEEPSEEK_V2_LITE, 31), 1, None, id="short_context"),
        pytest.param(latent_of(512, DEEPSEEK_V2_LITE), 8, None, id="many_tokens"),
    ],
)
def test_splits_of_latents(call: LatentPrefillArgs, splits: int, items: int | None) -> None:
    """A row that fills the GPU alone has no more items than CTAs: 8 rows, and 10 tiles."""
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        config = latent_launch.split_config(call)
        assert config.splits == splits
        chosen = select(LATENT_PREFILL, "gpu", (call,), {}).name
        assert chosen == ("split" if items else "triton")
        if items:
            assert latent_launch.most_items(config, call.q.shape[0], 8) == items
            n, value = call.q.shape[1], 128
            assert latent_launch.split_workspace(call) == 4 * splits * 128 * n * (value + 1)


def test_a_tuned_choice_wins_over_the_heuristic(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "device.json"
    choice = {"splits": 2, "block": 32, "num_warps": 8, "num_stages": 2}
    file.write_text(json.dumps({STEP.name: choice}))
    monkeypatch.setattr(tuned, "tuned_file", lambda op, device_kind: file)
    assert launch.choose_config(call_of(64, 8, 128, 2048)) == launch.TritonConfig(**choice)
    other = call_of(32, 8, 128, 2048)
    assert launch.choose_config(other) == launch.heuristic_config(other)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(("qwen9_4b",), "name 'qwen9_4b', which is not a case", id="unknown"),
        pytest.param(("a", "b"), "name 'b' and another case of the same shapes", id="ambiguous"),
    ],
)
def test_choices_for_unknown_or_ambiguous_cases(names: tuple[str, ...], message: str) -> None:
    cases = [PagedCase(name, shapes.QWEN3_4B, (length,)) for name, length in (("a", 1), ("b", 9))]
    with pytest.raises(ValueError, match=message):
        tuned.by_shapes(dict.fromkeys(names, {}), cases, launch.shapes_of)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("skinny_gemm", '{"qwen9_4b": {}}', "tuned choices name 'qwen9_4b', which is not a case"),
        ("append_decode/mosaic", '{"qwen9_4b": {}}', "tuned choices name 'qwen9_4b', which is not"),
        ("append_decode", '{"qwen3', "Unterminated string"),
        ("paged_prefill", "[]", "it is not a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used(
    name: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.check_choices()
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        tuned.check_choices()
    file, elsewhere = tmp_path / "cpu.json", tmp_path / "none.json"
    file.write_text(content)
    monkeypatch.setattr(tuned, "tuned_file", lambda one, kind: file if one == name else elsewhere)
    with pytest.raises(ValueError, match=f"{file} cannot be used: {message}.*; tune {name} again"):
        tuned.check_choices()


def test_files_are_in_the_folder_of_their_op() -> None:
    file = tuned.tuned_file("append_decode", "NVIDIA H200")
    assert str(file).endswith("pallas_kernels/append_decode/tuned/nvidia_h200.json")


@pytest.mark.parametrize(
    ("folder", "module", "config", "cases"),
    [
        ("append_decode/tuned", launch, launch.TritonConfig, CASES),
        ("append_decode/tuned/mosaic", mosaic_launch, mosaic_launch.MosaicConfig, CASES),
        ("paged_prefill/tuned", prefill_launch, prefill_launch.TritonConfig, PREFILL_CASES),
        ("skinny_gemm/tuned", gemm_launch, gemm_launch.GemmConfig, GEMM_CASES),
        ("swiglu_gemm/tuned", swiglu_launch, swiglu_launch.SwigluConfig, SWIGLU_CASES),
    ],
)
def test_tuned_files_name_real_cases(
    folder: str, module: ModuleType, config: type, cases: tuple[Any, ...]
) -> None:
    for file in (Path(tuned.__file__).parent / folder).glob("*.json"):
        choices = tuned.by_shapes(tuned.read_choices(file), cases, module.shapes_of)
        assert all(config(**choice) for choice in choices.values())
