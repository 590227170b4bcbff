"""quantised_mlp: SwiGLU of tokens times a quantised matrix, times a second one."""

from __future__ import annotations

import jax

from pallas_kernels.harness.pins import without_pins
from pallas_kernels.harness.registry import (
    Impl,
    KernelOp,
    current_platform,
    dispatch,
    imported_when_called,
    select,
)
from pallas_kernels.lib.arrangements import of_either_order
from pallas_kernels.lib.numerics import sum_partials
from pallas_kernels.quantised_gemm import xla
from pallas_kernels.quantised_gemm.api import chosen_definition, quantised_gemm
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_mlp import cases, ref
from pallas_kernels.quantised_mlp.ref import MlpArgs, in_turn

_fp8 = imported_when_called(
    "pallas_kernels.quantised_gemm.fp8.mosaic", "mlp", fp8_launch.mlp_result_shapes
)


def _unfused(args: MlpArgs) -> jax.Array:
    """Each matmul in the implementation that ``pins`` or ``registry.select`` chooses."""
    impl = args.pins.of("quantised_gemm")
    return in_turn(args, lambda gemm: quantised_gemm(gemm, impl))


def _definition(args: MlpArgs) -> jax.Array:
    """The definition of ``_unfused``."""
    impl = args.pins.of("quantised_gemm")
    return in_turn(args, lambda gemm: chosen_definition(gemm, impl))


def _plain_xla(args: MlpArgs) -> jax.Array:
    """Both matmuls in plain XLA; supports differentiation and vmap."""
    return in_turn(args, of_either_order(xla.quantised_gemm))


OP = KernelOp(
    name="quantised_mlp",
    ref=ref.quantised_mlp,
    impls=(
        Impl(
            "mosaic_fp8",
            without_pins(_fp8),
            platforms=("gpu",),
            supports=fp8_launch.supports_mlp,
            ref=ref.quantised_mlp_fp8,
        ),
        Impl("unfused", _unfused, ref=_definition),
        Impl("xla", _plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # float32 as for quantised_gemm. The tensor cores' 14 bits let fp8 round some hidden values the
    # other way, by an eighth of them: 0.038 on an H100 with 264 tokens, 0.055 in simulations.
    tolerance={"float32": 1e-5, "bfloat16": 6e-2, "float16": 6e-2},
    observable=sum_partials,
)


def is_fused(args: MlpArgs) -> bool:
    """True if the matmuls are not to be separate ops; else the norm may join the first one."""
    pinned = args.pins.of("quantised_mlp")
    return select(OP, current_platform(), (args,), {}, pinned).name != "unfused"


def quantised_mlp(args: MlpArgs) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """``quantised_gemm`` with ``swiglu`` times ``gate_up``, then that of the result times ``down``.

    Hidden values have the dtype of ``x``, or are quantised without such a rounding. ``split`` is
    that of the second one. ``pins`` may name an implementation of this op, or of
    ``quantised_gemm``. Raises ValueError on arguments that do not fit together.
    """
    x, gate_up, down = args.x, args.gate_up, args.down
    if x.ndim != 2 or x.shape[1] != gate_up.num_inputs:
        raise ValueError(f"quantised_mlp: tokens {x.shape} do not fit {gate_up.num_inputs} inputs")
    if gate_up.num_outputs != 2 * down.num_inputs:
        raise ValueError(
            f"quantised_mlp: {gate_up.num_outputs} outputs are not twice {down.num_inputs} inputs"
        )
    return dispatch(OP, (args,), {}, args.pins.of("quantised_mlp"))
