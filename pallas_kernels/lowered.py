"""One lowering of a kernel for all the executables of a process.

Owns: ``call_lowered`` and ``LoweredKernel``. Must not know: which kernels come here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import jax
from jax import export
from jax.extend.mlir import deserialize_portable_artifact, serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import make_ir_context

from pallas_kernels.custom_calls import custom_calls, set_attribute

MOSAIC_CALL = "mosaic_gpu_v2"  # the custom call of a kernel in Mosaic


def call_lowered(
    name: str, fn: Callable[..., Any], args: tuple[jax.Array | None, ...], static: Mapping[str, Any]
) -> Any:
    """``fn(*args, **static)`` in a trace; lowered once for each shape, whoever calls it.

    A kernel in Mosaic takes 0.1 to 0.6 s of Python to lower, and JAX lowers for each executable
    what it traced once. Here executables call an exported function instead. They hold the same
    bytes then, by which XLA knows a kernel that it has compiled already. (What JAX lowers itself
    has a running number in it.) ``fn`` takes and returns arrays alone, no references.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return _lowered(name, fn, shapes, tuple(static.items())).call(*args)


@dataclass(frozen=True, eq=False)
class LoweredKernel(export.Exported):
    """A kernel as executables hold it: whole, until it is compiled; then by its hash.

    One of them equals itself alone, since what it holds changes.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def of(cls, exported: export.Exported) -> LoweredKernel:
        """The same function."""
        return cls(**{field.name: getattr(exported, field.name) for field in fields(exported)})

    def compile(self) -> None:
        """Compile it for this process; what is lowered from then on names it by its hash alone.

        Mosaic keeps what it compiled by that hash, looks there first, and an executable is saved
        with the machine code of its kernels. So their source, up to 260 KB in each of 36 layers,
        is dead weight: without it XLA compiles a step of 1,024 tokens in 2.4 s, not 5.2.
        """
        jax.jit(self.call).lower(*self.in_avals).compile()
        object.__setattr__(self, "mlir_module_serialized", _by_hash(self.mlir_module_serialized))


def _by_hash(artifact: bytes) -> bytes:
    """The module without the sources of its kernels."""
    with make_ir_context():
        module = deserialize_portable_artifact(artifact)
        for call in custom_calls(module.operation, MOSAIC_CALL):
            set_attribute(call, "module", "")
        return serialize_portable_artifact(module, stablehlo.get_current_version())


@cache
def _lowered(
    name: str,
    fn: Callable[..., Any],
    shapes: tuple[jax.ShapeDtypeStruct | None, ...],
    static: tuple[tuple[str, Any], ...],
) -> LoweredKernel:
    kernel = partial(fn, **dict(static))
    kernel.__name__ = name  # type: ignore[attr-defined]
    with _for_this_version():
        lower = export.export(jax.jit(kernel), platforms=[export.default_export_platform()])
        return LoweredKernel.of(lower(*shapes))


@contextmanager
def _for_this_version() -> Generator[None]:
    """What is exported meanwhile runs in this process: it need not suit an older JAX. (Mosaic's
    older form names things that the newer reader does not know.)
    """
    option = "jax_export_ignore_forward_compatibility"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)
