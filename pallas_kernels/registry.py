"""What a kernel op is, and how an implementation of it is chosen.

Owns: ``KernelOp``, ``Impl``, ``Cost``, ``select`` and the list of ops. An op is a frozen record in
its own folder (``<op>/api.py``); nothing registers itself. Must not know: what any op computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

OP_NAMES = (
    "append_decode",
    "kv_append",
    "paged_decode",
    "paged_prefill",
    "qk_rope_append",
    "skinny_gemm",
)


def _runs_always(*args: Any, **static: Any) -> None:
    """The ``supports`` of an implementation without limits."""


def imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported no earlier than the function is called.

    The languages of GPU kernels are optional and slow to import.
    """

    def call(*args: Any, **static: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **static)

    return call


@dataclass(frozen=True)
class Impl:
    """One implementation of an op.

    ``fn`` takes the op's arrays and static keywords. ``platforms`` are the jax platforms it runs on
    (empty: all). ``supports`` takes what ``fn`` takes, looks at shapes, dtypes and static keywords
    only, and returns None or the reason why ``fn`` cannot run them.
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
    updated pools, or attention's result as queries; a bench chains calls by them.
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


def all_ops() -> tuple[KernelOp, ...]:
    """Every op, in the order of ``OP_NAMES``; imports their modules."""
    return tuple(importlib.import_module(f"pallas_kernels.{name}.api").OP for name in OP_NAMES)


def current_platform() -> str:
    """The platform that jax places new computations on: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def select(
    op: KernelOp,
    platform: str,
    args: tuple[Any, ...],
    static: dict[str, Any],
    pinned: str | None = None,
) -> Impl:
    """The implementation for a call: the pinned one, else the first that can run.

    Depends on the platform, shapes, dtypes and static keywords alone, so a trace always chooses
    the same. Raises ValueError, with every reason, when none can run or the pinned one cannot.
    """
    candidates = op.impls
    if pinned is not None:
        candidates = tuple(impl for impl in op.impls if impl.name == pinned)
        if not candidates:
            known = ", ".join(impl.name for impl in op.impls)
            raise ValueError(f"{op.name} has no implementation {pinned!r}; it has {known}")
    reasons = []
    for impl in candidates:
        reason = impl.refuses(platform, args, static)
        if reason is None:
            return impl
        reasons.append(f"{impl.name}: {reason}")
    raise ValueError(f"{op.name} cannot run as asked: {'; '.join(reasons)}")


def dispatch(
    op: KernelOp, args: tuple[Any, ...], static: dict[str, Any], pinned: str | None
) -> Any:
    """Choose for the current platform and call."""
    return select(op, current_platform(), args, static, pinned).fn(*args, **static)
