"""One lowering of a kernel for all the executables of a process.

Owns: ``call_lowered``. Must not know: which kernels come here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
from jax import export


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


@cache
def _lowered(
    name: str,
    fn: Callable[..., Any],
    shapes: tuple[jax.ShapeDtypeStruct | None, ...],
    static: tuple[tuple[str, Any], ...],
) -> export.Exported:
    kernel = partial(fn, **dict(static))
    kernel.__name__ = name  # type: ignore[attr-defined]
    with _for_this_version():
        lower = export.export(jax.jit(kernel), platforms=[export.default_export_platform()])
        return lower(*shapes)


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
