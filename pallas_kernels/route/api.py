"""route: the experts of each token and their weights, by a router."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.route import cases, launch, native, ref, xla
from pallas_kernels.route.ref import RouteArgs

_triton = imported_when_called("pallas_kernels.route.triton", "route")
_triton_fixed = imported_when_called("pallas_kernels.route.triton", "route_fixed")

OP = KernelOp(
    name="route",
    ref=ref.route,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.route),
        Impl("native", native.route, ("cpu",), native.supports),
        Impl("triton_fixed", _triton_fixed, ("gpu",), launch.supports_fixed),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-5, "int32": 0.0},
)


def route(
    args: RouteArgs,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """Each token's experts and their weights: see ``Routing``.

    Logits are ``x @ w.T``, accumulated in float32 and not rounded. Experts that are ``given`` need
    only weights. ``impl`` pins an implementation.
    Raises ValueError on arguments that do not fit together.
    """
    routing = args.routing
    if args.x.ndim != 2 or args.w.ndim != 2 or args.x.shape[1] != args.w.shape[1]:
        raise ValueError(f"route: tokens {args.x.shape} do not fit a router {args.w.shape}")
    count = len(args.w)
    vectors = ("bias", "choice_bias", "expert_scale")
    for name, one in ((name, getattr(args, name)) for name in vectors):
        if one is not None and one.shape != (count,):
            raise ValueError(f"route: {name} {one.shape} does not fit {count} experts")
    if args.is_token is not None and args.is_token.shape != args.x.shape[:1]:
        raise ValueError(f"route: is_token {args.is_token.shape} does not fit {len(args.x)} tokens")
    if args.choice_bias is not None and args.choice_bias.dtype != jnp.float32:
        raise ValueError(f"route: choice_bias is {args.choice_bias.dtype}, not float32")
    own = len(args.x), routing.chosen
    if args.given is not None and (args.given.shape, args.given.dtype) != (own, jnp.int32):
        raise ValueError(
            f"route: experts {args.given.dtype}{list(args.given.shape)} are not int32{list(own)}"
        )
    if args.given is not None and routing.scores == "sparsemixer":
        raise ValueError("route: sparsemixer chooses the experts that it weighs")
    most = count
    if routing.groups is not None:
        if count % routing.groups.count:
            raise ValueError(f"route: {routing.groups.count} groups do not divide {count} experts")
        most = count // routing.groups.count * routing.groups.chosen
    if not 1 <= routing.chosen <= most:
        raise ValueError(f"route: {routing.chosen} experts of a token are not within 1 to {most}")
    return dispatch(OP, (args,), {}, impl)
