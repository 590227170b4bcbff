"""Which calls the Triton kernels of the delta rule and of its convolution refuse, and their launch
parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.delta_decode import launch as decode_launch
from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.delta_prefill import launch as prefill_launch
from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.short_conv import launch as conv_launch
from pallas_kernels.short_conv.api import short_conv
from pallas_kernels.short_conv.ref import ShortConvArgs

ROWS, KEY_HEADS, HEADS = 3, 2, 4


def array(*shape: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def decode_call(key_dim: int, value_dim: int, width: int = 4) -> DeltaDecodeArgs:
    channels = 2 * KEY_HEADS * key_dim + HEADS * value_dim
    return DeltaDecodeArgs(
        qkv=array(ROWS, channels),
        gates=array(ROWS, 2 * HEADS),
        z=array(ROWS, HEADS * value_dim),
        conv=array(width, channels),
        decay=array(2 * HEADS, dtype="float32"),
        norm=array(value_dim),
        states=array(ROWS, HEADS, key_dim, value_dim, dtype="float32"),
        convs=array(ROWS, width, channels),
        positions=array(ROWS, dtype="int32"),
        rows=array(ROWS, dtype="int32"),
        eps=1e-6,
    )


def prefill_call(key_dim: int, value_dim: int, dtype: str = "bfloat16") -> DeltaPrefillArgs:
    tokens, rows = 100, array(ROWS, dtype="int32")
    return DeltaPrefillArgs(
        q=array(tokens, KEY_HEADS, key_dim, dtype=dtype),
        k=array(tokens, KEY_HEADS, key_dim, dtype=dtype),
        v=array(tokens, HEADS, value_dim, dtype=dtype),
        log_decay=array(tokens, HEADS, dtype="float32"),
        beta=array(tokens, HEADS, dtype="float32"),
        states=array(ROWS, HEADS, key_dim, value_dim, dtype="float32"),
        query_start_loc=array(ROWS + 1, dtype="int32"),
        begins=rows,
        reads=rows,
        writes=rows,
    )


def conv_call(width: int, dtype: str = "bfloat16", channels: int = 80) -> ShortConvArgs:
    rows = array(ROWS, dtype="int32")
    return ShortConvArgs(
        x=array(100, channels, dtype=dtype),
        weights=array(width, 72, dtype=dtype),
        kept=array(ROWS, width, 72, dtype=dtype),
        query_start_loc=array(ROWS + 1, dtype="int32"),
        begins=rows,
        reads=rows,
        writes=rows,
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (decode_call(128, 128), None),
        (decode_call(256, 128), None),
        (decode_call(96, 128), "keys have 96 components"),
        (decode_call(128, 8), "values have 8 components"),
        (decode_call(256, 256), "a state of 256 x 256"),
        (decode_call(128, 128, width=9), "the convolution has 9 taps"),
    ],
)
def test_decode_refuses_what_does_not_fit(call: DeltaDecodeArgs, reason: str | None) -> None:
    refused = decode_launch.supports(call)
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (prefill_call(128, 128), None),
        (prefill_call(16, 64), None),
        (prefill_call(96, 128), "keys have 96 components"),
        (prefill_call(128, 256), "values have 256 components"),
    ],
)
def test_prefill_refuses_what_does_not_fit(call: DeltaPrefillArgs, reason: str | None) -> None:
    refused = prefill_launch.supports(call)
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (conv_call(4), None),
        (conv_call(8, "float32"), None),
        (conv_call(9), "the convolution has 9 taps"),
        (conv_call(4, "float64"), "float64, not one of"),
    ],
)
def test_convolution_refuses_what_does_not_fit(call: ShortConvArgs, reason: str | None) -> None:
    refused = conv_launch.supports(call)
    assert refused is None if reason is None else reason in (refused or "")


def test_the_first_tile_of_a_row_has_all_tokens_that_read_the_state() -> None:
    """So the CTA that overwrites the state is the only one that reads it."""
    widest = conv_call(conv_launch.MAX_WIDTH)
    assert conv_launch.choose_config(widest).tokens >= conv_launch.MAX_WIDTH - 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": array(100, 71)},
        {"kept": array(ROWS, 3, 72)},
        {"kept": array(ROWS, 4, 72, dtype="float32")},
        {"writes": array(ROWS + 1, dtype="int32")},
        {"query_start_loc": array(ROWS, dtype="int32")},
    ],
)
def test_arguments_of_the_convolution_fit_together(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="short_conv: .* (fit together|lengths)"):
        short_conv(replace(conv_call(4), **wrong))


def test_a_thread_has_the_same_part_of_any_state() -> None:
    assert decode_launch.num_warps(decode_call(128, 128)) == 4
    assert decode_launch.num_warps(decode_call(256, 128)) == 8
    assert decode_launch.num_warps(decode_call(32, 16)) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_values_of_a_head_are_whole_tiles(dtype: str) -> None:
    for value_dim in (16, 32, 128):
        call = prefill_call(128, value_dim, dtype)
        assert value_dim % prefill_launch.choose_config(call).values == 0
