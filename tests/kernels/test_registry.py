"""Choice of an implementation: the first that can run or the pinned one, with all reasons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.harness import registry
from pallas_kernels.harness.registry import (
    Cost,
    Impl,
    Inputs,
    KernelOp,
    all_ops,
    current_platform,
    dispatch,
    select,
)
from pallas_kernels.lib.checks import NOT_INSTALLED
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill


def _narrow_only(x: jax.Array, *, scale: float) -> str | None:
    return None if x.shape[-1] <= 64 else f"width {x.shape[-1]} is above 64"


def _op(*impls: Impl) -> KernelOp:
    return KernelOp(
        name="double",
        ref=lambda x: 2 * x,
        impls=impls,
        cases=(),
        build=lambda case, seed: Inputs((), {}),
        cost=lambda case: Cost(0, 0),
        tolerance={},
    )


GPU_ONLY = Impl("triton", lambda x, *, scale: x, platforms=("gpu",))
NARROW = Impl("narrow", lambda x, *, scale: x, supports=_narrow_only)
ANY = Impl("xla", lambda x, *, scale: x)
DOUBLE = _op(GPU_ONLY, NARROW, ANY)


@pytest.mark.parametrize(
    ("platform", "width", "pinned", "chosen"),
    [
        pytest.param("gpu", 64, None, "triton", id="first_in_order"),
        pytest.param("cpu", 64, None, "narrow", id="platform_skipped"),
        pytest.param("cpu", 128, None, "xla", id="unsupported_shape_skipped"),
        pytest.param("gpu", 64, "xla", "xla", id="pinned_beats_order"),
    ],
)
def test_select(platform: str, width: int, pinned: str | None, chosen: str) -> None:
    args = (jnp.zeros((2, width)),)
    assert select(DOUBLE, platform, args, {"scale": 1.0}, pinned).name == chosen


@pytest.mark.parametrize(
    ("op", "pinned", "message"),
    [
        pytest.param(DOUBLE, "triton", "triton: it runs on gpu, not on cpu", id="platform"),
        pytest.param(DOUBLE, "narrow", "narrow: width 128 is above 64", id="shape"),
        pytest.param(DOUBLE, "cuda", "no implementation 'cuda'; it has triton, narrow", id="name"),
        pytest.param(_op(GPU_ONLY, NARROW), None, "triton: .*; narrow: ", id="none_can"),
    ],
)
def test_what_cannot_run_is_an_error_with_reasons(
    op: KernelOp, pinned: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select(op, "cpu", (jnp.zeros((2, 128)),), {"scale": 1.0}, pinned)


def test_pin_reaches_through_the_api() -> None:
    pages = jnp.zeros((2, 16, 1, 64))
    table, lens, starts = jnp.zeros((1, 1), int), jnp.ones(1, int), jnp.arange(2)
    context = {"page_table": table, "seq_lens": lens, "query_start_loc": starts}
    pools = {"k_pages": pages, "v_pages": pages}
    args = PrefillArgs(q=jnp.zeros((1, 1, 64)), **pools, **context, scale=1.0)
    with pytest.raises(ValueError, match="paged_prefill has no implementation 'nope'"):
        paged_prefill(args, impl="nope")


def test_each_choice_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every kind of call; a missing language adds one warning."""
    absent = Impl("fast", lambda x, *, scale: x, supports=lambda x, *, scale: NOT_INSTALLED)
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    registry._log_once.cache_clear()
    with caplog.at_level("INFO", logger=registry.__name__):
        for width in (4, 8, 4):
            dispatch(_op(absent, ANY), (jnp.zeros((2, width)),), {"scale": 1.0}, None)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == [
        f"double(float32[2, {width}]) is xla; fast: {NOT_INSTALLED}" for width in (4, 8)
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"slower kernels are used: {NOT_INSTALLED}"]


def test_platform_follows_the_default_device() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_platform() == "cpu"


def test_ops_are_complete() -> None:
    for op in all_ops():
        names = [case.name for case in op.cases]
        assert len(set(names)) == len(names), f"{op.name} names two cases alike"
        tags = {tag for case in op.cases for tag in case.tags}
        assert {"ci", "bench"} <= tags <= {"ci", "full", "bench", "gpu", "cpu"}
        assert any(not impl.platforms for impl in op.impls), f"{op.name} runs nowhere but on a chip"
