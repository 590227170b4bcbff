"""The kernel bench chains calls: each one runs, on the last one's result and its own pools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from bench import kernels
from pallas_kernels.harness.registry import Cost, Inputs, KernelOp, all_ops, arrays_of
from pallas_kernels.skinny_gemm.ref import GemmArgs


def _op(name: str) -> KernelOp:
    return next(op for op in all_ops() if op.name == name)


def _of_arrays(op: KernelOp, case: Any) -> tuple[Callable[..., Any], list[Any]]:
    """XLA's implementation as a function of the arrays of a case, and these arrays."""
    inputs = kernels.on_device(op.build(case, 0))
    arrays, structure = arrays_of(inputs.args)
    (xla,) = [impl for impl in op.impls if impl.name == "xla"]
    fn = partial(xla.fn, **inputs.static)
    return lambda *x: fn(*structure.unflatten(x)), arrays


def test_attention_feeds_its_result_to_the_next_call() -> None:
    op = _op("paged_prefill")
    case = next(case for case in op.cases if case.name == "smollm2_page_edges")
    function, (q, *others) = _of_arrays(op, case)
    fixed = [{1: others[0], 2: others[1]}, {1: -others[0], 2: -others[1]}]
    rest = {0: q, **dict(enumerate(others[2:], start=3))}
    _, fed = kernels.chained(op, function, 3)([{}, {}], fixed, rest)
    for pools in (fixed[0], fixed[1], fixed[0]):
        q = function(q, pools[1], pools[2], *others[2:])
    np.testing.assert_allclose(fed[0], q, rtol=1e-5, atol=1e-6)


def test_appends_update_each_set_in_place() -> None:
    op = _op("kv_append")
    case = next(case for case in op.cases if case.name == "smollm2_one_token")
    function, (k, v, k_pages, v_pages, slots, *scales) = _of_arrays(op, case)
    sets = [{2: jnp.copy(k_pages), 3: jnp.copy(v_pages)} for _ in range(2)]
    updated, fed = kernels.chained(op, function, 2)(
        sets, [{}, {}], {0: k, 1: v, 4: slots, **dict(enumerate(scales, start=5))}
    )
    expected = op.ref(*op.build(case, 0).args)
    for pools in updated:
        assert (pools[2] == expected[0]).all() and (pools[3] == expected[1]).all()
    assert fed == []
    assert all(x.is_deleted() for x in jax.tree.leaves(sets)), "the pools were copied"


def test_calls_that_feed_nothing_all_run() -> None:
    op = _op("skinny_gemm")
    case = next(case for case in op.cases if case.name == "smollm2_qkv_t1")
    (xla,) = [impl for impl in op.impls if impl.name == "xla"]
    inputs = op.build(case, 0)
    x, w, bias = map(jnp.asarray, jax.tree.leaves(inputs.args))

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return xla.fn(GemmArgs(x=x, w=w, bias=bias))

    arguments = ([{}], [{1: w}], {0: x})
    _, kept = kernels.chained(op, function, 3)(*arguments)
    expected = op.ref(*inputs.args, **inputs.static)
    assert len(kept) == 3
    for (out,) in kept:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    lowered = kernels.chained(op, function, 3).lower(*arguments).compile().as_text()
    assert lowered.count(" dot(") == 3, "XLA made one of several calls"


def test_large_queries_are_fed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 256 has 2 MB of queries; as a pool, a chain of calls would be one call."""
    monkeypatch.setattr(kernels, "LARGE_BYTES", 0)
    op = _op("paged_prefill")
    case = next(case for case in op.cases if case.name == "smollm2_page_edges")
    function, arrays = _of_arrays(op, case)
    updated, fixed, rest = kernels.parts(op, arrays)
    beside = {0, *range(6, len(arrays))}  # queries, counters, and arrays that this call lacks
    assert (updated.keys(), fixed.keys(), rest.keys()) == (set(), {1, 2, 3, 4, 5}, beside)
    _, fed = kernels.chained(op, function, 2)([{}], [fixed], rest)
    again = function(function(*arrays), *arrays[1:])
    np.testing.assert_allclose(fed[0], again, rtol=1e-5, atol=1e-6)


def test_gpu_cases_are_left_out_on_a_cpu() -> None:
    names = [case.name for case in kernels.bench_cases(_op("paged_prefill"), "qwen3")]
    assert names and not any("qwen3_4b" in name for name in names)
    assert kernels.bench_cases(_op("append_decode"), "step") == []


CEILINGS = kernels.Ceilings(read=4e9, rewritten=3e9, copied=2e9, product=8e9)


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [(Cost(bytes=8, flops=8), 2e-9, "bytes"), (Cost(bytes=8, flops=32), 4e-9, "flops")],
)
def test_the_ceiling_that_binds_is_the_floor(cost: Cost, seconds: float, bound: str) -> None:
    assert CEILINGS.floor(cost) == pytest.approx(seconds)
    assert CEILINGS.bound(cost) == bound


def test_rows_have_their_share_of_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "measured_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(kernels, "SECONDS_PER_CASE", 0.0)
    output = tmp_path / "kernels.json"
    chosen = ["--op", "kv_append,publish", "--impl", "xla", "--case", "decode64"]
    kernels.main([*chosen, "--commit", "abc", "--output", str(output)])
    report = json.loads(output.read_text())
    (row,) = report["rows"]
    assert (row["op"], row["impl"], row["bound"]) == ("kv_append", "xla", "bytes")
    assert row["share"] == pytest.approx(row["floor_us"] / row["us"], rel=0.02, abs=1e-3)
    assert report["git"] == "abc" and report["ceilings"]["product"] == CEILINGS.product


def test_a_device_has_all_its_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SECONDS_PER_CASE", 0.0)
    monkeypatch.setattr(kernels, "CEILING_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(kernels, "CEILING_PRODUCT", {"cpu": (64, "float32")})
    found = kernels.measured_ceilings()
    assert found.moved == max(found.read, found.rewritten, found.copied) > 0
    assert found.product > 0


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (
            ["--op", "kv_append,attention"],
            "--op attention: not one of all_gather, all_",
        ),
        (["--op", "publish", "--impl", "xla,mosaic"], "--impl mosaic: not one of triton, xla"),
    ],
)
def test_unknown_names_are_refused(
    arguments: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernels.main(arguments)
    assert refused in capsys.readouterr().err


def test_results_that_differ_between_calls_are_counted() -> None:
    calls = itertools.count()

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = io_callback(lambda: np.int32(next(calls)), jax.ShapeDtypeStruct((), jnp.int32))
        return x, x.at[1].set(number.astype(x.dtype))

    inputs = kernels.on_device(Inputs((np.array([np.nan, 0, 0], jnp.bfloat16),), {}))
    assert kernels._differing(function, inputs) == 1
    assert kernels._differing(lambda x: x, inputs) == 0
