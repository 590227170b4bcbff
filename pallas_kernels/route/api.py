"""route: the experts of each token and their weights, by a router."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.route import cases, launch, ref, xla
from pallas_kernels.route.routing import Routing

_triton = imported_when_called("pallas_kernels.route.triton", "route")

OP = KernelOp(
    name="route",
    ref=ref.route,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.route),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-5, "int32": 0.0},
)


def route(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [E, D]
    *,
    routing: Routing,
    bias: jax.Array | None = None,  # [E], of the logits
    choice_bias: jax.Array | None = None,  # float32[E], of the scores that choose
    is_token: jax.Array | None = None,  # bool[T]: False for padding, which chooses -1
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """Each token's experts and their weights: see ``Routing``.

    Logits are ``x @ w.T``, accumulated in float32 and not rounded. ``impl`` pins an implementation.
    Raises ValueError on arguments that do not fit together.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"route: tokens {x.shape} do not fit a router {w.shape}")
    count = len(w)
    for name, one in (("bias", bias), ("choice_bias", choice_bias)):
        if one is not None and one.shape != (count,):
            raise ValueError(f"route: {name} {one.shape} does not fit {count} experts")
    if is_token is not None and is_token.shape != x.shape[:1]:
        raise ValueError(f"route: is_token {is_token.shape} does not fit {len(x)} tokens")
    if choice_bias is not None and choice_bias.dtype != jnp.float32:
        raise ValueError(f"route: choice_bias is {choice_bias.dtype}, not float32")
    most = count
    if routing.groups is not None:
        if count % routing.groups.count:
            raise ValueError(f"route: {routing.groups.count} groups do not divide {count} experts")
        most = count // routing.groups.count * routing.groups.chosen
    if not 1 <= routing.chosen <= most:
        raise ValueError(f"route: {routing.chosen} experts of a token are not within 1 to {most}")
    return dispatch(OP, (x, w, bias, choice_bias, is_token), {"routing": routing}, impl)
