"""Which calls the Triton kernels of Mamba-2's state space refuse, and their launch parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ssd_decode import launch as decode_launch
from pallas_kernels.ssd_decode.api import ssd_decode
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill import launch as prefill_launch
from pallas_kernels.ssd_prefill.api import ssd_prefill
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs

ROWS, HEADS, GROUPS, TOKENS = 3, 4, 2, 100


def array(*shape: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def tokens(count: int, width: int, state_dim: int, dtype: str) -> dict[str, Any]:
    return {
        "mixed": array(count, HEADS * width + 2 * GROUPS * state_dim, dtype=dtype),
        "steps": array(count, HEADS, dtype=dtype),
        "decay": array(3, HEADS, dtype="float32"),
        "states": array(ROWS, HEADS, width, state_dim, dtype="float32"),
    }


def decode_call(
    width: int, state_dim: int, dtype: str = "bfloat16", taps: int = 4
) -> SsdDecodeArgs:
    rows, given = array(ROWS, dtype="int32"), tokens(ROWS, width, state_dim, dtype)
    channels = given["mixed"].shape[1]
    return SsdDecodeArgs(
        **given,
        positions=rows,
        rows=rows,
        conv=array(taps, channels, dtype=dtype),
        conv_bias=array(channels, dtype=dtype),
        convs=array(ROWS, taps, channels, dtype=dtype),
    )


def prefill_call(width: int, state_dim: int, dtype: str = "bfloat16") -> SsdPrefillArgs:
    rows = array(ROWS, dtype="int32")
    return SsdPrefillArgs(
        **tokens(TOKENS, width, state_dim, dtype),
        query_start_loc=array(ROWS + 1, dtype="int32"),
        begins=rows,
        reads=rows,
        writes=rows,
    )


@pytest.mark.parametrize(
    ("width", "state_dim", "dtype", "reason"),
    [
        (64, 256, "bfloat16", None),
        (80, 16, "bfloat16", None),
        (64, 64, "float32", None),
        (64, 96, "bfloat16", "states have 96 columns"),
        (64, 512, "bfloat16", "states have 512 columns"),
        (64, 8, "bfloat16", "states have 8 columns"),
        (8, 128, "bfloat16", "heads have 8 components"),
        (64, 64, "float64", "float64, not one of"),
    ],
)
def test_refuses_what_does_not_fit(
    width: int, state_dim: int, dtype: str, reason: str | None
) -> None:
    for refused in (
        decode_launch.supports(decode_call(width, state_dim, dtype)),
        prefill_launch.supports(prefill_call(width, state_dim, dtype)),
    ):
        assert refused is None if reason is None else reason in (refused or "")


def test_a_convolution_has_few_taps() -> None:
    refused = decode_launch.supports(decode_call(64, 128, taps=9))
    assert refused == "the convolution has 9 taps, more than 8"


def test_prompts_in_float32_have_narrower_states() -> None:
    assert decode_launch.supports(decode_call(64, 128, "float32")) is None
    refused = prefill_launch.supports(prefill_call(64, 128, "float32"))
    assert "from 16 to 64" in (refused or "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("state_dim", [16, 128, 256])
@pytest.mark.parametrize("width", [16, 64, 80, 96, 128])
def test_a_head_is_divided_into_whole_tiles(width: int, state_dim: int, dtype: str) -> None:
    decode = decode_launch.choose_config(decode_call(width, state_dim, dtype))
    assert width % decode.values == 0
    assert decode.values * state_dim <= decode_launch.STATE_OF_CTA
    assert width % prefill_launch.choose_config(prefill_call(width, state_dim, dtype)).values == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixed": array(ROWS, 4 * 64 + 3 * 128)},
        {"mixed": array(ROWS, 4 * 64)},
        {"steps": array(ROWS, HEADS + 1)},
        {"decay": array(2, HEADS, dtype="float32")},
        {"rows": array(ROWS + 1, dtype="int32")},
        {"keeps": array(ROWS - 1, dtype="int32")},
        {"conv": array(4, 72)},
        {"conv_bias": array(72)},
        {"convs": array(ROWS, 3, 4 * 64 + 4 * 128)},
        {"convs": None},
        {"conv": None, "convs": None},
    ],
)
def test_arguments_of_decode_rows_fit_together(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ssd_decode: .* (fit together|lengths)"):
        ssd_decode(replace(decode_call(64, 128), **wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixed": array(TOKENS, 4 * 64 + 3 * 128)},
        {"steps": array(TOKENS - 1, HEADS)},
        {"writes": array(ROWS + 1, dtype="int32")},
        {"query_start_loc": array(ROWS, dtype="int32")},
    ],
)
def test_arguments_of_prompts_fit_together(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ssd_prefill: .* (fit together|lengths)"):
        ssd_prefill(replace(prefill_call(64, 128), **wrong))
