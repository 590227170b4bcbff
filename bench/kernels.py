"""Times every implementation of every kernel op on its bench cases, on this machine's device.

Run from the repository root:
``python -m bench.kernels [--op NAME,...] [--impl NAME,...] [--case TEXT] [--output FILE]``; with
``--check`` it compares each implementation with the op's definition on this device instead, and
with ``--steady`` the bits of several calls of each bench case.
Bandwidth and operations are the minimum that the op needs (``KernelOp.cost``). The ceiling of each
is measured here, on random data, since zeros take less power and are faster: XLA's fastest copy,
and its fastest matmul. The share is that of the binding ceiling: below one, time is lost.

On a GPU a call takes less time than its launch from the host. There one computation, which XLA
captures as a graph, makes many calls in a row. Each takes the result of the last
(``KernelOp.feeds``), so that XLA removes none, and the calls use several sets of pools in rotation,
so that no pool is still in the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.step.file import facts
from jaxinfer.bench.circumstances import write_report
from pallas_kernels.harness.registry import (
    OP_NAMES,
    Case,
    Cost,
    Impl,
    Inputs,
    KernelOp,
    all_ops,
    arrays_of,
    with_refs,
)
from pallas_kernels.harness.testing import mismatch, runnable

SECONDS_PER_CASE = 0.15
SECONDS_PER_SAMPLE = 0.005  # calls are launched back to back for this long, then waited for
LARGE_BYTES = 1 << 20  # an argument of this size is a pool, of which there are several sets
MAX_POOL_BYTES = 24 << 30  # of all sets together
MAX_SETS = 36  # the number of layers of the model whose shapes most cases have
COLD_BYTES = {"cpu": 0, "gpu": 1 << 28, "tpu": 0}  # read before the same set is used again
MAX_REPEATS = 36  # calls of one computation; its compile time grows with them
SECONDS_PER_CHAIN = 0.004  # a computation takes about this long, if calls are this fast
CEILING_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31, "tpu": 1 << 30}  # well beyond any cache
CEILING_PRODUCT = {"cpu": (1024, "float32"), "gpu": (8192, "bfloat16"), "tpu": (8192, "bfloat16")}

CALLS = 4  # that are compared

type Arguments = dict[int, Any]  # of an op's call, by index


def seconds_per_call(call: Callable[[], Any]) -> float:
    """Median over samples; ``call`` launches one run and returns its result to wait for."""
    jax.block_until_ready(call())  # compiles
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, int(SECONDS_PER_SAMPLE / (time.perf_counter() - started)))
    samples: list[float] = []
    end = time.perf_counter() + SECONDS_PER_CASE
    while len(samples) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - started) / calls)
    return median(samples)


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of this machine's device, with XLA's own code."""

    read: float  # bytes/s, of a maximum over an array
    rewritten: float  # bytes/s read and written, of an array changed in place
    copied: float  # bytes/s read and written
    product: float  # floating-point operations/s, of a matmul of two square matrices

    @property
    def moved(self) -> float:
        """The highest bandwidth, in bytes per second."""
        return max(self.read, self.rewritten, self.copied)

    def floor(self, cost: Cost) -> float:
        """The shortest possible duration of a call, in seconds."""
        return max(self._seconds(cost).values())

    def bound(self, cost: Cost) -> str:
        """The ceiling that binds: bytes or flops."""
        seconds = self._seconds(cost)
        return max(seconds, key=seconds.__getitem__)

    def _seconds(self, cost: Cost) -> dict[str, float]:
        return {"bytes": cost.bytes / self.moved, "flops": cost.flops / self.product}


def measured_ceilings() -> Ceilings:
    """Measure the ceilings of this machine's device."""
    size, (width, dtype) = (
        each[jax.default_backend()] for each in (CEILING_BYTES, CEILING_PRODUCT)
    )
    key = jax.random.key(0)
    array = jax.random.bits(key, (size // 4,), "uint32")
    matrix = jax.random.normal(key, (width, width), dtype)
    largest, copy = jax.jit(jnp.max), jax.jit(jnp.copy)
    rewrite = jax.jit(lambda x: x + 1, donate_argnums=0)
    multiply = jax.jit(jnp.matmul)

    def rewritten() -> jax.Array:
        nonlocal array
        array = rewrite(array)
        return array

    return Ceilings(
        read=size / seconds_per_call(lambda: largest(array)),
        rewritten=2 * size / seconds_per_call(rewritten),
        copied=2 * size / seconds_per_call(lambda: copy(array)),
        product=2 * width**3 / seconds_per_call(lambda: multiply(matrix, matrix)),
    )


def chained(op: KernelOp, function: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """A jitted function of ``repeats`` calls in a row.

    It maps (updated pools, fixed pools, rest) to the results. Both kinds of pools are lists with
    one entry a set; all three arguments hold the op's arguments by index. Pools are updated in
    place; other outputs that a call feeds go to the next call, whichever set it uses. If an op
    feeds nothing, each call only waits for the last.
    """

    def run(updated: list[Arguments], fixed: list[Arguments], rest: Arguments) -> Any:
        updated, rest = [dict(pools) for pools in updated], with_refs(op, rest)
        kept: list[list[jax.Array]] = []
        for i in range(repeats):
            pools = updated[i % len(updated)]
            named = {**rest, **fixed[i % len(fixed)], **pools}
            if kept:
                named |= _after(kept[-1], {j: x for j, x in named.items() if j not in op.refs})
            outputs = jax.tree.leaves(function(*(named[j] for j in range(len(named)))))
            for argument, output in op.feeds:
                if named[argument] is not None:  # of arrays that a call may lack
                    (pools if argument in pools else rest)[argument] = outputs[output]
            kept += [] if op.feeds else [outputs]
        fed = [rest.get(argument) for argument, _ in op.feeds]
        return updated, kept or [one for one in fed if one is not None]

    return jax.jit(run, donate_argnums=0)


def _after(outputs: list[jax.Array], named: Arguments) -> Arguments:
    """Make the arguments depend on ``outputs``: XLA must not merge the call with an earlier one."""
    return jax.lax.optimization_barrier((outputs, named))[1]


def parts(op: KernelOp, arrays: Sequence[Any]) -> tuple[Arguments, Arguments, Arguments]:
    """The arrays of a call: pools that it updates, other pools, the rest.

    An array that one call feeds to the next is not a pool, however large: with one for each set,
    all calls on a set would be equal, and XLA would compute only one. Nor is one that becomes a
    Ref.
    """
    named = dict(enumerate(arrays))
    fed = {*op.refs, *(argument for argument, _ in op.feeds)}
    updated = {i: x for i, x in named.items() if i in op.donate and x is not None}
    others = {i: x for i, x in named.items() if i not in updated}
    fixed = {i: x for i, x in others.items() if i not in fed and _nbytes(x) > LARGE_BYTES}
    return updated, fixed, {i: x for i, x in others.items() if i not in fixed}


def seconds_in_a_chain(
    op: KernelOp, function: Callable[..., Any], arguments: Sequence[Any], cost: Cost
) -> float:
    """Seconds of one call of ``function`` on the op's arguments (arrays on the device)."""
    arrays, structure = arrays_of(tuple(arguments))
    updated, fixed, rest = parts(op, arrays)
    set_bytes = sum(map(_nbytes, (*updated.values(), *fixed.values())))
    wanted = min(-(-COLD_BYTES[jax.default_backend()] // cost.bytes), MAX_SETS)
    count = max(1, min(wanted, MAX_POOL_BYTES // max(1, set_bytes)))
    sets = [jax.tree.map(jnp.copy, (updated, fixed)) for _ in range(count)]
    state = [pools for pools, _ in sets]

    def timed(repeats: int) -> float:
        run = chained(op, lambda *x: function(*structure.unflatten(x)), repeats)

        def call() -> Any:
            nonlocal state
            state, kept = run(state, [pools for _, pools in sets], rest)
            return state, kept

        return seconds_per_call(call) / repeats

    alone = timed(1)  # including the launch from the host
    repeats = min(int(SECONDS_PER_CHAIN / alone), MAX_REPEATS)
    if jax.default_backend() == "cpu" or repeats < 2:
        return alone
    return timed(-(-repeats // count) * count)


def _nbytes(x: Any) -> int:
    return 0 if x is None else x.nbytes


def time_case(
    op: KernelOp, impl: Impl, case: Case, inputs: Inputs, ceilings: Ceilings
) -> dict[str, Any]:
    """One row of the table; {"skipped": reason} if the implementation cannot run the inputs.

    ``inputs`` are the case's, arrays on the device.
    """
    row: dict[str, Any] = {"op": op.name, "impl": impl.name, "case": case.name}
    if (reason := runnable(impl, inputs)) is not None:
        return row | {"skipped": reason}
    cost = op.cost(case)
    seconds = seconds_in_a_chain(op, partial(impl.fn, **inputs.static), inputs.args, cost)
    return row | {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(cost.bytes / seconds / 1e9, 2),
        "tflop_per_s": round(cost.flops / seconds / 1e12, 4),
        "floor_us": round(ceilings.floor(cost) * 1e6, 2),
        "bound": ceilings.bound(cost),
        "share": round(ceilings.floor(cost) / seconds, 3),
    }


def bench_cases(op: KernelOp, text: str) -> list[Case]:
    """The op's bench cases for this machine's device whose name contains ``text``."""
    here = jax.default_backend() == "gpu"
    named = [case for case in op.cases if "bench" in case.tags and text in case.name]
    return [case for case in named if here or "gpu" not in case.tags]


def wrong_results(ops: Sequence[KernelOp], impls: Collection[str] | None, text: str) -> int:
    """The number of wrong cases (ci and full, whose name contains ``text``) on this machine's
    device; prints each result.
    """
    wrong = 0
    for op in ops:
        checked = (case for case in op.cases if {"ci", "full"} & set(case.tags))
        for case in (case for case in checked if text in case.name):
            inputs = op.build(case, 0)
            for impl in _named(op, impls):
                reason = runnable(impl, inputs)
                problem = None if reason else mismatch(op, impl, case, inputs)
                wrong += problem is not None
                print(f"{op.name:16}{impl.name:8}{case.name:34}{problem or reason or 'right'}")
    return wrong


def unsteady_results(ops: Sequence[KernelOp], impls: Collection[str] | None, text: str) -> int:
    """The number of bench cases whose results differ between calls; prints each one.

    A race of a kernel needs real sizes: a CTA with several tiles, and memory that is busy.
    """
    unsteady = 0
    for op in (op for op in ops if not op.donate):
        for case in bench_cases(op, text):
            inputs = on_device(op.build(case, 0))
            for impl in _named(op, impls):
                reason = runnable(impl, inputs)
                function = partial(_called, op, impl, inputs.static)
                differing = 0 if reason else _differing(function, inputs)
                unsteady += differing > 0
                result = f"{differing} values differ" if differing else reason or "steady"
                print(f"{op.name:16}{impl.name:8}{case.name:34}{result}", flush=True)
    return unsteady


def _called(op: KernelOp, impl: Impl, static: dict[str, Any], *args: Any) -> Any:
    """A call in a trace, with Refs where the op takes them."""
    arrays, structure = arrays_of(args)
    return impl.fn(*structure.unflatten(with_refs(op, dict(enumerate(arrays))).values()), **static)


def _differing(function: Callable[..., Any], inputs: Inputs) -> int:
    """Values that are not the same in all of ``CALLS`` calls."""
    run = jax.jit(function)
    calls = [[np.asarray(x) for x in jax.tree.leaves(run(*inputs.args))] for _ in range(CALLS)]
    bits = [[x.view(f"u{x.itemsize}") for x in call] for call in calls]
    first, *others = bits
    return sum(
        int(np.any([call[i] != x for call in others], axis=0).sum()) for i, x in enumerate(first)
    )


def _named(op: KernelOp, impls: Collection[str] | None) -> list[Impl]:
    return [impl for impl in op.impls if impls is None or impl.name in impls]


def on_device(inputs: Inputs) -> Inputs:
    """The same inputs as JAX arrays."""
    return Inputs(tuple(jax.tree.map(jnp.asarray, x) for x in inputs.args), inputs.static)


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    label = f"{row['op']:16}{row['impl']:8}{row['case']:38}"
    if "skipped" in row:
        return f"{label}skipped: {row['skipped']}"
    return (
        f"{label}{row['us']:10.1f}{row['gb_per_s']:9.2f}{row['tflop_per_s']:9.3f}"
        f"{row['share']:8.1%} of {row['bound']}"
    )


def main(argv: list[str] | None = None) -> None:
    """Check or time, print, write: the file is complete after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    several = partial(str.split, sep=",")
    parser.add_argument("--op", type=several, metavar="NAME,...", help="only these ops")
    parser.add_argument("--impl", type=several, metavar="NAME,...", help="only these of each op")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--check", action="store_true", help="compare results, time nothing")
    parser.add_argument("--steady", action="store_true", help="compare calls' bits, time nothing")
    parser.add_argument("--commit", help="commit of the sources, if they are no checkout")
    parser.add_argument("--output", type=Path, help="JSON file; by default bench/results/<device>")
    options = parser.parse_args(argv)
    ops = [op for op in all_ops() if options.op is None or op.name in options.op]
    known = {"op": OP_NAMES, "impl": tuple(dict.fromkeys(i.name for op in ops for i in op.impls))}
    for option, names in known.items():
        if unknown := set(getattr(options, option) or ()) - set(names):
            parser.error(f"--{option} {', '.join(unknown)}: not one of {', '.join(names)}")
    if options.check:
        raise SystemExit(1 if wrong_results(ops, options.impl, options.case) else 0)
    if options.steady:
        raise SystemExit(1 if unsteady_results(ops, options.impl, options.case) else 0)
    about = facts(options.commit)
    ceilings = measured_ceilings()
    print(
        f"{about['device']}: {ceilings.moved / 1e9:.1f} GB/s, {ceilings.product / 1e12:.1f} TFLOP/s"
    )
    print(f"{'op':16}{'impl':8}{'case':38}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'share':>8}")
    slug = about["device"].lower().replace(" ", "-")
    output = options.output or Path(__file__).parent / "results" / slug / "kernels.json"
    report = {**about, "ceilings": asdict(ceilings), "rows": (rows := list[dict[str, Any]]())}
    for op in ops:
        for case in bench_cases(op, options.case):
            inputs = on_device(op.build(case, 0))  # the slowest part of a large case
            for impl in _named(op, options.impl):
                rows.append(row := time_case(op, impl, case, inputs, ceilings))
                print(shown(row), flush=True)
                write_report(output, report)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
