"""append_decode in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper.

The interpreter does not model the shared memory of other CTAs: ``_share_state`` and ``_read_state``
are replaced by a table on the host. Machine code is compiled on a GPU only, so these tests do not
show whether a kernel spills.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.mosaic.gpu.launch_context import (
    LaunchContext,
    TileTransform,
)
from jax.experimental.mosaic.gpu.launch_context import (
    mgpu_dialect as dialect,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from kit.lowering import lowered_in_place
from pallas_kernels.append_decode import cases as append_decode
from pallas_kernels.append_decode import mosaic, mosaic_launch
from pallas_kernels.append_decode.api import OP
from pallas_kernels.append_decode.cases import DecodeCase
from pallas_kernels.append_decode.mosaic_launch import MosaicConfig
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness.registry import Impl, Inputs, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.shapes import (
    GEMMA4_26B,
    GLM4_5_TP8,
    GLM4_9B,
    GPT_OSS_20B_TP8,
    LLAMA3_2_3B,
    QWEN2_5_7B,
    QWEN3_4B_TP8,
    Heads,
)

MOSAIC = next(impl for impl in OP.impls if impl.name == "mosaic")
CASES = {case.name: case for case in append_decode.CASES}
QWEN_STEPS = [
    case
    for case in append_decode.CASES
    if case.name.startswith("qwen3_4b_step") and not case.kv_dtype and len(case.seq_lens) > 1
]
STEPS = [
    *QWEN_STEPS,
    CASES["gpt_oss_20b_step_b8_ctx1056_window128"],
    *(CASES[f"gemma4_26b_window_b{rows}_ctx1056"] for rows in (1, 8, 64)),
    *(CASES[f"glm4_9b_step_b{rows}_ctx1056"] for rows in (1, 8, 64, 256)),
]
INTERPRETED = [
    ("qwen3_4b_bf16", MosaicConfig(1, 64, 3, max_clusters=24)),
    ("gpt2_no_rope_f16", MosaicConfig(1, 128, 2, max_clusters=5)),
    ("smollm2_blocks_bf16", MosaicConfig(1, 64, 2, max_clusters=4)),
    ("llama3_70b_tp8_gqa8_bf16", MosaicConfig(2, 64, 2, max_clusters=9)),
    ("qwen3_4b_tp8_page64_bf16", MosaicConfig(4, 64, 2, max_clusters=4)),
    ("qwen3_4b_tp8_page64_bf16", MosaicConfig(2, 128, 2, max_clusters=4)),
    ("gpt_oss_tp8_sinks_window_bf16", MosaicConfig(2, 64, 2, max_clusters=4)),
    ("qwen3_4b_tp8_window_page64_bf16", MosaicConfig(1, 128, 2, max_clusters=2)),
    ("gemma4_window_bf16", MosaicConfig(1, 64, 2, max_clusters=2)),
    ("glm4_5_tp8_gqa12_bf16", MosaicConfig(2, 64, 2, max_clusters=4)),
]
INTERPRETED_NIGHTLY = [
    ("glm4_9b_gqa16_bf16", MosaicConfig(2, 128, 2, max_clusters=8)),
    ("heads32_dim64_gqa16_bf16", MosaicConfig(1, 64, 2, max_clusters=8)),
    ("heads32_dim256_gqa16_bf16", MosaicConfig(2, 64, 2, max_clusters=8)),
    ("gpt_oss_tp8_sinks_window_bf16", MosaicConfig(1, 64, 2, max_clusters=2)),
    ("gemma4_values_bf16", MosaicConfig(2, 64, 2, max_clusters=6)),
    ("smollm2_tp3_sinks_window_of_one_bf16", MosaicConfig(2, 64, 2, max_clusters=2)),
]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_launch, "not_hopper", lambda: None)


class _SharedStates:
    """The states of splits, by cluster and split."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}
        self.changed = threading.Condition()

    def put(self, cluster: Any, split: Any, *state: Any) -> np.int32:
        with self.changed:
            self.states[int(cluster), int(split)] = tuple(map(np.asarray, state))
            self.changed.notify_all()
        return np.int32(0)

    def get(self, *place: Any) -> tuple[np.ndarray, ...]:
        key = tuple(map(int, place))
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.states, 60)
            return self.states[key]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[_SharedStates]:
    table = _SharedStates()

    def share_state(scratch: Any, *state: jax.Array) -> None:
        place = (lax.axis_index(name) for name in ("cluster", "split"))
        io_callback(table.put, jax.ShapeDtypeStruct((), jnp.int32), *place, *state)
        plgpu.barrier_arrive(scratch.cluster_barrier)
        plgpu.barrier_wait(scratch.cluster_barrier)

    def read_state(scratch: Any, split: int) -> Any:
        place = lax.axis_index("cluster"), jnp.int32(split)
        refs = (scratch.m_smem, scratch.l_smem, scratch.acc_smem)
        return io_callback(
            table.get, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in refs], *place
        )

    monkeypatch.setattr(mosaic, "_share_state", share_state)
    monkeypatch.setattr(mosaic, "_read_state", read_state)
    yield table


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(pytest.param(*each, id=each[0]) for each in INTERPRETED),
        *(
            pytest.param(*each, marks=pytest.mark.nightly, id=each[0])
            for each in INTERPRETED_NIGHTLY
        ),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_the_interpreter_agrees_with_the_definition(
    name: str, config: MosaicConfig, table: _SharedStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(mosaic_launch, "MIN_CTAS", 1)
    inputs = OP.build(case, 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    launch_with = partial(mosaic.launch_with, config)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launch_with), case, inputs)
    assert problem is None, problem
    rows = len(case.seq_lens) + case.padding
    splits = config.splits if config.splits > 1 else 0
    assert len(table.states) == rows * case.heads.num_kv_heads * splits


def _call(case: DecodeCase) -> DecodeArgs:
    """A case's arguments as shapes, since its pools are slow to build."""
    rows, (n, k, h) = len(case.seq_lens), vars(case.heads).values()
    array: Any = jax.ShapeDtypeStruct
    dtype, width = jnp.dtype(case.dtype), -(-max(case.seq_lens) // case.page_size)
    angles = array((rows, h // 2), jnp.float32)
    pool = array((rows * width + 1, case.page_size, k, h), dtype)
    return DecodeArgs(
        qkv=array((rows, n + 2 * k, h), dtype),
        cos=angles,
        sin=angles,
        qk_norms=array((2, h), dtype) if case.norms else None,
        k_pages=pool,
        v_pages=pool,
        page_table=array((rows, width), jnp.int32),
        seq_lens=array((rows,), jnp.int32),
        sinks=array((n,), dtype) if case.sinks else None,
        scale=h**-0.5,
        eps=1e-6,
        window=case.window,
        values=case.values,
    )


UNSWIZZLED = [LLAMA3_2_3B, QWEN2_5_7B, GPT_OSS_20B_TP8, GEMMA4_26B, GLM4_5_TP8, GLM4_9B]
OFTEN = ("b8_ctx1056_page16", "b64_ctx1056_page64", "gemma4_26b_window_b64_ctx1056")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[pytest.mark.nightly] * (not case.name.endswith(OFTEN))
        )
        for case in STEPS
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper_in_place(case: DecodeCase) -> None:
    args = (_call(case),)
    assert select(OP, "gpu", args, {}).name == "mosaic"
    text = lowered_in_place(OP, MOSAIC, Inputs(args))
    assert "@mosaic_gpu" in text
    aliases = r"output_operand_alias<output_tuple_indices = \[(\d)\], operand_index = (\d)"
    assert sorted(re.findall(aliases, text)) == [("1", "1"), ("2", "2")]


@pytest.mark.parametrize("heads", UNSWIZZLED, ids=str)
def test_heads_are_not_swizzled(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of half a head from swizzled memory were wrong on an H200 (jax 0.11.2). The interpreter
    does not swizzle.
    """
    found: set[tuple[Any, tuple[int, ...]]] = set()
    copy = LaunchContext.async_copy

    def recorded(self: LaunchContext, **copied: Any) -> None:
        tiles = [x.tiling for x in copied["gmem_transform"] if isinstance(x, TileTransform)]
        found.add((copied["swizzle"], sum(tiles, start=())))
        copy(self, **copied)

    monkeypatch.setattr(LaunchContext, "async_copy", recorded)
    args = _call(DecodeCase("heads", heads, (70, 5), dtype="bfloat16"))
    step = partial(mosaic.launch_with, MosaicConfig(1, 64, 2, 4))
    jax.jit(step).trace(args).lower(lowering_platforms=("cuda",))
    of_pages, of_heads = (dialect.SwizzlingMode.k128ByteSwizzle, (8, 64)), ()
    assert found == {of_pages, (dialect.SwizzlingMode.kNoSwizzle, of_heads)}


WANTED = replace(CASES["qwen3_4b_bf16"], name="wanted")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(WANTED, dtype="float32"), "heads are float32", id="float32"),
        pytest.param(CASES["qwen3_4b_fp8"], "pages uint8", id="fp8"),
        pytest.param(CASES["phi3_head96_bf16"], "head_dim 96 is not", id="head_dim"),
        pytest.param(CASES["gemma4_keys_bf16"], "values are keys", id="values"),
        pytest.param(CASES["gemma4_shared_bf16"], "not appended", id="appends"),
        pytest.param(
            replace(WANTED, heads=Heads(48, 2, 128)), "24 query heads share a kv", id="group"
        ),
        pytest.param(replace(WANTED, page_size=24), "page_size 24 is not", id="page_size"),
        pytest.param(
            replace(WANTED, heads=QWEN3_4B_TP8, seq_lens=(90,), padding=0),
            "8 CTAs leave most",
            id="one_row",
        ),
        pytest.param(WANTED, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: DecodeCase, reason: str) -> None:
    inputs = OP.build(case, 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


def _with_table(args: DecodeArgs, width: int) -> DecodeArgs:
    table: Any = jax.ShapeDtypeStruct((args.qkv.shape[0], width), jnp.int32)
    return replace(args, page_table=table)


@pytest.mark.parametrize(
    ("rows", "width", "config"),
    [
        pytest.param(2, 67, MosaicConfig(8, 128, 2, 264), id="largest_cluster"),
        pytest.param(2, 12, MosaicConfig(2, 64, 3, 264), id="no_more_than_blocks"),
        pytest.param(8, 67, MosaicConfig(2, 128, 2, 264), id="one_cta_per_sm"),
        pytest.param(512, 67, MosaicConfig(1, 64, 3, 264), id="several_items_per_cta"),
    ],
)
def test_heuristic(rows: int, width: int, config: MosaicConfig) -> None:
    args = _with_table(_call(replace(QWEN_STEPS[0], seq_lens=(1057,) * rows)), width)
    assert mosaic_launch.heuristic_config(args) == config


@pytest.mark.parametrize(
    ("window", "splits", "block"),
    [(1, 1, 64), (128, 2, 64), (256, 4, 64), (1024, 8, 128), (None, 8, 128)],
)
def test_splits_follow_the_window(window: int | None, splits: int, block: int) -> None:
    case = replace(QWEN_STEPS[0], seq_lens=(1057,) * 2, window=window)
    config = mosaic_launch.heuristic_config(_with_table(_call(case), 2048))
    assert (config.splits, config.block) == (splits, block)


def test_a_tuned_choice_from_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    case, config = QWEN_STEPS[0], {"splits": 4, "block": 128, "stages": 2, "max_clusters": 132}
    files: list[str] = []

    def read(file: Any) -> dict[str, Any]:
        files.append(str(file))
        return {case.name: config}

    monkeypatch.setattr(mosaic_launch.tuned, "read_choices", read)
    args = _call(case)
    assert mosaic_launch.choose_config(args) == MosaicConfig(**config)
    assert mosaic_launch.choose_config(replace(args, window=64)) != MosaicConfig(**config)
    assert files[0].endswith("append_decode/tuned/mosaic/cpu.json")
