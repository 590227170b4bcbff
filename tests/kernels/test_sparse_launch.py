"""Which calls the Triton kernels of the choice of tokens and of attention to them refuse, and their
launches.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.index_topk import launch as index_launch
from pallas_kernels.index_topk.ref import IndexTopkArgs
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.shapes import DEEPSEEK_V3, LatentHeads
from pallas_kernels.lib.token_tiles import tile_width
from pallas_kernels.sparse_latent import launch
from pallas_kernels.sparse_latent.cases import DEEPSEEK_V3_TP8, GLM_5
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

H200 = Device("gpu", "NVIDIA H200", "9.0")


def call_of(
    tokens: int, sizes: LatentHeads, chosen: int = 2048, dtype: str = "bfloat16"
) -> SparseLatentArgs:
    """Shapes of a call."""
    array: Any = jax.ShapeDtypeStruct
    heads = sizes.num_heads
    return SparseLatentArgs(
        q=array((tokens, heads, sizes.nope_dim + sizes.rope_dim), jnp.dtype(dtype)),
        k_up=array((heads * sizes.nope_dim, sizes.rank), jnp.dtype(dtype)),
        v_up=array((heads * sizes.value_dim, sizes.rank), jnp.dtype(dtype)),
        pages=array((99, 16, sizes.entry), jnp.dtype(dtype)),
        page_table=array((8, 2048), jnp.int32),
        rows=array((tokens,), jnp.int32),
        positions=array((tokens, chosen), jnp.int32),
        scale=0.1,
    )


@pytest.mark.parametrize(
    ("call", "heads", "splits"),
    [
        pytest.param(call_of(1, DEEPSEEK_V3_TP8), 16, 32, id="no_split_has_less_than_two_blocks"),
        pytest.param(call_of(8, DEEPSEEK_V3_TP8), 16, 16, id="few_tokens"),
        pytest.param(call_of(8, DEEPSEEK_V3), 64, 8, id="heads_of_two_ctas"),
        pytest.param(call_of(64, GLM_5), 64, 2, id="heads_of_one_cta"),
        pytest.param(call_of(64, DEEPSEEK_V3), 64, 1, id="tokens_fill_the_gpu"),
        pytest.param(call_of(8192, DEEPSEEK_V3_TP8), 16, 1, id="prompt"),
        pytest.param(call_of(1, DEEPSEEK_V3, 8), 64, 1, id="few_choices"),
        pytest.param(call_of(8, DEEPSEEK_V3, dtype="float32"), 16, 2, id="float32"),
    ],
)
def test_config(call: SparseLatentArgs, heads: int, splits: int) -> None:
    with compiling_for(H200):
        config = launch.choose_config(call)
    assert (config.heads, config.splits) == (heads, splits)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (GLM_5, None),
        (replace(GLM_5, rank=384), "latents have 384 components"),
        (replace(GLM_5, rank=1024), "latents have 1024 components"),
        (replace(GLM_5, rope_dim=8), "rotated keys have 8 components"),
    ],
)
def test_refuses_what_does_not_fit(sizes: LatentHeads, reason: str | None) -> None:
    refused = launch.supports(call_of(4, sizes))
    assert refused is None if reason is None else reason in (refused or "")


def test_workspace_is_that_of_one_launch() -> None:
    """A GB for each 4,096 tokens of 128 heads would not be left for pages."""
    most = launch.workspace(call_of(launch.MOST_TOKENS, DEEPSEEK_V3))
    assert launch.workspace(call_of(8 * launch.MOST_TOKENS, DEEPSEEK_V3)) == most
    assert most == launch.MOST_TOKENS * (128 * 512 * 2 * 4 + 2048 * 4)
    one = launch.workspace(call_of(1, DEEPSEEK_V3_TP8))
    assert one == 16 * 512 * 2 * 4 + 32 * 16 * 514 * 4 + 2048 * 4


def choice_of(
    tokens: int, heads: int = 64, width: int = 128, length: int = 32768, dtype: str = "bfloat16"
) -> IndexTopkArgs:
    """Shapes of a choice of 2,048 tokens."""
    array: Any = jax.ShapeDtypeStruct
    return IndexTopkArgs(
        q=array((tokens, heads, width), jnp.dtype(dtype)),
        weights=array((tokens, heads), jnp.float32),
        pages=array((99, 16, width), jnp.dtype("bfloat16")),
        page_table=array((8, length // 16), jnp.int32),
        rows=array((tokens,), jnp.int32),
        lens=array((tokens,), jnp.int32),
        top_k=2048,
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (choice_of(4), None),
        (choice_of(4, heads=12), None),
        (choice_of(4, heads=96), "96 heads are more than 64"),
        (choice_of(4, width=96), "keys have 96 components"),
        (choice_of(4, width=256), "keys have 256 components"),
        (choice_of(4, dtype="float16"), "the pages are bfloat16, not float16"),
    ],
)
def test_choices_that_do_not_fit(call: IndexTopkArgs, reason: str | None) -> None:
    refused = index_launch.supports(call)
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize(
    ("call", "tokens", "splits", "parts"),
    [
        pytest.param(choice_of(1), 1, 256, 4, id="no_more_splits_than_blocks"),
        pytest.param(choice_of(64), 64, 5, 4, id="rows"),
        pytest.param(choice_of(512), 512, 1, 4, id="prompt"),
        pytest.param(choice_of(8192), 512, 1, 4, id="the_scores_of_512_tokens_fit"),
        pytest.param(choice_of(8192, length=163840), 102, 3, 20, id="or_of_102"),
        pytest.param(choice_of(8, length=32 << 20), 1, 264, 4096, id="one_token_always_fits"),
        pytest.param(choice_of(8, length=16384), 8, 33, 1, id="two_chunks_are_one_part"),
    ],
)
def test_scores_in_memory(call: IndexTopkArgs, tokens: int, splits: int, parts: int) -> None:
    with compiling_for(H200):
        assert index_launch.most_tokens(call) == tokens
        assert index_launch.scores_config(call).splits == splits
    length = 16 * call.page_table.shape[1]
    assert index_launch.parts_of(call) == (parts, 8192 if parts > 1 else length)
    listed = parts * 2048 * 8 if parts > 1 else 0
    assert index_launch.workspace(call) == tokens * (4 * length + listed)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_long_prompts_are_several_launches() -> None:
    from kit.triton_shims import Recorder, in_place_of_triton_call
    from pallas_kernels.sparse_latent.triton import sparse_latent

    tokens, recorder = launch.MOST_TOKENS + 3, Recorder()
    with in_place_of_triton_call(recorder):
        out = jax.eval_shape(sparse_latent, call_of(tokens, DEEPSEEK_V3_TP8))
    assert out.shape == (tokens, 16, 128) and out.dtype == jnp.bfloat16
    assert [one.kernel.__name__ for one in recorder.calls] == ["_attend_split"]


def test_tiles_are_nearly_full() -> None:
    """A step of a prompt and some decode rows has few tokens more than a tile."""
    assert [tile_width(tokens, 1024, cap=1024) for tokens in (1, 1024, 1027, 3000)] == [
        *(1, 1024, 514, 1000)
    ]
    assert tile_width(100, 0) == 1 and tile_width(100, 1000) == 50
