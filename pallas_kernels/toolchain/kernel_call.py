"""A Mosaic kernel as a primitive that is lowered once for all executables of a process.

Lowering such a kernel takes 0.1 to 1.5 s of Python, and JAX would lower it again for each
executable. ``call_lowered`` binds a primitive instead, whose lowering rule calls an exported
module. All executables then contain the same bytes, by which XLA finds a kernel that it has
compiled. (Modules that JAX lowers itself contain a running number.)
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from pallas_kernels.lib.device import Device, compiling_for, current_device
from pallas_kernels.toolchain.jax_internals import (
    HASH,
    LOWERING_SETTINGS,
    MODULE,
    MOSAIC_CALL,
    TRACE_SETTINGS,
    attribute_of,
    custom_calls,
    make_ir_context,
    read_module,
    set_attribute,
    set_kernel,
    write_module,
)
from pallas_kernels.toolchain.link_modules import unlinked_module
from pallas_kernels.toolchain.machine_code import KernelCall, Run, run_here

_LOWERING = threading.RLock()  # settings are per process, and lowering holds the GIL


def call_lowered(
    module: str,
    name: str,
    args: tuple[jax.Array | None, ...],
    static: Mapping[str, Any],
    results: Callable[..., Any] | None = None,
) -> Any:
    """Call a module's function of arrays in a trace; it is lowered once for each shape.

    The function takes and returns arrays, not Refs. ``results`` has the function's arguments and
    returns its result shapes; without it the function is traced for them, which takes 0.15 s for a
    large kernel.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    settings = tuple((setting, getattr(jax.config, setting)) for setting in TRACE_SETTINGS)
    returned = None if results is None else results(*shapes, **static)
    identity = (shapes, tuple(static.items()), current_device(), settings, returned)
    kernel = _shared(Kernel(module, name, *identity))
    flat = kernel_call_p.bind(*jax.tree.leaves(args), kernel=kernel)
    return jax.tree.unflatten(jax.tree.structure(kernel.results), flat)


@dataclass(frozen=True)
class Kernel:
    """The identity of a kernel's code; any process can lower it."""

    module: str
    name: str  # of the function
    shapes: tuple[jax.ShapeDtypeStruct | None, ...]  # of its arguments
    static: tuple[tuple[str, Any], ...]
    device: Device
    settings: tuple[tuple[str, Any], ...]  # of JAX, on which traces depend
    returned: Any = None  # result shapes, if known without a trace

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({_listed(jax.tree.leaves(self.shapes))})"

    def results(self) -> Any:
        """The shapes of its results."""
        if self.returned is not None:
            return self.returned
        with compiling_for(self.device):
            return jax.eval_shape(self._function(), *self.shapes)

    def lower(self) -> bytes:
        """The StableHLO module, serialized as by ``export``.

        Raises ValueError when the result shapes differ from ``returned``.
        """
        with _LOWERING, compiling_for(self.device), _set((*self.settings, *LOWERING_SETTINGS)):
            exported = self.exported(self._function())
        declared, actual = (
            _listed(x) for x in (jax.tree.leaves(self.returned), exported.out_avals)
        )
        if self.returned is not None and declared != actual:
            raise ValueError(f"{self} returns {actual}, not {declared}")
        return _unlinked(exported.mlir_module_serialized)

    def exported(self, function: Callable[..., Any]) -> export.Exported:
        """Export a function of the kernel's arguments under the kernel's name."""
        named = partial(function)
        named.__name__ = self.name  # type: ignore[attr-defined]
        # All arguments are kept, since the used ones are known only where the kernel is lowered.
        return export.export(
            jax.jit(named, keep_unused=True), platforms=[self.device.xla_platform]
        )(*self.shapes)

    def _function(self) -> Callable[..., Any]:
        return partial(
            getattr(importlib.import_module(self.module), self.name), **dict(self.static)
        )


class LoweredKernel:
    """A kernel in this process. Its module contains its source until it is compiled.

    A trace needs only the result shapes; the module is lowered when it is first needed. Compared by
    identity, since its content changes.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.results = kernel.results()
        self.compiled = False  # loaded into this process
        self._module: bytes | None = None
        self._source_module: bytes | None = None
        self._changing = threading.Lock()

    def __str__(self) -> str:
        return str(self.kernel)

    def exported(self) -> export.Exported:
        """The kernel's current module, to be called; lowers it in this process if necessary."""
        self.lower()
        assert self._module is not None
        return replace(self._zeros, mlir_module_serialized=self._module)

    @cached_property
    def _zeros(self) -> export.Exported:
        """An exported function with the kernel's signature."""
        return self.kernel.exported(
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.results)
        )

    def compile(self, run: Run = run_here) -> None:
        """Load its machine code into this process; steps lowered later contain only its hash.

        Mosaic caches compiled kernels by that hash, and a saved executable contains their machine
        code. So their source, up to 260 KB in each of 36 layers, is no longer needed: without it
        XLA compiles a step of 1,024 tokens in 2.4 s (5.2 with it). ``run`` may lower and compile
        the kernel in another process.
        """
        self.lower(run)
        assert self._source_module is not None
        for call in self._calls():
            call.compile(run)
        self._module = _without_sources(self._source_module)
        self.compiled = True

    def lower(self, run: Run = run_here) -> None:
        """Lower its module, if that is not done yet."""
        with self._changing:
            if self._source_module is None:
                self._module = self._source_module = run(self.kernel.lower)

    def sources(self) -> dict[bytes, bytes]:
        """The Mosaic modules of its calls by their hashes, once it is lowered."""
        assert self._source_module is not None, f"{self} is not lowered"
        with make_ir_context():
            module = read_module(self._source_module)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return {attribute_of(call, HASH): attribute_of(call, MODULE) for call in calls}

    def _calls(self) -> list[KernelCall]:
        """Its Mosaic calls, each in a module of its own."""
        assert self._source_module is not None
        with make_ir_context():
            module = read_module(self._source_module)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return [KernelCall.of(call, str(self), self.kernel.device) for call in calls]


def drop_sources(module: Any) -> set[bytes]:  # an ir.Module
    """Replace the sources of Mosaic kernels in a module by their hashes, in place; returns the
    hashes. The kernels must be compiled in this process before the module is.
    """
    hashes = set[bytes]()
    with module.context:
        for call in custom_calls(module.operation, MOSAIC_CALL):
            hashes.add(attribute_of(call, HASH))
            set_attribute(call, MODULE, "")
    return hashes


def _listed(shapes: Iterable[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in shapes)


def _unlinked(artifact: bytes) -> bytes:
    """The module without programmatic launch of its kernels, which is for linked kernels only
    (``link``).
    """
    with make_ir_context():
        module = read_module(artifact)
        for call in custom_calls(module.operation, MOSAIC_CALL):
            set_kernel(call, unlinked_module(attribute_of(call, MODULE)))
        return write_module(module)


def _without_sources(artifact: bytes) -> bytes:
    with make_ir_context():
        module = read_module(artifact)
        drop_sources(module)
        return write_module(module)


@cache
def _shared(kernel: Kernel) -> LoweredKernel:
    """One object per process, like JAX's traces and Mosaic's cache of machine code."""
    return LoweredKernel(kernel)


@contextmanager
def _set(settings: tuple[tuple[str, Any], ...]) -> Generator[None]:
    """Set JAX's settings for a scope."""
    before = {name: getattr(jax.config, name) for name, _ in settings}
    changed = {name: value for name, value in settings if value != before[name]}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        yield
    finally:
        for name in changed:
            jax.config.update(name, before[name])


kernel_call_p = Primitive("kernel_call")
kernel_call_p.multiple_results = True


@kernel_call_p.def_impl
def _run(*args: jax.Array, kernel: LoweredKernel) -> Sequence[jax.Array]:
    """Run outside of a trace."""
    return _call(kernel.exported(), kernel, *args)


@kernel_call_p.def_abstract_eval
def _result_types(*_: Any, kernel: LoweredKernel) -> Sequence[ShapedArray]:
    return [ShapedArray(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(kernel.results)]


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, kernel: LoweredKernel) -> Any:
    return mlir.lower_fun(partial(_call, kernel.exported(), kernel))(ctx, *args)


def _differentiate(*_: Any, kernel: LoweredKernel) -> Any:
    raise ValueError(f"{kernel} has no derivative")


def _call(exported: export.Exported, kernel: LoweredKernel, *args: Any) -> Sequence[jax.Array]:
    structure = jax.tree.structure(kernel.kernel.shapes)
    return jax.tree.leaves(exported.call(*jax.tree.unflatten(structure, args)))


mlir.register_lowering(kernel_call_p, _lower)
ad.primitive_jvps[kernel_call_p] = _differentiate
