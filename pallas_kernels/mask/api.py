"""mask: forbid tokens by masks that the host writes while the step already runs.

The mask of a row depends on the row's token in the step before, which the host reads when this step
has been launched. The kernel waits for it, at the end of the step, when it has long been written.
"""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import without_triton
from pallas_kernels.mask import cases, native, ref
from pallas_kernels.mask.ref import MaskArgs

_triton = imported_when_called("pallas_kernels.mask.triton", "mask")


def _triton_supports(args: MaskArgs) -> str | None:
    if args.logits.dtype != "float32":
        return f"the logits are {args.logits.dtype}, not one of bfloat16 or float32"
    return without_triton() if args.logits.size else "there are no rows"


def reads_board(platform: str, impl: str | None) -> bool:
    """True if the implementation that runs on the platform reads masks; see ``mask``."""
    if platform == "gpu":
        return impl in (None, "triton") and without_triton() is None
    return platform == "cpu" and impl in (None, "native") and native.supports() is None


OP = KernelOp(
    name="mask",
    ref=ref.mask,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=_triton_supports),
        Impl("native", native.mask, platforms=("cpu",), supports=native.supports),
        Impl("xla", ref.mask),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0, "float32": 0.0},
    donate=(0,),
    feeds=((0, 0),),
)


def mask(
    args: MaskArgs,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """The logits, in place, with -inf for each token that a row's mask forbids; and whether the
    mask of each row came in time (1), also for rows that wait for none.

    ``place`` holds the low half of an address, its high half, and a number. At the address, in the
    device's memory, is int32[S]: a slot's word becomes the number once its mask is complete. There
    follow the bits int32[S, W]: token t is bit t % 32 of word t // 32 (``mask.board``).
    If the number does not come within some seconds, or the address is 0, all logits of the row
    become -inf and the result is 0: it fails closed. The XLA implementation reads no address, so
    there no mask comes in time. ``impl`` pins an implementation. Raises ValueError on arguments
    that do not fit together.
    """
    rows = args.logits.shape[0] if args.logits.ndim == 2 else -1
    for name, array in (("finite", args.finite), ("wanted", args.wanted), ("slots", args.slots)):
        if array.shape != (rows,) or array.dtype != "int32":
            raise ValueError(f"mask: {name} is {array.dtype}{array.shape}, not int32[B]")
    if args.place.shape != (3,) or args.place.dtype != "int32":
        raise ValueError(f"mask: the place is {args.place.dtype}{args.place.shape}, not int32[3]")
    return dispatch(OP, (args,), {}, impl)
