"""publish: writes to host memory, and errors for bad arguments."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import pytest

from kit.interpreted_process import interpreted
from pallas_kernels.publish.api import OP, PublishArgs, publish

TOKENS, PLACE = jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_each_entry_is_the_steps_number_and_a_token() -> None:
    same, read, memory, after = interpreted("kit.publish_board")
    tokens = [0, 7, 2**31 - 1, 151_935, 4]
    assert same == read == tokens
    nothing = [0] * 7
    assert memory == [nothing, nothing, [(2 << 32) + token for token in tokens] + [0, 0], nothing]
    assert after == memory  # nothing at address 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"tokens": jnp.zeros((3, 1), jnp.int32)}, "not int32.B", id="tokens"),
        pytest.param({"tokens": jnp.zeros(3)}, "float32.* not int32.B", id="tokens_dtype"),
        pytest.param({"place": jnp.zeros(2, jnp.int32)}, "not int32.3", id="place"),
        pytest.param({"place": jnp.zeros(3)}, "float32.* not int32.3", id="place_dtype"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publish(PublishArgs(**({"tokens": TOKENS, "place": PLACE} | change)))


def test_nobody_publishes_nothing() -> None:
    assert OP.impls[0].supports(PublishArgs(tokens=TOKENS[:0], place=PLACE)) == "there are no rows"
