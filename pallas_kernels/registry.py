"""What a kernel op is, and how an implementation of it is chosen.

An op is a frozen record in its own folder (``<op>/api.py``); nothing registers itself.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import jax

from pallas_kernels.checks import NOT_INSTALLED
from pallas_kernels.device import current_device
from pallas_kernels.toolchain.kernel_call import call_lowered

OP_NAMES = (
    "append_decode",
    "kv_append",
    "norm_gemm",
    "paged_prefill",
    "publish",
    "qk_rope_append",
    "residual_norm",
    "sample",
    "skinny_gemm",
    "swiglu_gemm",
)


class UnfitKernel(ValueError):
    """No implementation of an op can run a call, or the one that was pinned cannot."""


def _runs_always(*args: Any, **static: Any) -> None:
    """The ``supports`` of an implementation without limits."""


def imported_when_called(
    module: str, name: str, results: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called.

    The languages of GPU kernels are optional and slow to import. Mosaic is slow to lower as well,
    so on a GPU all executables share one lowering for each shape (``toolchain``), unless an
    argument is a reference. (XLA's code has little to lower, and jax-triton keeps the kernels that
    it has compiled.) ``results`` returns the shapes of such a kernel's results; without it the
    kernel is traced for them.
    """
    in_mosaic = module.endswith(".mosaic")

    def call(*args: Any, **static: Any) -> Any:
        function = getattr(importlib.import_module(module), name)
        refs = any(isinstance(arg, jax.Ref) for arg in args)
        if in_mosaic and current_platform() == "gpu" and not refs:
            return call_lowered(module, name, args, static, results)
        return function(*args, **static)

    return call


@dataclass(frozen=True)
class Impl:
    """One implementation of an op.

    ``fn`` takes the op's arrays and static keywords. ``platforms`` are the jax platforms it runs on
    (empty: all). ``supports`` takes what ``fn`` takes, looks at shapes, dtypes and static keywords,
    at the device and at what is installed, and returns None or the reason why ``fn`` cannot run.
    """

    name: str
    fn: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    supports: Callable[..., str | None] = _runs_always

    def refuses(self, platform: str, args: tuple[Any, ...], static: dict[str, Any]) -> str | None:
        """Why this implementation cannot run the call, or None."""
        if self.platforms and platform not in self.platforms:
            return f"it runs on {', '.join(self.platforms)}, not on {platform}"
        return self.supports(*args, **static)


class Case(Protocol):
    """A named call of an op; ``tags`` are among ci, full, bench, and gpu: bench only on one."""

    @property
    def name(self) -> str: ...
    @property
    def tags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Inputs:
    """What an implementation is called with: arrays (numpy) and static keywords."""

    args: tuple[Any, ...]
    static: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """The least work of a case: bytes that must move and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class KernelOp:
    """An op: its definition, implementations in order of preference, and how to try them.

    ``ref`` is the definition in plain jnp. ``build`` makes a case's inputs from a seed, with NaN
    wherever the op must not look. ``tolerance`` maps a dtype's name to the largest accepted
    difference from ``ref``, relative to 1 + the reference's magnitude. ``observable`` keeps the
    part of the outputs that the op defines. ``donate`` are the arguments updated in place.
    ``feeds`` pairs an argument with the output (by index) that may be that argument of a next call:
    updated pools, or attention's result as queries; a bench chains calls by them. ``refs`` are the
    arguments that implementations take as ``jax.Ref``: they leave them as they found them.
    """

    name: str
    ref: Callable[..., Any]
    impls: tuple[Impl, ...]
    cases: tuple[Case, ...]
    build: Callable[[Any, int], Inputs]
    cost: Callable[[Any], Cost]
    tolerance: Mapping[str, float]
    observable: Callable[[Any], Any] = lambda outputs: outputs
    donate: tuple[int, ...] = ()
    feeds: tuple[tuple[int, int], ...] = ()
    refs: tuple[int, ...] = ()


def with_refs(op: KernelOp, named: Mapping[int, Any]) -> dict[int, Any]:
    """Arguments by index, in a trace: those of ``refs`` that are there become references."""
    return {i: jax.new_ref(x) if i in op.refs and x is not None else x for i, x in named.items()}


def all_ops() -> tuple[KernelOp, ...]:
    """Every op, in the order of ``OP_NAMES``; imports their modules."""
    return tuple(importlib.import_module(f"pallas_kernels.{name}.api").OP for name in OP_NAMES)


def current_platform() -> str:
    """The platform of the current device: "cpu", "gpu" or "tpu"."""
    return current_device().platform


def select(
    op: KernelOp,
    platform: str,
    args: tuple[Any, ...],
    static: dict[str, Any],
    pinned: str | None = None,
) -> Impl:
    """The implementation for a call: the pinned one, else the first that can run.

    Depends on shapes, dtypes, static keywords and the machine alone, never on values, so a trace
    always chooses the same. Raises ``UnfitKernel``, with every reason, when none can run or the
    pinned one cannot.
    """
    return _select(op, platform, args, static, pinned)[0]


def _select(
    op: KernelOp,
    platform: str,
    args: tuple[Any, ...],
    static: dict[str, Any],
    pinned: str | None,
) -> tuple[Impl, dict[str, str]]:
    """``select``, and why those before the chosen one were passed over, by name."""
    candidates = op.impls
    if pinned is not None:
        candidates = tuple(impl for impl in op.impls if impl.name == pinned)
        if not candidates:
            known = ", ".join(impl.name for impl in op.impls)
            raise UnfitKernel(f"{op.name} has no implementation {pinned!r}; it has {known}")
    refused: dict[str, str] = {}
    for impl in candidates:
        reason = impl.refuses(platform, args, static)
        if reason is None:
            return impl, refused
        refused[impl.name] = reason
    raise UnfitKernel(f"{op.name} cannot run as asked: {_listed(refused)}")


def dispatch(
    op: KernelOp, args: tuple[Any, ...], static: dict[str, Any], pinned: str | None
) -> Any:
    """Choose for the current platform, log the choice and call."""
    impl, refused = _select(op, current_platform(), args, static, pinned)
    shapes = ", ".join(f"{arg.dtype}{list(arg.shape)}" for arg in args if arg is not None)
    passed_over = f"; {_listed(refused)}" if refused else ""
    _log_once(logging.INFO, f"{op.name}({shapes}) is {impl.name}{passed_over}")
    if NOT_INSTALLED in refused.values():
        _log_once(logging.WARNING, f"slower kernels are used: {NOT_INSTALLED}")
    return impl.fn(*args, **static)


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


@cache
def _log_once(level: int, line: str) -> None:
    """Log a line the first time: a model makes the same choice in every layer."""
    logging.getLogger(__name__).log(level, line)
