"""Pins: unknown names and other platforms' implementations are refused before any work."""

from __future__ import annotations

import pytest

from pallas_kernels.harness.pins import ALL_XLA, Pins, checked_pins


def test_ops_without_a_pin_are_left_to_select() -> None:
    pins = checked_pins({"paged_prefill": "xla", "kv_append": "xla"}, "gpu")
    assert pins == checked_pins({"kv_append": "xla", "paged_prefill": "xla"}, "gpu")
    assert (pins.of("kv_append"), pins.of("append_decode"), Pins().of("kv_append")) == (
        "xla",
        None,
        None,
    )


def test_all_ops_may_be_pinned_at_once() -> None:
    assert checked_pins(dict(ALL_XLA.pairs), "gpu") == ALL_XLA


@pytest.mark.parametrize(
    ("by_op", "message"),
    [
        (
            {"flash": "xla"},
            "there is no kernel 'flash'; the kernels are all_gather, all_",
        ),
        ({"kv_append": "cuda"}, "kv_append has no implementation 'cuda'; it has triton, xla"),
        ({"kv_append": "triton"}, "kv_append=triton runs on gpu, not on cpu"),
        ({"links": "xla"}, "links can be pinned to none only, not to 'xla'"),
    ],
    ids=["op", "implementation", "platform", "links"],
)
def test_refused(by_op: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_pins(by_op, "cpu")
