"""Times every implementation of every kernel op on its bench cases, on the device at hand.

Run from the repository root:
``python -m bench.kernels [--op NAME,...] [--impl NAME,...] [--case TEXT] [--output FILE]``; with
``--check`` it compares each implementation with the op's definition on this device instead.
Bandwidth and operations are those that the op cannot do without (``KernelOp.cost``). Both have a
ceiling that is measured here, on random data, as zeros take less power and are faster: what XLA
moves at most, and what it multiplies. The share is of the one that binds: below one, time is lost.

On a GPU a call takes less than its launch from the host. There one computation, which XLA captures
as a graph, makes many calls in a row, each fed by the last (``KernelOp.feeds``) so that none can be
left out, and over several sets of pools in turn so that none is found in the cache.
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

from bench.step.file import facts, write_report
from pallas_kernels.registry import (
    OP_NAMES,
    Case,
    Cost,
    Impl,
    Inputs,
    KernelOp,
    all_ops,
    with_refs,
)
from pallas_kernels.testing import mismatch, runnable

SECONDS_PER_CASE = 0.15
SECONDS_PER_SAMPLE = 0.005  # calls are launched back to back for this long, then awaited
LARGE_BYTES = 1 << 20  # an argument of this size is a pool, of which there are several sets
MOST_POOL_BYTES = 24 << 30  # of all sets together
MOST_SETS = 36  # as many as layers of the model whose shapes most cases have
COLD_BYTES = {"cpu": 0, "gpu": 1 << 28, "tpu": 0}  # read before a set's turn comes again
MOST_REPEATS = 36  # calls of one computation; its compile time grows with them
SECONDS_PER_CHAIN = 0.004  # a computation takes about this long, where calls are so fast
CEILING_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31, "tpu": 1 << 30}  # well past any cache
CEILING_PRODUCT = {"cpu": (1024, "float32"), "gpu": (8192, "bfloat16"), "tpu": (8192, "bfloat16")}

type Arguments = dict[int, Any]  # of an op's call, by index


def seconds_per_call(call: Callable[[], Any]) -> float:
    """Median over samples; ``call`` launches one run and returns something to wait for."""
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
    """What the device at hand reaches at most, by XLA's own code."""

    read: float  # bytes/s, of a maximum over an array
    rewritten: float  # bytes/s read and written, of an array changed in place
    copied: float  # bytes/s read and written
    product: float  # floating-point operations/s, of two square matrices

    @property
    def moved(self) -> float:
        """Bytes per second, however they move."""
        return max(self.read, self.rewritten, self.copied)

    def floor(self, cost: Cost) -> float:
        """The least seconds of a call."""
        return max(self._seconds(cost).values())

    def bound(self, cost: Cost) -> str:
        """What takes them: bytes or flops."""
        seconds = self._seconds(cost)
        return max(seconds, key=seconds.__getitem__)

    def _seconds(self, cost: Cost) -> dict[str, float]:
        return {"bytes": cost.bytes / self.moved, "flops": cost.flops / self.product}


def measured_ceilings() -> Ceilings:
    """Of the device at hand."""
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
    """Calls in a row: (updated pools of each set, fixed pools of each set, the rest) to the first.

    All three hold arguments by index. Pools are updated in place; what else a call feeds goes to
    the next call, whatever its set. Where an op feeds nothing, calls only wait for the last.
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
                (pools if argument in pools else rest)[argument] = outputs[output]
            kept += [] if op.feeds else [outputs]
        return updated, kept or [rest[argument] for argument, _ in op.feeds if argument in rest]

    return jax.jit(run, donate_argnums=0)


def _after(outputs: list[jax.Array], named: Arguments) -> Arguments:
    """The arguments, such that XLA cannot take the call for an earlier one with the same."""
    return jax.lax.optimization_barrier((outputs, named))[1]


def parts(op: KernelOp, arguments: Sequence[Any]) -> tuple[Arguments, Arguments, Arguments]:
    """What a call takes: pools that it updates, other pools, the rest.

    What one call feeds to the next is no pool, however large: of a set's own, each call would do
    the same again, and XLA would do it once for all.
    """
    named = dict(enumerate(arguments))
    fed = {argument for argument, _ in op.feeds}
    updated = {i: x for i, x in named.items() if i in op.donate}
    others = {i: x for i, x in named.items() if i not in updated}
    fixed = {i: x for i, x in others.items() if i not in fed and _nbytes(x) > LARGE_BYTES}
    return updated, fixed, {i: x for i, x in others.items() if i not in fixed}


def seconds_in_a_chain(
    op: KernelOp, function: Callable[..., Any], arguments: Sequence[Any], cost: Cost
) -> float:
    """Seconds of one call of ``function`` on the op's arguments (arrays on the device)."""
    updated, fixed, rest = parts(op, arguments)
    set_bytes = sum(map(_nbytes, (*updated.values(), *fixed.values())))
    wanted = min(-(-COLD_BYTES[jax.default_backend()] // cost.bytes), MOST_SETS)
    count = max(1, min(wanted, MOST_POOL_BYTES // max(1, set_bytes)))
    sets = [jax.tree.map(jnp.copy, (updated, fixed)) for _ in range(count)]
    state = [pools for pools, _ in sets]

    def timed(repeats: int) -> float:
        run = chained(op, function, repeats)

        def call() -> Any:
            nonlocal state
            state, kept = run(state, [pools for _, pools in sets], rest)
            return state, kept

        return seconds_per_call(call) / repeats

    alone = timed(1)  # with the launch from the host
    repeats = min(int(SECONDS_PER_CHAIN / alone), MOST_REPEATS)
    if jax.default_backend() == "cpu" or repeats < 2:
        return alone
    return timed(-(-repeats // count) * count)


def _nbytes(x: Any) -> int:
    return 0 if x is None else x.nbytes


def time_case(
    op: KernelOp, impl: Impl, case: Case, inputs: Inputs, ceilings: Ceilings
) -> dict[str, Any]:
    """One row of the table; {"skipped": reason} when the implementation cannot run the inputs.

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
    """The op's bench cases for the device at hand whose name contains ``text``."""
    here = jax.default_backend() == "gpu"
    named = [case for case in op.cases if "bench" in case.tags and text in case.name]
    return [case for case in named if here or "gpu" not in case.tags]


def wrong_results(ops: Sequence[KernelOp], impls: Collection[str] | None) -> int:
    """How many cases (ci and full) go wrong on the device at hand; prints each as it is tried."""
    wrong = 0
    for op in ops:
        for case in (case for case in op.cases if {"ci", "full"} & set(case.tags)):
            inputs = op.build(case, 0)
            for impl in _named(op, impls):
                reason = runnable(impl, inputs)
                problem = None if reason else mismatch(op, impl, case, inputs)
                wrong += problem is not None
                print(f"{op.name:16}{impl.name:8}{case.name:34}{problem or reason or 'right'}")
    return wrong


def _named(op: KernelOp, impls: Collection[str] | None) -> list[Impl]:
    return [impl for impl in op.impls if impls is None or impl.name in impls]


def on_device(inputs: Inputs) -> Inputs:
    """The same, with arrays of jax."""
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
    """Check or time, print, write: the file is whole after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    several = partial(str.split, sep=",")
    parser.add_argument("--op", type=several, metavar="NAME,...", help="only these ops")
    parser.add_argument("--impl", type=several, metavar="NAME,...", help="only these of each op")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--check", action="store_true", help="compare results, time nothing")
    parser.add_argument("--commit", help="of the file, where it is no checkout of it")
    parser.add_argument("--output", type=Path, help="JSON file; by default bench/results/<device>")
    options = parser.parse_args(argv)
    ops = [op for op in all_ops() if options.op is None or op.name in options.op]
    known = {"op": OP_NAMES, "impl": tuple(dict.fromkeys(i.name for op in ops for i in op.impls))}
    for option, names in known.items():
        if unknown := set(getattr(options, option) or ()) - set(names):
            parser.error(f"--{option} {', '.join(unknown)}: not one of {', '.join(names)}")
    if options.check:
        raise SystemExit(1 if wrong_results(ops, options.impl) else 0)
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
