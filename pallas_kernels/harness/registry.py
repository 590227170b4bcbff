"""Kernel ops, and the choice of an implementation.

An op is a frozen record in its own folder (``<op>/api.py``); nothing registers itself.

The arguments of an op are one record, next to the definition in ``<op>/ref.py``: callers make it,
and ``supports``, ``result_shapes`` and every implementation take it whole, so a new argument is
written only where it is used. The record is a frozen dataclass that is registered as a pytree. Its
arrays are leaves; its settings are fields with the metadata ``STATIC`` and part of the structure.
So ``jax.jit``, ``jax.tree.map`` and the cache of lowered kernels take a whole record, and a setting
is never traced. A ``NamedTuple`` would trace settings, and a second record for them would be a
second argument of every function.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

import jax

from pallas_kernels.lib.checks import NOT_INSTALLED
from pallas_kernels.lib.device import current_device
from pallas_kernels.toolchain.kernel_call import call_lowered

# Metadata of the field of a setting in an op's record of arguments.
STATIC = MappingProxyType({"static": True})

OP_NAMES = (
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "append_decode",
    "block_topk",
    "compressed_attention",
    "delta_decode",
    "delta_prefill",
    "experts",
    "index_topk",
    "kv_append",
    "latent_decode",
    "latent_prefill",
    "mask",
    "norm_gemm",
    "paged_prefill",
    "publish",
    "qk_rope_append",
    "quantised_gemm",
    "quantised_mlp",
    "residual_norm",
    "route",
    "sample",
    "sandwich_norm",
    "short_conv",
    "skinny_gemm",
    "sparse_attention",
    "sparse_latent",
    "ssd_decode",
    "ssd_prefill",
    "swiglu_gemm",
)


class UnfitKernel(ValueError):
    """No implementation of an op can run a call, or the pinned one cannot."""


def _supports_all(*args: Any, **static: Any) -> None:
    """The ``supports`` of an implementation without limits."""


def _no_workspace(*args: Any) -> int:
    """The ``workspace`` of an implementation that is given none."""
    del args
    return 0


def imported_when_called(
    module: str, name: str, results: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called.

    Triton and Mosaic are optional and slow to import. Mosaic is also slow to lower, so on a GPU all
    executables share one lowering per shape (``toolchain``), unless an argument is a Ref. (Plain
    XLA code is quick to lower, and jax-triton caches the kernels that it has compiled.) ``results``
    returns the result shapes of a Mosaic kernel; without it the kernel is traced for them.
    """
    is_mosaic = module.endswith(".mosaic")

    def call(*args: Any, **static: Any) -> Any:
        function = getattr(importlib.import_module(module), name)
        refs = any(isinstance(x, jax.Ref) for x in jax.tree.leaves(args))
        if is_mosaic and current_platform() == "gpu" and not refs:
            return call_lowered(module, name, args, static, results)
        return function(*args, **static)

    return call


@dataclass(frozen=True)
class Impl:
    """One implementation of an op.

    ``fn`` takes the op's record of arguments. ``platforms`` are the JAX platforms it runs on
    (empty: all). ``supports`` takes the record too, checks shapes, dtypes, settings, the device and
    the installed packages, and returns None or the reason why ``fn`` cannot run. ``ref`` is its own
    definition where it differs from the op's: an implementation that rounds arguments to fewer
    bits. ``workspace`` takes the record of abstract arguments and returns a bound on the bytes that
    ``fn`` allocates; of ops that allocate little it is left out.
    """

    name: str
    fn: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    supports: Callable[..., str | None] = _supports_all
    ref: Callable[..., Any] | None = None
    workspace: Callable[..., int] = _no_workspace

    def refuses(self, platform: str, args: tuple[Any, ...], static: dict[str, Any]) -> str | None:
        """Why this implementation cannot run the call, or None."""
        if self.platforms and platform not in self.platforms:
            return f"it runs on {', '.join(self.platforms)}, not on {platform}"
        return self.supports(*args, **static)


class Case(Protocol):
    """A named call of an op. ``tags``: ci, full, bench, gpu (in benchmarks, only on a GPU), and cpu
    (of sizes that no kernel for a GPU takes).
    """

    @property
    def name(self) -> str: ...
    @property
    def tags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Inputs:
    """Arguments of an implementation: a record of numpy arrays, or these and static keywords."""

    args: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """Lower bound on the work of a case: bytes read and written, floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class KernelOp:
    """An op: its definition, implementations in order of preference, and test cases.

    ``ref`` is the definition in plain jnp. ``build`` makes a case's inputs from a seed, with NaN
    wherever the op must not read. ``tolerance`` maps a dtype's name to the largest accepted
    difference from ``ref``, relative to 1 + the reference's magnitude. ``observable`` keeps the
    part of the outputs that the op defines. Arrays are counted as ``arrays_of`` lists them:
    ``donate`` are those updated in place. ``feeds`` pairs an array with the output (by index) that
    may be that array of the next call: updated pools, or the output of attention as queries;
    benchmarks chain calls this way. ``refs`` are those that implementations take as ``jax.Ref``;
    their contents are the same after the call.
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


def arrays_of(args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The arrays of a call, with None for each that is absent, and the structure of its arguments.

    ``structure.unflatten(arrays)`` are the arguments again.
    """
    return jax.tree.flatten(args, is_leaf=lambda x: x is None)


def with_refs(op: KernelOp, named: Mapping[int, Any]) -> dict[int, Any]:
    """Arrays by index, in a trace; those of ``op.refs`` that are not None become Refs."""
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

    Depends on shapes, dtypes, static keywords and the machine, never on values, so every trace
    makes the same choice. Raises ``UnfitKernel`` with all reasons when none can run or the pinned
    one cannot.
    """
    return _select(op, platform, args, static, pinned)[0]


def _select(
    op: KernelOp,
    platform: str,
    args: tuple[Any, ...],
    static: dict[str, Any],
    pinned: str | None,
) -> tuple[Impl, dict[str, str]]:
    """``select``, and the reasons of the implementations before the chosen one, by name."""
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
    raise UnfitKernel(f"{op.name} cannot run this call: {_listed(refused)}")


def workspace_of(op: KernelOp, platform: str, args: Any, pinned: str | None = None) -> int:
    """A bound on the bytes that a call of ``args`` allocates in its implementation.

    Whether a pinned one can run the call is found when the call is traced.
    """
    if pinned is None:
        impl = select(op, platform, (args,), {})
    else:
        impl = next(impl for impl in op.impls if impl.name == pinned)
    return impl.workspace(args)


def dispatch(
    op: KernelOp, args: tuple[Any, ...], static: dict[str, Any], pinned: str | None
) -> Any:
    """Choose for the current platform, log the choice and call."""
    impl, refused = _select(op, current_platform(), args, static, pinned)
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(args))
    passed_over = f"; {_listed(refused)}" if refused else ""
    _log_once(logging.INFO, f"{op.name}({shapes}) is {impl.name}{passed_over}")
    if NOT_INSTALLED in refused.values():
        _log_once(logging.WARNING, f"slower kernels are used: {NOT_INSTALLED}")
    return impl.fn(*args, **static)


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


@cache
def _log_once(level: int, line: str) -> None:
    """Log a line the first time only: a model makes the same choice in every layer."""
    logging.getLogger(__name__).log(level, line)
