"""mask: reads of host memory, a mask that does not come, and errors for bad arguments."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kit.interpreted_process import interpreted
from pallas_kernels.mask import native
from pallas_kernels.mask.api import MaskArgs, mask
from pallas_kernels.mask.board import board_words, mask_words

SLOTS = 4

LOGITS, ROWS, PLACE = jnp.zeros((3, 40)), jnp.ones(3, jnp.int32), jnp.zeros(3, jnp.int32)
ARGS = MaskArgs(logits=LOGITS, finite=ROWS, wanted=ROWS, slots=ROWS, place=PLACE, num_slots=4)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_rows_wait_for_their_masks_and_fail_closed() -> None:
    kept, in_time = interpreted("kit.mask_board")
    assert in_time == [1, 1, 0, 1]
    assert kept == [[0, 31, 32, 19_999], list(range(20_000)), [], [5, 8_192]]


@pytest.mark.skipif(native.supports() is not None, reason="the library is not built")
@pytest.mark.parametrize("vocab", [40, 96, 1031])
def test_the_native_kernel(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SECONDS", 0.1)
    words, rng = mask_words(vocab), np.random.default_rng(0)
    board = np.zeros(board_words(SLOTS, vocab), np.int32)
    numbers, bits = board[:SLOTS], board[SLOTS:].reshape(SLOTS, words)
    bits[:] = rng.integers(-(2**31), 2**31, bits.shape)
    bits[2, ::2], bits[2, 1::2] = -1, 0
    numbers[[0, 2, 3]] = 7
    numbers[1] = 6  # of an earlier step
    place = np.append(np.array([board.ctypes.data], np.uint64).view(np.int32), 7)
    logits = rng.standard_normal((4, vocab), np.float32)
    wanted, slots = np.array([1, 0, 1, 1], np.int32), np.array([2, 3, 1, 0], np.int32)
    ones = np.ones(4, np.int32)
    given = {"logits": logits, "finite": ones, "wanted": wanted, "slots": slots, "place": place}
    args = MaskArgs(**jax.tree.map(jnp.asarray, given), num_slots=SLOTS)
    masked, in_time = mask(args, "native")
    allowed = np.unpackbits(bits[slots].view(np.uint8), axis=1, bitorder="little")[:, :vocab] > 0
    allowed[1], allowed[2] = True, False
    assert in_time.tolist() == [1, 1, 0, 1]
    np.testing.assert_array_equal(masked, np.where(allowed, logits, -np.inf))


@pytest.mark.skipif(native.supports() is not None, reason="the library is not built")
def test_without_a_board_no_mask_comes_in_time() -> None:
    logits, in_time = mask(ARGS, "native")
    assert in_time.tolist() == [0, 0, 0] and (logits == -jnp.inf).all()


def test_without_a_kernel_no_mask_comes_in_time() -> None:
    wanted = jnp.array([1, 0, 1], jnp.int32)
    logits, in_time = mask(replace(ARGS, wanted=wanted), "xla")
    assert in_time.tolist() == [0, 1, 0] and (logits == LOGITS).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"logits": jnp.zeros(3)}, "not int32.B", id="logits"),
        pytest.param({"finite": jnp.ones(3, bool)}, "finite is bool.3,., not int32", id="finite"),
        pytest.param({"wanted": ROWS[:2]}, "wanted is int32.2,., not int32.B", id="wanted"),
        pytest.param({"slots": jnp.zeros(3)}, "slots is float32", id="slots"),
        pytest.param({"place": ROWS[:2]}, "the place is int32.2,., not int32.3", id="place"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask(replace(ARGS, **change))
