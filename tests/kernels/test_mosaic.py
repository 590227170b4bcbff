"""The Mosaic kernels without a GPU: right in JAX's interpreter, and lowered for Hopper.

The interpreter has no wgmma with an operand or an initial accumulator in registers, so
``_accumulate`` is replaced. Machine code is compiled on a GPU only, so these tests do not show
whether a kernel spills. The interpreter also fails on barriers with a phase that no warpgroup
waited for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kit.lowering import lowered_in_place
from pallas_kernels.harness.registry import Impl, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.page_scales import values_of
from pallas_kernels.lib.shapes import PagedCase
from pallas_kernels.paged_prefill import launch, mosaic, mosaic_plan
from pallas_kernels.paged_prefill.api import OP
from pallas_kernels.paged_prefill.converted.launch import RowPages
from pallas_kernels.paged_prefill.ref import PrefillArgs

MOSAIC = next(impl for impl in OP.impls if impl.name == "mosaic")
CASES = {case.name: case for case in OP.cases}
INTERPRETED = (
    "qwen3_4b_tp8_ragged_bf16",
    "qwen3_4b_tp8_page64",
    "smollm2_tp3_tile_edges_bf16",
    "smollm2_tp3_window_bf16",
    "smollm2_tp3_only_padding_f16",
    "smollm2_tp3_sinks_window_bf16",
    pytest.param("gpt_oss_tp8_sinks_bf16", marks=pytest.mark.nightly),
)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


def _accumulate(
    acc: jax.Array, p: jax.Array, v_smem: Any, init: Any = (), overlapped: Any = tuple
) -> Any:
    del init
    return acc + jnp.dot(p.astype(jnp.float32), v_smem[...].astype(jnp.float32)), overlapped()


@pytest.mark.parametrize("name", INTERPRETED)
@pytest.mark.usefixtures("on_hopper")
def test_the_interpreter_agrees_with_the_definition(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "_accumulate", _accumulate)
    inputs = OP.build(CASES[name], 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", mosaic.paged_prefill), CASES[name], inputs)
    assert problem is None, problem


@pytest.mark.parametrize(
    ("name", "num_sms"),
    [
        pytest.param("qwen3_4b_tp8_ragged_bf16", 3, marks=pytest.mark.nightly),
        ("qwen3_4b_tp8_ragged_bf16", 4),
        pytest.param("smollm2_tp3_window_bf16", 1, marks=pytest.mark.nightly),
        ("smollm2_tp3_tile_edges_bf16", 2),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_ctas_compute_several_tiles(
    name: str, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "_accumulate", _accumulate)
    small = Device("gpu", "few SMs", "9.0", num_sms=num_sms)
    inputs = OP.build(CASES[name], 0)
    kernel = mosaic.paged_prefill.__wrapped__  # not the trace of other tests
    with compiling_for(small), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", kernel), CASES[name], inputs)
    assert problem is None, problem


@pytest.mark.parametrize(
    "name",
    [
        "smollm2_tp3_tile_edges_bf16",  # a kv head of three query heads
        pytest.param("smollm2_tp3_sinks_window_bf16", marks=pytest.mark.nightly),
        pytest.param("gpt_oss_tp8_sinks_bf16", marks=pytest.mark.nightly),  # of eight
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_three_compute_warpgroups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "_accumulate", _accumulate)
    monkeypatch.setattr(mosaic, "num_warpgroups", lambda *_: 3)  # as for many tokens
    kernel = mosaic.paged_prefill.__wrapped__  # not the trace of other tests
    inputs = OP.build(CASES[name], 0)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", kernel), CASES[name], inputs)
    assert problem is None, problem


def _converted(args: PrefillArgs, rows: RowPages, capacity: int) -> tuple[jax.Array, ...]:
    """In place of Triton's: the converted pages, and NaN in those that belong to no row."""
    page = jnp.arange(capacity)
    row = jnp.minimum(jnp.sum(rows.ends <= page[:, None], axis=1), len(rows.ends) - 1)
    source = args.page_table[row, page + rows.shifts[row]]
    unused = (page >= rows.ends[-1])[:, None, None, None]
    pools = ((args.k_pages, args.k_scales), (args.v_pages, args.v_scales))
    return tuple(
        jnp.where(unused, jnp.nan, values_of(pages[source]) * scales[source, ..., None]).astype(
            args.q.dtype
        )
        for pages, scales in pools
        if scales is not None
    )


@pytest.mark.parametrize(
    "name",
    [
        "smollm2_tp3_ragged_window_fp8_bf16",
        pytest.param("smollm2_tp3_ragged_fp8_bf16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_the_pages_that_it_reads_are_converted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = pytest.importorskip("pallas_kernels.paged_prefill.converted.triton")
    monkeypatch.setattr(mosaic, "_accumulate", _accumulate)
    monkeypatch.setattr(converted, "converted", _converted)
    inputs = OP.build(CASES[name], 0)
    capacity, kernel = inputs.args[0].page_table.size, mosaic.paged_prefill.__wrapped__
    run = partial(converted.launch_with, capacity, attend=kernel)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("converted", run), CASES[name], inputs)
    assert problem is None, problem


@pytest.mark.parametrize(
    "name",
    [
        "smollm2_tp3_window_bf16",
        "qwen3_4b_t1024_ctx1024",
        pytest.param("gpt_oss_20b_t8192", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(name: str) -> None:
    inputs = OP.build(CASES[name], 0)
    assert select(OP, "gpu", inputs.args, inputs.static).name == "mosaic"
    text = lowered_in_place(OP, MOSAIC, inputs)
    assert "@mosaic_gpu" in text
    assert "stablehlo.while" not in text and "stablehlo.sort" not in text, "XLA adds control flow"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(CASES["smollm2_tile_edges"], "queries are float32", id="float32"),
        pytest.param(CASES["llama3_8b_fp8"], "pages uint8", id="fp8"),
        pytest.param(CASES["gemma3_head256_bf16"], "head_dim 256 is neither", id="head_dim"),
        pytest.param(CASES["llama3_8b_bf16"], "32 queries are fewer than", id="few_queries"),
        pytest.param(CASES[INTERPRETED[0]], "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: PagedCase, reason: str) -> None:
    inputs = OP.build(case, 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smollm2_tp3_window_bf16", "pages are bfloat16, not 8-bit floats"),
        ("llama3_8b_fp8", "17 queries, no more than 256,"),
        ("qwen3_4b_t512_ctx512_fp8", "compute capability none, not 9.x"),
    ],
)
def test_pages_that_are_not_converted(name: str, reason: str) -> None:
    impl = next(impl for impl in OP.impls if impl.name == "converted")
    inputs = OP.build(CASES[name], 0)
    assert reason in (impl.refuses("gpu", inputs.args, inputs.static) or "")


def _one_prompt(rows: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts and queries of a step with one prompt, in a bucket for several."""
    lens = (length, *(0,) * (rows - 1))
    return lens, lens


@pytest.mark.parametrize(
    ("lens", "num_tokens", "tile_tokens"),
    [
        pytest.param(_one_prompt(64, 1024), 4096, 64, id="one_prompt"),
        pytest.param(((0, 0), (0, 0)), 200, 128, id="only_padding"),
        pytest.param(((64, 500, 64), (64, 72, 64)), 200, 64, id="no_padding"),
        pytest.param(((63, 0, 70, 129), (63, 0, 1, 129)), 256, 128, id="uneven"),
        pytest.param(((7, 57, 1, 0, 60), (7, 57, 1, 0, 60)), 128, 64, id="unaligned_starts"),
    ],
)
def test_every_token_is_in_one_tile_within_its_context(
    lens: tuple[tuple[int, ...], tuple[int, ...]], num_tokens: int, tile_tokens: int
) -> None:
    seq_lens, query_lens = np.array(lens, np.int32)
    starts = np.append(0, np.cumsum(query_lens, dtype=np.int32))
    table = jnp.asarray(starts), jnp.asarray(seq_lens)
    tiles, num_tiles = map(np.asarray, mosaic_plan.tile_table(*table, num_tokens, tile_tokens))
    row, aligned_token, lead, count, position = tiles[tiles[:, mosaic_plan.COUNT] > 0].T
    first = launch.TOKEN_ALIGNMENT * aligned_token + lead
    position, count = position + lead, count - lead  # without the previous row's queries
    tokens = [np.arange(*span) for span in zip(first, first + count, strict=True)]
    assert sorted(np.concatenate(tokens)) == list(range(num_tokens))
    assert num_tiles == count.size and np.all(tiles[: num_tiles[0], mosaic_plan.COUNT] > 0)
    blocks = np.maximum(position + count, 0) + launch.BLOCK - 1
    assert np.all(np.diff(blocks // launch.BLOCK) <= 0)  # the longest first
    padding = first >= starts[-1]
    assert np.all(
        (row >= 0) & (row < len(seq_lens))
    )  # padding too, since every tile reads page ids
    assert np.all(padding | (starts[row] <= first) & (first + count <= starts[row + 1]))
    assert np.all(position + count <= np.where(padding, 0, seq_lens[row]))
    assert np.all(padding | (position + count > 0))
