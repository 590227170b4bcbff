"""A kernel in Mosaic as a primitive that is lowered once for all the executables of a process.

To lower such a kernel takes 0.1 to 1.5 s of Python, and JAX would lower it again for each
executable. ``call_lowered`` binds a primitive instead, whose rule calls an exported module. All
executables then hold the same bytes, by which XLA recognises a kernel that it has compiled. (What
JAX lowers itself has a running number in it.)
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

from pallas_kernels.device import Device, compiling_for, current_device
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

_LOWERING = threading.RLock()  # the settings are the process's, and lowering holds Python's lock


def call_lowered(
    module: str,
    name: str,
    args: tuple[jax.Array | None, ...],
    static: Mapping[str, Any],
    results: Callable[..., Any] | None = None,
) -> Any:
    """Call a module's function of arrays in a trace; it is lowered once for each shape.

    The function takes and returns arrays alone, no references. ``results``, called as the function
    is, returns the shapes of its results; without it the function is traced for them, which takes
    0.15 s for a large kernel.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    settings = tuple((setting, getattr(jax.config, setting)) for setting in TRACE_SETTINGS)
    returned = None if results is None else results(*shapes, **static)
    decisive = (shapes, tuple(static.items()), current_device(), settings, returned)
    kernel = _shared(Kernel(module, name, *decisive))
    flat = kernel_call_p.bind(*jax.tree.leaves(args), kernel=kernel)
    return jax.tree.unflatten(jax.tree.structure(kernel.results), flat)


@dataclass(frozen=True)
class Kernel:
    """A kernel by all that decides its code; any process can lower it."""

    module: str
    name: str  # of the function
    shapes: tuple[jax.ShapeDtypeStruct | None, ...]  # of its arguments
    static: tuple[tuple[str, Any], ...]
    device: Device
    settings: tuple[tuple[str, Any], ...]  # jax's, where traces depend on them
    returned: Any = None  # shapes, where they are known without a trace

    def __str__(self) -> str:
        return f"{self.module}.{self.name}({_listed(jax.tree.leaves(self.shapes))})"

    def results(self) -> Any:
        """The shapes of its results."""
        if self.returned is not None:
            return self.returned
        with compiling_for(self.device):
            return jax.eval_shape(self._function(), *self.shapes)

    def lower(self) -> bytes:
        """The module in StableHLO, serialized as ``export`` does.

        Raises ValueError when its results are not those that ``returned`` says.
        """
        with _LOWERING, compiling_for(self.device), _set((*self.settings, *LOWERING_SETTINGS)):
            exported = self.exported(self._function())
        said, made = (_listed(x) for x in (jax.tree.leaves(self.returned), exported.out_avals))
        if self.returned is not None and said != made:
            raise ValueError(f"{self} returns {made}, not {said}")
        return _unlinked(exported.mlir_module_serialized)

    def exported(self, function: Callable[..., Any]) -> export.Exported:
        """A function of these arguments under the kernel's name."""
        named = partial(function)
        named.__name__ = self.name  # type: ignore[attr-defined]
        # All arguments are kept: only the process that lowers the kernel knows which are used.
        return export.export(
            jax.jit(named, keep_unused=True), platforms=[self.device.xla_platform]
        )(*self.shapes)

    def _function(self) -> Callable[..., Any]:
        return partial(
            getattr(importlib.import_module(self.module), self.name), **dict(self.static)
        )


class LoweredKernel:
    """A kernel in this process. Its module is whole until it is compiled, then without its source.

    A trace needs only the shapes of its results; its module is lowered by the first who needs it.
    It equals only itself, since its content changes.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.results = kernel.results()
        self.compiled = False  # for this process
        self._module: bytes | None = None
        self._whole: bytes | None = None
        self._changing = threading.Lock()

    def __str__(self) -> str:
        return str(self.kernel)

    def exported(self) -> export.Exported:
        """The kernel to be called, as it is now; lowered in this process if it is not lowered."""
        self.lower()
        assert self._module is not None
        return replace(self._zeros, mlir_module_serialized=self._module)

    @cached_property
    def _zeros(self) -> export.Exported:
        """A function with the kernel's arguments and results."""
        return self.kernel.exported(
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.results)
        )

    def compile(self, run: Run = run_here) -> None:
        """Load its machine code into this process; modules lowered from then on hold its hash.

        Mosaic keeps what it has compiled by that hash and looks there first, and an executable is
        saved with the machine code of its kernels. So their source, up to 260 KB in each of 36
        layers, is no longer needed: without it XLA compiles a step of 1,024 tokens in 2.4 s, not
        5.2. ``run`` may lower and compile the kernel in another process.
        """
        self.lower(run)
        assert self._whole is not None
        for call in self._calls():
            call.compile(run)
        self._module = _without_sources(self._whole)
        self.compiled = True

    def lower(self, run: Run = run_here) -> None:
        """Lower its module, unless that is done."""
        with self._changing:
            if self._whole is None:
                self._module = self._whole = run(self.kernel.lower)

    def sources(self) -> dict[bytes, bytes]:
        """The Mosaic modules of its calls by their hashes, once it is lowered."""
        assert self._whole is not None, f"{self} is not lowered"
        with make_ir_context():
            module = read_module(self._whole)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return {attribute_of(call, HASH): attribute_of(call, MODULE) for call in calls}

    def _calls(self) -> list[KernelCall]:
        """Its Mosaic calls, each alone."""
        assert self._whole is not None
        with make_ir_context():
            module = read_module(self._whole)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return [KernelCall.of(call, str(self), self.kernel.device) for call in calls]


def drop_sources(module: Any) -> set[bytes]:  # an ir.Module
    """Remove the sources of Mosaic kernels from a module, in place; returns the hashes that are
    left in it. Their kernels must be compiled in this process before the module is.
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
    """The module without the marks of kernels that may begin early, which they must not do unless
    they are linked (``link``).
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
    """One for the process, as JAX's traces and Mosaic's cache of machine code are."""
    return LoweredKernel(kernel)


@contextmanager
def _set(settings: tuple[tuple[str, Any], ...]) -> Generator[None]:
    """Settings of jax for a scope, where they are not so already."""
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
    """Outside of a trace."""
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
