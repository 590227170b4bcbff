"""Pins: the implementation of an op that is chosen from outside, by the user or for fixed bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pallas_kernels.harness.registry import OP_NAMES, all_ops


@dataclass(frozen=True)
class Pins:
    """Pairs of op and implementation, sorted; hashable, as traces depend on it.

    ``invariant``: a token's bits depend only on the tokens before it. These are then the pins of
    ``invariant_pins``, and modules compute decode rows and prompts in one form.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    invariant: bool = False

    def of(self, op: str) -> str | None:
        """The implementation that an op is pinned to; None leaves the choice to ``select``."""
        return dict(self.pairs).get(op)


NO_PINS = Pins()
# Not an op: "links=none" keeps neighbouring kernels from being linked into one call
# (``toolchain.link``).
LINKS, UNLINKED = "links", "none"
# Plain jnp on every platform, for research: kernels neither differentiate nor vmap.
ALL_XLA = Pins(tuple((name, "xla") for name in OP_NAMES))

# For each platform the implementations whose result for a token depends on no other token, nor on
# their number, and is the same in a prompt and in a decode row. Ops that are not named have one
# implementation there, or only such.
_INVARIANT = MappingProxyType(
    {
        "cpu": (
            ("append_decode", "native"),
            ("block_topk", "xla_fixed"),
            ("delta_decode", "native"),
            ("experts", "native"),
            ("index_topk", "xla_fixed"),
            ("latent_decode", "xla"),
            ("norm_gemm", "unfused"),
            ("paged_prefill", "native"),
            ("quantised_gemm", "native"),
            ("quantised_mlp", "unfused"),
            ("residual_norm", "native"),
            ("route", "native"),
            ("sample", "native"),
            ("skinny_gemm", "native"),
            ("sparse_attention", "xla_fixed"),
            ("sparse_latent", "xla_fixed"),
            ("swiglu_gemm", "native"),
        ),
        "gpu": (
            ("append_decode", "triton_fixed"),
            ("experts", "triton_fixed"),
            ("kv_append", "triton"),
            ("norm_gemm", "unfused"),
            ("paged_prefill", "triton_fixed"),
            ("qk_rope_append", "triton_fixed"),
            ("residual_norm", "triton"),
            ("route", "triton_fixed"),
            ("sample", "triton"),
            ("sandwich_norm", "unfused"),
            ("skinny_gemm", "triton_fixed"),
            ("swiglu_gemm", "triton_fixed"),
        ),
    }
)


def invariant_pins(platform: str) -> Pins:
    """The pins by which a request's bits do not depend on its batch.

    Raises ValueError for a platform without such kernels.
    """
    if platform not in _INVARIANT:
        known = ", ".join(_INVARIANT)
        raise ValueError(f"there are kernels with fixed bits for {known}, not for {platform}")
    return Pins(_INVARIANT[platform], invariant=True)


def without_pins(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as an implementation of an op with pins, which ``supports`` has checked.

    One kernel then serves all pins.
    """
    return lambda args: kernel(replace(args, pins=NO_PINS))


def checked_pins(by_op: Mapping[str, str], platform: str) -> Pins:
    """Pins from op names and implementation names.

    Raises ValueError for an unknown name and for an implementation that does not run on the
    platform. Shapes are checked later, when a step is traced.
    """
    ops = {op.name: op for op in all_ops()}
    for name, pinned in by_op.items():
        if name == LINKS:
            if pinned != UNLINKED:
                raise ValueError(f"{LINKS} can be pinned to {UNLINKED} only, not to {pinned!r}")
            continue
        if name not in ops:
            raise ValueError(f"there is no kernel {name!r}; the kernels are {', '.join(ops)}")
        impls = {impl.name: impl for impl in ops[name].impls}
        if pinned not in impls:
            raise ValueError(f"{name} has no implementation {pinned!r}; it has {', '.join(impls)}")
        if (platforms := impls[pinned].platforms) and platform not in platforms:
            raise ValueError(f"{name}={pinned} runs on {', '.join(platforms)}, not on {platform}")
    return Pins(tuple(sorted(by_op.items())))
