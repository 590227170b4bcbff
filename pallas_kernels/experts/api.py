"""experts: the feed-forward networks of a mixture of experts, each of the tokens that chose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.experts import cases, launch, native, ref, xla
from pallas_kernels.experts.fixed import launch as fixed_launch
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import Stack, arrays_of, size_of
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.numerics import sum_partials
from pallas_kernels.lib.quantised import Quantised

_hopper = imported_when_called("pallas_kernels.experts.hopper", "experts")
_triton_fixed = imported_when_called("pallas_kernels.experts.fixed.triton", "experts")


OP = KernelOp(
    name="experts",
    ref=ref.experts,
    impls=(
        Impl("native", native.experts, ("cpu",), native.supports, workspace=native.workspace_bytes),
        Impl("hopper", _hopper, ("gpu",), launch.supports, workspace=launch.workspace_bytes),
        Impl("xla", xla.experts, workspace=xla.workspace_bytes),
        Impl(
            "triton_fixed",
            _triton_fixed,
            ("gpu",),
            fixed_launch.supports,
            workspace=fixed_launch.workspace_bytes,
        ),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # weights and hidden values are rounded to the dtype before they are multiplied
    tolerance={"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3},
    observable=sum_partials,
)


def experts(
    args: ExpertsArgs, impl: str | None = None
) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """The weighted sum of the outputs of each token's experts, in the dtype of ``x``.

        sum over j of weights[t, j] * (down[e] @ activation(gate_up[e] @ x[t])),  e = choices[t, j]

    with the biases added to both products. The sum is over j in order, in float32, so a token's
    bits depend on nothing else in the batch but its number of tokens. Every choice is computed,
    however many tokens choose one expert; a token's choices are distinct. A choice outside
    [0, E) adds nothing, and the weights of experts that no token chose need not be read: so are
    padding tokens and, where experts are divided among devices, those of other devices.

    With ``split`` the result may be partials to be summed by the next norm (``residual_norm``,
    ``norm_gemm``): the weighted outputs of each j. ``gate_up`` and ``down`` are arrays of floats in
    the dtype of ``x`` or any form of ``quantised``; arranged stacks are matrices arranged one by
    one. ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.
    """
    _check_tokens(args.x, args.choices, args.weights)
    _check_stacks(args.x, args.gate_up, args.down, args.activation.halves)
    count, hidden, _ = size_of(args.gate_up)
    for name, bias, width in (
        ("gate_up_bias", args.gate_up_bias, hidden),
        ("down_bias", args.down_bias, args.x.shape[1]),
    ):
        if bias is not None and bias.shape != (count, width):
            raise ValueError(
                f"experts: {name} {bias.shape} does not fit {count} experts of {width} outputs"
            )
    return dispatch(OP, (args,), {}, impl)


def _check_tokens(x: jax.Array, choices: jax.Array, weights: jax.Array) -> None:
    if x.ndim != 2 or choices.ndim != 2 or choices.shape[0] != x.shape[0]:
        raise ValueError(f"experts: choices {choices.shape} do not fit tokens {x.shape}")
    if choices.dtype != jnp.int32:
        raise ValueError(f"experts: choices are {choices.dtype}, not int32")
    if weights.shape != choices.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"experts: weights {weights.dtype}{weights.shape} must be float32{choices.shape}"
        )


def _check_stacks(x: jax.Array, gate_up: Stack, down: Stack, halves: int) -> None:
    shapes = [arrays_of(stack)[0].shape for stack in (gate_up, down)]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"experts: weights {shapes[0]} and {shapes[1]} are not stacks of matrices")
    count, hidden, inputs = size_of(gate_up)
    if hidden % halves or inputs != x.shape[1]:
        raise ValueError(
            f"experts: {hidden} gates and ups of {inputs} inputs do not fit tokens {x.shape}"
        )
    expected = (count, inputs, hidden // halves)
    if size_of(down) != expected:
        raise ValueError(f"experts: down is {size_of(down)} instead of {expected}")
    for stack in (gate_up, down):
        if not isinstance(stack, Quantised) and stack.dtype != x.dtype:
            raise ValueError(f"experts: weights are {stack.dtype} and tokens {x.dtype}")
