"""The definition of sandwich_norm: every result of a norm or a sum is rounded to the dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.residual_norm.ref import NormArgs, residual_norm

type Normed = tuple[jax.Array, tuple[jax.Array, ...]]  # the sum [T, D], and its norms [T, D] each


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormRow:
    """The weights of a norm: one row of those of several norms, as slicing launches a kernel."""

    weights: jax.Array  # [W, D]
    row: int = field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SandwichArgs:
    """The arguments of ``sandwich_norm``.

    Each of ``outputs`` has a norm of its own, or None. ``post`` is that of their sum. The epsilon
    of these is ``output_eps``, that of ``norms`` is ``eps``.
    """

    x: jax.Array  # [T, D]
    outputs: tuple[jax.Array, ...]  # one or two: [T, D] in x's dtype, or float32[S, T, D]
    output_norms: tuple[NormRow | None, ...]
    post: NormRow | None = None
    factor: jax.Array | None = None  # [1]
    norms: tuple[NormRow, ...] = ()
    eps: float = field(metadata=STATIC)
    output_eps: float = field(metadata=STATIC)
    pins: Pins = field(default=NO_PINS, metadata=STATIC)


def by_norms(args: SandwichArgs, norm: Callable[[NormArgs], tuple[jax.Array, jax.Array]]) -> Normed:
    """``sandwich_norm`` by a kernel that adds and normalises, and operations between its calls."""
    x, none = args.x, jnp.zeros_like(args.x)

    def normed(base: jax.Array, output: jax.Array | None, of: NormRow, eps: float) -> jax.Array:
        static = {"row": of.row, "eps": eps}
        return norm(NormArgs(x=base, partials=output, weights=of.weights, **static))[1]

    def rounded(output: jax.Array) -> jax.Array:
        return output if output.ndim == 2 else output.sum(0).astype(x.dtype)

    found = [
        rounded(output) if own is None else normed(none, output, own, args.output_eps)
        for output, own in zip(args.outputs, args.output_norms, strict=True)
    ]
    delta = found[0] if len(found) == 1 else found[0] + found[1]
    if args.post is not None:
        delta = normed(none, delta, args.post, args.output_eps)
    if args.factor is None and len(args.norms) == 1:
        own = args.norms[0]
        last = NormArgs(x=x, partials=delta, weights=own.weights, row=own.row, eps=args.eps)
        total, result = norm(last)
        return total, (result,)
    total = x + delta
    if args.factor is not None:
        total = total * args.factor
    return total, tuple([normed(total, None, own, args.eps) for own in args.norms])


def sandwich_norm(args: SandwichArgs) -> Normed:
    """See ``sandwich_norm.api``."""
    return by_norms(jax.tree.map(jnp.asarray, args), residual_norm)
