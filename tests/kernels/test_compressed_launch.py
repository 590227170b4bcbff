"""Calls of attention to windows and compressed entries: what is refused, launches, workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.compressed_spec import (
    CompressedAttentionConfig,
    CompressorConfig,
    EntryIndexerConfig,
)
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.compressed_attention import launch
from pallas_kernels.compressed_attention.api import OP, compressed_attention
from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.harness.pins import ALL_XLA, NO_PINS, Pins
from pallas_kernels.harness.registry import workspace_of
from pallas_kernels.lib.device import Device, compiling_for

H200 = Device("gpu", "NVIDIA H200", "9.0")
array: Any = jax.ShapeDtypeStruct


def call_of(
    tokens: int,
    kind: str = "all",
    heads: int = 64,
    width: int = 512,
    dtype: str = "bfloat16",
    context: int = 32768,
    page_size: int = 16,
) -> CompressedAttentionArgs:
    """Shapes of a call of V4: windows of 128 tokens, and entries of 128 or of 4."""
    values, of_tokens = jnp.dtype(dtype), array((tokens,), jnp.int32)
    pieces, ratio = (16, 128) if kind == "all" else (1, 4)
    far: dict[str, Any] = {}
    if kind != "window":
        table = (8, context * pieces // ratio // page_size)
        far["far_pages"] = array((99, page_size, width // pieces), values)
        far["far_table"] = array(table, jnp.int32)
        far["reads"] = array((tokens, 512), jnp.int32) if kind == "chosen" else of_tokens
    return CompressedAttentionArgs(
        q=array((tokens, heads, width), values),
        pages=array((99, page_size, width), values),
        page_table=array((8, context // page_size), jnp.int32),
        sinks=array((heads,), jnp.float32),
        rows=of_tokens,
        last=of_tokens,
        **far,
        window=128,
        scale=0.1,
    )


@pytest.mark.parametrize(
    ("call", "heads", "splits"),
    [
        pytest.param(call_of(1, "window"), 64, 1, id="a_window_is_one_split"),
        pytest.param(call_of(1), 64, 2, id="384_entries"),
        pytest.param(call_of(1, context=1 << 20), 64, 32, id="a_million_tokens"),
        pytest.param(call_of(1, "chosen"), 64, 4, id="chosen"),
        pytest.param(call_of(32, "chosen"), 64, 3, id="more_rows_have_longer_splits"),
        pytest.param(call_of(64), 64, 1, id="rows_fill_half_of_the_gpu"),
        pytest.param(call_of(64, context=1 << 20), 64, 2, id="unless_contexts_are_long"),
        pytest.param(call_of(64, "chosen", heads=128), 64, 1, id="heads_of_two_ctas"),
        pytest.param(call_of(64, "chosen", heads=8), 16, 2, id="heads_of_one_device_of_8"),
        pytest.param(call_of(2048), 64, 1, id="prompt"),
        pytest.param(call_of(1, dtype="float32"), 16, 2, id="float32"),
    ],
)
def test_config(call: CompressedAttentionArgs, heads: int, splits: int) -> None:
    with compiling_for(H200):
        config = launch.choose_config(call)
    assert (config.heads, config.splits) == (heads, splits)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(4), None),
        (call_of(4, "chosen", page_size=8), None),
        (call_of(4, width=384), "entries have 384 components"),
        (call_of(4, width=1024), "entries have 1024 components"),
        (call_of(4, page_size=8), "pages of 8 do not hold whole entries of 16 pieces"),
        (
            replace(call_of(4), far_pages=array((9, 16, 32), jnp.dtype("float16"))),
            "the pages are bfloat16 and float16",
        ),
        (
            replace(call_of(4, "window"), q=array((4, 64, 512), jnp.dtype("float16"))),
            "the pages are bfloat16, not float16",
        ),
    ],
)
def test_refuses_what_does_not_fit(call: CompressedAttentionArgs, reason: str | None) -> None:
    refused = launch.supports(call)
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sinks": array((3,), jnp.float32)}, "do not fit pages"),
        ({"last": array((5,), jnp.int32)}, "rows .* and last .* must have an entry for each of 4"),
        ({"reads": None}, "must be given together"),
        ({"reads": array((5,), jnp.int32)}, "do not fit far_pages"),
        ({"reads": array((4, 3), jnp.int32)}, "entries are chosen whole"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        compressed_attention(replace(call_of(4), **changes))


def test_workspace_has_the_states_of_splits_and_slots() -> None:
    with compiling_for(H200):
        assert launch.workspace(call_of(2048)) == 0
        assert launch.workspace(call_of(1)) == 2 * 64 * 514 * 4
        assert launch.workspace(call_of(32, "chosen")) == 32 * (3 * 64 * 514 * 4 + 512 * 4)
        assert launch.workspace(call_of(2048, "chosen")) == 2048 * 512 * 4


@pytest.mark.parametrize("ratio", [0, 128, 4])
def test_the_memory_plan_knows_the_kernel(ratio: int) -> None:
    """A layer needs as much more with XLA's form as that does, which gathers entries."""
    index = EntryIndexerConfig(num_heads=64, head_dim=128, top_k=512) if ratio == 4 else None
    config = CompressedAttentionConfig(
        num_heads=64,
        head_dim=512,
        query_rank=1024,
        window=128,
        num_groups=8,
        group_rank=1024,
        rope=RopeConfig(64, 1e4),
        compressor=CompressorConfig(ratio=ratio, indexer=index) if ratio else None,
    )
    x = array((2048, 4096), jnp.dtype("bfloat16"))
    pins = {"xla": Pins((("compressed_attention", "xla"),)), "triton": NO_PINS}
    with compiling_for(H200):
        found = {
            name: config.workspace({}, StepShape(x, 4, "gpu", own)) for name, own in pins.items()
        }
        call = call_of(2048, {0: "window", 128: "all", 4: "chosen"}[ratio])
        needed = {name: workspace_of(OP, "gpu", call, name) for name in pins}
    assert needed["triton"] < needed["xla"] // 10
    if index is None:
        assert found["xla"] - found["triton"] == needed["xla"] - needed["triton"]
    else:  # the choice needs more than the kernel, and less than XLA's form
        assert 0 < found["xla"] - found["triton"] < needed["xla"]
    assert config.workspace({}, StepShape(x, 4, "gpu", ALL_XLA)) >= found["xla"]
