"""ssd_decode: a token of Mamba-2's state space in each row, whose states are updated by index."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.ssd_decode import cases, launch, native, ref, xla
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill.ref import unfit_shapes

_triton = imported_when_called("pallas_kernels.ssd_decode.triton", "ssd_decode")

OP = KernelOp(
    name="ssd_decode",
    ref=ref.ssd_decode,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("native", native.ssd_decode, platforms=("cpu",), supports=native.supports),
        Impl("xla", xla.ssd_decode),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3},
    observable=cases.observable,
    donate=(3, 9),
    feeds=((3, 1), (9, 2)),
)


def ssd_decode(
    args: SsdDecodeArgs, impl: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The outputs [B, H, P] of decode rows, and the states and inputs of convolutions with them.

    If there is a convolution, its causal sum of each channel passes SiLU first. The recurrence is
    that of ``ssd_prefill``. In place when the caller donates the states. Several padding rows may
    have the same row of states, which no other row reads. ``impl`` pins an implementation. Raises
    ValueError on arguments that do not fit together.
    """
    unfit, tokens = unfit_shapes(args.mixed, args.steps, args.decay, args.states), len(args.mixed)
    if unfit is not None:
        raise ValueError(f"ssd_decode: {unfit} do not fit together")
    indices = (args.positions, args.rows, *([] if args.keeps is None else [args.keeps]))
    if any(each.shape != (tokens,) for each in indices):
        lengths = ", ".join(str(each.shape) for each in indices)
        raise ValueError(f"ssd_decode: the indices of {tokens} rows have other lengths: {lengths}")
    if not _convolution_fits(args):
        arrays = (args.conv, args.conv_bias, args.convs)
        shapes = ", ".join("none" if one is None else str(one.shape) for one in arrays)
        raise ValueError(
            f"ssd_decode: convolution, bias and inputs {shapes} do not fit together with tokens "
            f"{args.mixed.shape} and {len(args.states)} states"
        )
    return dispatch(OP, (args,), {}, impl)


def _convolution_fits(args: SsdDecodeArgs) -> bool:
    """True if the arrays of the convolution are there together, and fit."""
    if args.conv is None or args.convs is None:
        return args.conv is args.convs is args.conv_bias
    channels = args.mixed.shape[1:]
    bias_fits = args.conv_bias is None or args.conv_bias.shape == channels
    inputs = (len(args.states), len(args.conv), *channels)
    return args.conv.shape[1:] == channels and args.convs.shape == inputs and bias_fits
