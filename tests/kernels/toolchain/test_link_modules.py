"""Linked modules: each kernel once, all launches in order, and which may start early."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import deserialize_portable_artifact
from jax.interpreters.mlir import ir, make_ir_context

from pallas_kernels.lib.device import Device
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.toolchain import link_modules
from pallas_kernels.toolchain.jax_internals import (
    HASH,
    MODULE,
    MOSAIC_CALL,
    TRACE_SETTINGS,
    USES_PDL,
    attribute_of,
    custom_calls,
    mosaic_context,
    mosaic_serde,
    read_module,
)
from pallas_kernels.toolchain.kernel_call import Kernel
from pallas_kernels.toolchain.link import link_kernels
from pallas_kernels.toolchain.link_modules import LinkedLaunch, linked_hash, linked_module

H200 = Device("gpu", "NVIDIA H200", "9.0", num_sms=132)
X = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)


def _copy(scale: float, *, early: bool, x: Any, out: Any) -> None:
    if early:
        launch_dependents()
        grid_dependency_wait()
    row = jax.lax.axis_index("row")
    out[row] = x[row] * scale


def scaled(x: jax.Array, *, scale: float, early: bool) -> jax.Array:
    """A kernel with one CTA per row."""

    def body(x: Any, out: Any) -> None:
        _copy(scale, early=early, x=x, out=out)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, grid=(x.shape[0],), grid_names=("row",))(x)


def source(*, scale: float = 2.0, early: bool = True) -> bytes:
    """The kernel's module as in executables."""
    settings = tuple((name, getattr(jax.config, name)) for name in TRACE_SETTINGS)
    static = (("scale", scale), ("early", early))
    kernel = Kernel(__name__, "scaled", (X,), static, H200, settings)
    with make_ir_context():
        module = deserialize_portable_artifact(kernel.lower())
        (call,) = custom_calls(module.operation, MOSAIC_CALL)
        found = attribute_of(call, MODULE)
        assert attribute_of(call, HASH) == hashlib.sha256(found).digest()
        return found


@pytest.fixture(scope="module")
def waits() -> bytes:
    return source()


@pytest.fixture(scope="module")
def does_not_wait() -> bytes:
    return source(early=False)


def text(module: bytes) -> str:
    with mosaic_context():
        parsed = ir.Module.parse(module)
        mosaic_serde(parsed, serialize=False)
        return str(parsed)


def launched(module: bytes) -> list[tuple[str, bool]]:
    """Kernels in the order of their launches, and whether they may begin early."""
    found = []
    constants: dict[str, int] = {}
    for line in text(module).splitlines():
        if match := re.match(r"\s*(%\w+) = llvm.mlir.constant\((\d+) : i32\)", line):
            constants[match[1]] = int(match[2])
        if match := re.match(r"\s*(?:func\.)?call @host(\d+)\(.*, (%\w+)\)", line):
            found.append((f"k{match[1]}", bool(constants[match[2]])))
    return found


def test_an_unlinked_kernel_has_no_programmatic_edge(waits: bytes) -> None:
    assert USES_PDL not in text(waits)
    assert "griddepcontrol.wait" in text(waits)


def test_each_source_is_one_kernel(waits: bytes, does_not_wait: bytes) -> None:
    sources = (waits, does_not_wait, waits)
    launches = [LinkedLaunch(source, (i, i + 1)) for i, source in enumerate(sources)]
    module = linked_module(launches)
    assert re.findall(r"gpu\.func @(\w+)", text(module)) == [
        *("nothing", "body_mosaic_gpu_0", "body_mosaic_gpu_1")
    ]
    assert text(module).count("griddepcontrol.wait") == 1


def test_waiting_kernels_start_early_except_the_first(waits: bytes, does_not_wait: bytes) -> None:
    sources = (waits, does_not_wait, waits)
    launches = [LinkedLaunch(source, (i, i + 1)) for i, source in enumerate(sources)]
    assert launched(linked_module(launches)) == [("k0", False), ("k1", False), ("k0", True)]


def test_arrays_of_a_launch_are_at_their_indices(waits: bytes) -> None:
    module = text(linked_module([LinkedLaunch(waits, (0, 7)), LinkedLaunch(waits, (7, 3))]))
    assert re.search(r"@places\(dense<\[0, 7, 7, 3\]> : tensor<4xi32>\)", module)


def test_kernel_parameters_are_values_that_the_host_loads(waits: bytes) -> None:
    """Mosaic's pass handles host values for ``gpu.launch`` only."""
    module = text(linked_module([LinkedLaunch(waits, (0, 1)), LinkedLaunch(waits, (1, 2))]))
    assert "gpu.launch " not in module
    assert module.count("gpu.launch_func") == 1
    (arguments,) = re.findall(r"gpu\.func @body_mosaic_gpu_0\(([^)]*)\)", module)
    kinds = {kind.strip() for kind in re.findall(r": ([^,]+)", arguments)}
    assert kinds <= {"!llvm.ptr"} | {kind for kind in kinds if kind.startswith("!llvm.array<")}


def test_the_same_launches_are_the_same_bytes(waits: bytes) -> None:
    launches: Sequence[LinkedLaunch] = [LinkedLaunch(waits, (0, 1)), LinkedLaunch(waits, (1, 2))]
    assert linked_module(launches) == linked_module(launches)


def test_blocks_of_two_dimensions_are_refused(
    waits: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter((4, 1, 1, 128, 2, 1, 0, 0, 0))
    monkeypatch.setattr(link_modules, "_number", lambda _: next(numbers))
    with pytest.raises(ValueError, match="more than one dimension"):
        linked_module([LinkedLaunch(waits, (0, 1))])


def test_a_step_is_linked_with_its_kernels(waits: bytes) -> None:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = scaled(x, scale=2.0, early=True)
        return x

    with jax.enable_x64(False):
        lowered = jax.jit(step).trace(X).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir()
    sources = [waits for _ in custom_calls(module.operation, MOSAIC_CALL)]
    assert len(sources) == 3
    (call,) = link_kernels(module, lambda _: waits)
    assert [x.shape for x in call.arguments] == [X.shape]
    assert {x.shape for x in call.results} == {X.shape}
    assert call.in_place == ()
    made = linked_module(call.launches)
    assert launched(made) == [("k0", False), ("k0", True), ("k0", True)]
    (left,) = custom_calls(module.operation, MOSAIC_CALL)
    assert attribute_of(left, MODULE) == b""
    assert attribute_of(left, HASH) == linked_hash(call.launches)
    with make_ir_context():
        (alone,) = custom_calls(read_module(call.complete_module()).operation, MOSAIC_CALL)
        assert attribute_of(alone, MODULE) == made
        assert attribute_of(alone, HASH) == linked_hash(call.launches)


def test_a_linked_call_is_named_by_all_that_it_is_made_of(
    waits: bytes, does_not_wait: bytes
) -> None:
    launches = [LinkedLaunch(waits, (0, 1)), LinkedLaunch(waits, (1, 2))]
    others = (
        launches[:1],
        [LinkedLaunch(waits, (0, 1)), LinkedLaunch(does_not_wait, (1, 2))],
        [LinkedLaunch(waits, (0, 1)), LinkedLaunch(waits, (1, 0))],
        launches[::-1],
    )
    names = {linked_hash(each) for each in (launches, *others)}
    assert len(names) == 5
    assert linked_hash(launches) == linked_hash(list(launches))
