"""Runs of kernels become one call each, with unchanged reads and writes of every kernel.

Kernels here are calls that nobody compiles: each stands for a function of what it reads. Programs
are computed symbolically before and after; the linked call by running its launches in order on its
arrays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.mlir import ir

from pallas_kernels.toolchain.jax_internals import (
    HASH,
    MODULE,
    MOSAIC_CALL,
    aliases_of,
    attribute_of,
    custom_calls,
)
from pallas_kernels.toolchain.link import link_kernels
from pallas_kernels.toolchain.link_modules import LinkedLaunch, linked_hash

X = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
POOL = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
WHICH = jax.ShapeDtypeStruct((), jnp.bool_)

type Fn = Callable[..., Any]


def kernel(name: str, *args: jax.Array, like: Sequence[Any] = (X,), pool: bool = False) -> Any:
    """A call of a kernel; with ``pool`` its last argument is changed in place, its last result."""
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    aliases = {}
    if pool:
        aliases = {len(args) - 1: len(out)}
        out.append(jax.ShapeDtypeStruct(args[-1].shape, args[-1].dtype))
    call = jax.ffi.ffi_call(MOSAIC_CALL, out, input_output_aliases=aliases)
    found = call(*args, kernel_hash=name, module=f"module of {name}")
    return found if len(found) > 1 else found[0]


@dataclass
class Step:
    """A program, linked or not, and its results."""

    fn: Fn
    shapes: Sequence[jax.ShapeDtypeStruct]
    launches: dict[bytes, tuple[LinkedLaunch, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        traced = jax.jit(self.fn).trace(*self.shapes)
        self.lowered = traced.lower(lowering_platforms=("cuda",))
        self.module = self.lowered.compiler_ir()

    def calls(self) -> list[Any]:
        return list(custom_calls(self.module.operation, MOSAIC_CALL))

    def results(self) -> list[Any]:
        """Of the main function, in terms of its arguments."""
        functions = {
            op.attributes["sym_name"].value: op
            for op in self.module.body.operations
            if op.operation.name == "func.func"
        }
        arguments = [f"argument {i}" for i in range(len(self.shapes))]
        return self._run(functions["main"], arguments, functions)

    def _run(self, function: Any, arguments: list[Any], functions: dict[str, Any]) -> list[Any]:
        body = function.regions[0].blocks[0]
        known = dict(zip(body.arguments, arguments, strict=True))
        for op in body.operations:
            values = [known[x] for x in op.operation.operands]
            match op.operation.name:
                case "func.return":
                    return values
                case "func.call":
                    found = self._run(functions[op.attributes["callee"].value], values, functions)
                case "stablehlo.reshape":
                    found = values
                case "stablehlo.custom_call":
                    found = self._call(op.operation, values)
                case name:
                    found = [(name, *values)]
            known.update(zip(op.operation.results, found, strict=True))
        raise AssertionError("no return")

    def _call(self, call: Any, values: list[Any]) -> list[Any]:
        name = attribute_of(call, HASH)
        if name not in self.launches:
            return _computed(attribute_of(call, MODULE), values, len(call.results))
        arrays = [*values, *("unwritten" for _ in call.results)]
        in_place = aliases_of(call)
        for output, operand in in_place.items():
            arrays[len(values) + output] = arrays[operand]
        for source, places in self.launches[name]:
            inputs, changed = KERNELS[source]
            written = set(places[inputs:]) - {places[i] for i in changed}
            assert not written & set(places[:inputs]), f"{source!r} writes what it reads"
            found = _computed(source, [arrays[i] for i in places[:inputs]], len(places) - inputs)
            for place, value in zip(places[inputs:], found, strict=True):
                assert place >= len(values), f"{source!r} writes an argument of the call"
                arrays[place] = value
        return arrays[len(values) :]


KERNELS: dict[bytes, tuple[int, tuple[int, ...]]] = {}  # arrays each reads; which it changes


def _computed(module: bytes, values: Sequence[Any], count: int) -> list[Any]:
    return [(module, i, *values) for i in range(count)]


@pytest.fixture
def linked() -> Callable[[Step], int]:
    """Links a step; returns the number of distinct calls."""

    def run(step: Step) -> int:
        KERNELS.clear()
        sources = {}
        for call in step.calls():
            module = attribute_of(call, MODULE)
            KERNELS[module] = len(call.operands), tuple(aliases_of(call).values())
            sources[attribute_of(call, HASH)] = module

        calls = link_kernels(step.module, sources.__getitem__)
        step.launches |= {linked_hash(call.launches): call.launches for call in calls}
        return len(calls)

    return run


def layer(x: jax.Array, delta: jax.Array, pool: jax.Array) -> tuple[jax.Array, ...]:
    x, normed = kernel("norm", x, delta, like=(X, X))
    heads = kernel("product", normed)
    out, pool = kernel("attend", heads.reshape(4, 2, 32), pool, pool=True)
    return x, kernel("product", out.reshape(4, 64)), pool


def layers(count: int, *, between: Fn = lambda x: x) -> Fn:
    one = jax.jit(layer)

    def fn(x: jax.Array, delta: jax.Array, *pools: jax.Array) -> Any:
        x = x * 2
        written = []
        for pool in pools[:count]:
            x, delta, pool = one(x, delta, pool)
            x = between(x)
            written.append(pool)
        return x + delta, written

    return fn


def test_a_run_becomes_one_call_that_computes_the_same(linked: Callable[[Step], int]) -> None:
    step = Step(layers(3), (X, X, POOL, POOL, POOL))
    before = step.results()
    assert len(step.calls()) == 4  # of the one function for all layers
    assert linked(step) == 1
    assert len(step.calls()) == 1
    assert step.results() == before
    (launches,) = step.launches.values()
    assert [launch.source.decode().split()[-1] for launch in launches] == 3 * [
        "norm", "product", "attend", "product",
    ]  # fmt: skip


def test_arrays_are_reused(linked: Callable[[Step], int]) -> None:
    outputs = []
    for count in (3, 9):
        step = Step(layers(count), (X, X, *count * [POOL]))
        before = step.results()
        linked(step)
        assert step.results() == before
        outputs.append(len(step.calls()[0].results))
    assert outputs[1] - outputs[0] == 6  # the pools of six more layers


def test_pools_are_changed_in_place(linked: Callable[[Step], int]) -> None:
    step = Step(layers(2), (X, X, POOL, POOL))
    linked(step)
    (call,) = step.calls()
    pools = [call.operands[i] for i in aliases_of(call).values()]
    assert [ir.RankedTensorType(pool.type).shape for pool in pools] == 2 * [[16, 64]]


def test_an_operation_in_between_ends_a_run(linked: Callable[[Step], int]) -> None:
    step = Step(layers(2, between=jnp.sin), (X, X, POOL, POOL))
    before = step.results()
    assert linked(step) == 1  # the same for both layers
    assert len(step.calls()) == 2
    assert step.results() == before


def test_an_independent_operation_does_not_end_a_run(linked: Callable[[Step], int]) -> None:
    def fn(x: jax.Array, y: jax.Array) -> Any:
        first = kernel("first", x)
        beside = jnp.cos(y)
        return kernel("second", first, beside)

    step = Step(fn, (X, X))
    before = step.results()
    assert linked(step) == 1
    assert step.results() == before


def test_a_lone_kernel_stays_as_it_is(linked: Callable[[Step], int]) -> None:
    step = Step(lambda x: jnp.sin(kernel("lone", jnp.cos(x))), (X,))
    text = step.lowered.as_text()
    assert linked(step) == 0
    assert step.lowered.as_text() == text


def test_a_result_that_is_needed_later_is_not_overwritten(linked: Callable[[Step], int]) -> None:
    def fn(x: jax.Array) -> Any:
        kept = kernel("a", x)
        other = kernel("b", kept)
        for name in ("c", "d", "e"):
            other = kernel(name, other)
        return kernel("f", kept, other), kernel("g", other), kept

    step = Step(fn, (X,))
    before = step.results()
    assert linked(step) == 1
    assert step.results() == before


def test_a_reshaped_result_is_not_overwritten(linked: Callable[[Step], int]) -> None:
    def fn(x: jax.Array) -> Any:
        kept = kernel("a", x).reshape(8, 32)
        other = x
        for name in ("b", "c", "d"):
            other = kernel(name, other)
        return kernel("e", kept, other)

    step = Step(fn, (X,))
    before = step.results()
    assert linked(step) == 1
    assert step.results() == before


def test_an_operand_with_other_readers_is_not_overwritten(linked: Callable[[Step], int]) -> None:
    """A later kernel, or the caller of the step."""

    def read_after(x: jax.Array, pool: jax.Array) -> Any:
        out, changed = kernel("change", kernel("first", x), pool, pool=True)
        return kernel("last", kernel("read", out, pool)), changed

    def returned(x: jax.Array) -> Any:
        made = kernel("make", x)
        out, changed = kernel("change", x, kernel("next", made), pool=True)
        also, again = kernel("again", out, changed, pool=True)
        return kernel("last", also), changed, again

    for fn, shapes, left in (
        (read_after, (X, POOL), ["first", "change"]),
        (returned, (X,), ["again", "last"]),
    ):
        step = Step(fn, shapes)
        before = step.results()
        linked(step)
        assert step.results() == before
        modules = [attribute_of(call, MODULE).decode() for call in step.calls()]
        assert [module.split()[-1] for module in modules if module] == left


def test_a_branch_that_reads_a_result_ends_a_run(linked: Callable[[Step], int]) -> None:
    """Its regions read outer values that are not among its operands."""

    def fn(x: jax.Array, which: jax.Array) -> Any:
        first = kernel("first", x)
        between = jax.lax.cond(which, lambda: jnp.sin(first), lambda: first)
        return kernel("second", first), between

    step = Step(fn, (X, WHICH))
    assert linked(step) == 0
    assert step.module.operation.verify()


def test_a_function_with_a_branch_is_inlined(linked: Callable[[Step], int]) -> None:
    @jax.jit
    def part(x: jax.Array, which: jax.Array) -> jax.Array:
        first = kernel("second", kernel("first", x))
        return kernel("third", jax.lax.cond(which, lambda: jnp.sin(first), lambda: first))

    step = Step(lambda x, which: part(part(x, which), which), (X, WHICH))
    assert linked(step) == 2
    assert step.module.operation.verify()


@pytest.mark.parametrize("seed", range(20))
def test_any_program_computes_the_same(seed: int, linked: Callable[[Step], int]) -> None:
    choice = random.Random(seed)

    def fn(x: jax.Array, pool: jax.Array) -> Any:
        values, returned = [x], []
        for i in range(choice.randint(2, 14)):
            kind = choice.random()
            read = choice.choices(values, k=choice.randint(1, 3))
            if kind < 0.15:
                values.append(jnp.sin(read[0]))
            elif kind < 0.35:
                value, pool = kernel(f"pool{i}", *read, pool, pool=True)
                values.append(value)
            else:
                count = choice.randint(1, 2)
                made = kernel(f"k{i}x{count}", *read, like=count * (X,))
                values.extend(made if count > 1 else [made])
            if choice.random() < 0.2:
                returned.append(values[-1])
        return values[-1], returned, pool

    step = Step(fn, (X, POOL))
    before = step.results()
    linked(step)
    assert step.results() == before
