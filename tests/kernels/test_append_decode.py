"""append_decode: errors for bad arguments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.append_decode.api import DecodeArgs, append_decode

ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
ANGLES = jnp.zeros((ROWS, HEAD_DIM // 2))
PAGES = jnp.zeros((5, 16, KV_HEADS, HEAD_DIM))
FITTING: dict[str, Any] = {
    "qkv": jnp.zeros((ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)),
    "cos": ANGLES,
    "sin": ANGLES,
    "qk_norms": jnp.ones((2, HEAD_DIM)),
    "k_pages": PAGES,
    "v_pages": PAGES,
    "page_table": jnp.zeros((ROWS, 2), jnp.int32),
    "seq_lens": jnp.ones(ROWS, jnp.int32),
    "scale": 1.0,
    "eps": 1e-6,
}


def test_arguments_that_fit() -> None:
    out, k_pages, _ = append_decode(DecodeArgs(**FITTING))
    assert (out.shape, k_pages.shape) == ((ROWS, HEADS, HEAD_DIM), PAGES.shape)


def test_without_appends_nothing_is_written() -> None:
    pools = {"k_pages": PAGES + 1, "v_pages": PAGES + 2}
    change = {"qkv": FITTING["qkv"][:, :HEADS], "qk_norms": jnp.ones((1, HEAD_DIM)), **pools}
    out, k_pages, v_pages = append_decode(DecodeArgs(**FITTING | change, appends=False))
    assert (out == 2).all() and (k_pages == 1).all() and (v_pages == 2).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"qkv": FITTING["qkv"][:2]}, "do not fit pages", id="rows"),
        pytest.param({"qkv": FITTING["qkv"][:, :4]}, "do not fit pages", id="no_queries"),
        pytest.param({"qkv": FITTING["qkv"][:, :7]}, "not a multiple of 2 kv heads", id="group"),
        pytest.param({"qkv": FITTING["qkv"][:, :, :4]}, "do not fit pages", id="head_dim"),
        pytest.param({"v_pages": PAGES[1:]}, "and v_pages .* differ", id="pools"),
        pytest.param({"page_table": jnp.zeros((2, 2), jnp.int32)}, "page_table", id="page_table"),
        pytest.param({"sin": None}, "cos and sin come together", id="cos_alone"),
        pytest.param({"cos": ANGLES[:2]}, "do not fit 3 rows of head_dim 8", id="angles"),
        pytest.param({"qk_norms": jnp.ones((1, 8))}, "must be two of head_dim 8", id="norms"),
        pytest.param({"cos": None, "sin": None}, "with cos and sin", id="norms_without_rope"),
        pytest.param({"appends": False, "values": "keys"}, "no values to be keys", id="appends"),
        pytest.param({"appends": False}, "must be one of head_dim 8", id="norms_of_keys"),
        pytest.param({"window": 0}, "window must be at least 1", id="window"),
        pytest.param({"arrivals": jnp.zeros(5, jnp.int32)}, "fewer than 3 rows", id="arrivals"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        append_decode(DecodeArgs(**FITTING | change))
