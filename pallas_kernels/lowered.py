"""One lowering of a kernel for all the executables of a process.

Owns: ``call_lowered``, ``Kernel`` and ``LoweredKernel``. Must not know: which kernels come here,
which process lowers them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.mlir import deserialize_portable_artifact, serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import make_ir_context

from pallas_kernels.custom_calls import (
    HASH,
    MODULE,
    MOSAIC_CALL,
    attribute_of,
    custom_calls,
    set_attribute,
    set_module,
)
from pallas_kernels.device import Device, current_device, described
from pallas_kernels.link_mosaic import unlinked_module
from pallas_kernels.machine_code import KernelCall, Run, run_here

SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion")
TO_LOWER = (
    # What is lowered runs with this version of JAX: it need not suit an older one. (Mosaic's older
    # form names things that the newer reader does not know.)
    ("jax_export_ignore_forward_compatibility", True),
    # Else a kernel's bytes, and so its hash, tell who called for it.
    ("jax_include_full_tracebacks_in_locations", False),
)
_LOWERING = threading.RLock()  # settings are the process's, and lowering is all Python


def call_lowered(
    module: str,
    name: str,
    args: tuple[jax.Array | None, ...],
    static: Mapping[str, Any],
    results: Callable[..., Any] | None = None,
) -> Any:
    """A module's function of arrays in a trace; lowered once for each shape, whoever calls it.

    A kernel in Mosaic takes 0.1 to 1.5 s of Python to lower, and JAX lowers for each executable
    what it traced once. Here executables call an exported function instead. They hold the same
    bytes then, by which XLA knows a kernel that it has compiled already. (What JAX lowers itself
    has a running number in it.) The function takes and returns arrays alone, no references.
    ``results``, called as the function is, says what it returns, as shapes: to trace a large kernel
    in order to know takes 0.15 s.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    settings = tuple((setting, getattr(jax.config, setting)) for setting in SETTINGS)
    returned = None if results is None else results(*shapes, **static)
    asked = (shapes, tuple(static.items()), current_device(), settings, returned)
    return _shared(Kernel(module, name, *asked)).call(*args)


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
        """What it returns, as shapes."""
        if self.returned is not None:
            return self.returned
        with described(self.device):
            return jax.eval_shape(self._function(), *self.shapes)

    def lower(self) -> bytes:
        """The module in StableHLO, serialised as ``export`` does.

        Raises ValueError when it does not return what it was said to.
        """
        with _LOWERING, described(self.device), _set((*self.settings, *TO_LOWER)):
            exported = self.exported(self._function())
        said, made = (_listed(x) for x in (jax.tree.leaves(self.returned), exported.out_avals))
        if self.returned is not None and said != made:
            raise ValueError(f"{self} returns {made}, not {said}")
        return _unlinked(exported.mlir_module_serialized)

    def exported(self, function: Callable[..., Any]) -> export.Exported:
        """A function of these arguments under the kernel's name."""
        named = partial(function)
        named.__name__ = self.name  # type: ignore[attr-defined]
        # All arguments are kept: which ones are used is known to who lowers the kernel alone.
        return export.export(
            jax.jit(named, keep_unused=True), platforms=[self.device.xla_platform]
        )(*self.shapes)

    def _function(self) -> Callable[..., Any]:
        return partial(
            getattr(importlib.import_module(self.module), self.name), **dict(self.static)
        )


class LoweredKernel(export.Exported):
    """A kernel as executables hold it: whole, until it is compiled; then by its hash.

    What it takes and returns is known at once, its module when it is asked for. One of them equals
    itself alone, since what it holds changes.
    """

    def __init__(self, kernel: Kernel) -> None:
        results = kernel.results()
        like = kernel.exported(
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
        )
        types = {field.name: getattr(like, field.name) for field in fields(like)}
        del types["mlir_module_serialized"]  # zeros
        self.__dict__.update(types)
        self.kernel = kernel
        self._module: bytes | None = None
        self._whole: bytes | None = None
        self._changing = threading.Lock()
        self.compiled = False  # for this process

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def mlir_module_serialized(self) -> bytes:
        """Lowered here and now, if nobody has compiled the kernel."""
        self.lower()
        assert self._module is not None
        return self._module

    def has_vjp(self) -> bool:
        """No kernel differentiates."""
        return False

    def vjp(self) -> export.Exported:
        """Raises ValueError."""
        raise ValueError(f"{self.kernel} has no derivative")

    def compile(self, run: Run = run_here) -> None:
        """Have its machine code in this process; what is lowered from then on names it by its hash.

        Mosaic keeps what it compiled by that hash, looks there first, and an executable is saved
        with the machine code of its kernels. So their source, up to 260 KB in each of 36 layers,
        is dead weight: without it XLA compiles a step of 1,024 tokens in 2.4 s, not 5.2. ``run``
        may have another process lower and compile the kernel.
        """
        self.lower(run)
        assert self._whole is not None
        for call in self._calls():
            call.compile(run)
        self._module = _by_hash(self._whole)
        self.compiled = True

    def lower(self, run: Run = run_here) -> None:
        """Have its module, if nobody has yet."""
        with self._changing:
            if self._whole is None:
                self._module = self._whole = run(self.kernel.lower)

    def sources(self) -> dict[bytes, bytes]:
        """The modules of its calls of Mosaic by their hashes, once it is lowered."""
        assert self._whole is not None, f"{self.kernel} is not lowered"
        with make_ir_context():
            module = deserialize_portable_artifact(self._whole)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return {attribute_of(call, HASH): attribute_of(call, MODULE) for call in calls}

    def _calls(self) -> list[KernelCall]:
        """Its calls of Mosaic, each alone."""
        with make_ir_context():
            module = deserialize_portable_artifact(self._whole)
            calls = custom_calls(module.operation, MOSAIC_CALL)
            return [KernelCall.of(call, str(self.kernel), self.kernel.device) for call in calls]


def name_by_hash(module: Any) -> set[bytes]:  # an ir.Module
    """Take the sources of kernels out of a module, in place; the hashes by which it names them now.

    Whoever compiles it has compiled them before.
    """
    named = set[bytes]()
    with module.context:
        for call in custom_calls(module.operation, MOSAIC_CALL):
            named.add(attribute_of(call, HASH))
            set_attribute(call, MODULE, "")
    return named


def _listed(shapes: Iterable[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in shapes)


def _unlinked(artifact: bytes) -> bytes:
    """The module without the marks of kernels that may begin early: beside others than those that
    they are linked with (``link``) they must not.
    """
    with make_ir_context():
        module = deserialize_portable_artifact(artifact)
        for call in custom_calls(module.operation, MOSAIC_CALL):
            set_module(call, unlinked_module(attribute_of(call, MODULE)))
        return serialize_portable_artifact(module, stablehlo.get_current_version())


def _by_hash(artifact: bytes) -> bytes:
    """The module without the sources of its kernels."""
    with make_ir_context():
        module = deserialize_portable_artifact(artifact)
        name_by_hash(module)
        return serialize_portable_artifact(module, stablehlo.get_current_version())


@cache
def _shared(kernel: Kernel) -> LoweredKernel:
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
