"""mask: reads of host memory, a mask that does not come, and errors for bad arguments."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import pytest

from kit.interpreted_process import interpreted
from pallas_kernels.mask.api import mask

LOGITS, ROWS, PLACE = jnp.zeros((3, 40)), jnp.ones(3, jnp.int32), jnp.zeros(3, jnp.int32)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_rows_wait_for_their_masks_and_fail_closed() -> None:
    kept, in_time = interpreted("kit.mask_board")
    assert in_time == [1, 1, 0, 1]
    assert kept == [[0, 31, 32, 19_999], list(range(20_000)), [], [5, 8_192]]


def test_without_the_kernel_no_mask_comes_in_time() -> None:
    wanted = jnp.array([1, 0, 1], jnp.int32)
    logits, in_time = mask(LOGITS, ROWS, wanted, ROWS, PLACE, num_slots=4)
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
    arguments = {"logits": LOGITS, "finite": ROWS, "wanted": ROWS, "slots": ROWS, "place": PLACE}
    with pytest.raises(ValueError, match=message):
        mask(**(arguments | change), num_slots=4)
