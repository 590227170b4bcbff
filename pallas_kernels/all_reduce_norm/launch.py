"""Which calls the Triton kernel of all_reduce_norm supports, and for which of them it is quicker.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.all_reduce import launch as sum_launch
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs
from pallas_kernels.harness.pins import LINKS
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.exchange import MAX_ROWS
from pallas_kernels.residual_norm import launch as norm_launch
from pallas_kernels.residual_norm import mosaic_launch


def supports(args: AllReduceNormArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or is slower than two kernels, or None."""
    if args.norm.partials is None:
        return "there is nothing to add"
    for op in ("all_reduce", "residual_norm"):
        if args.pins.of(op):
            return f"{op} is pinned"
    if reason := sum_launch.supports(args.sum) or norm_launch.supports(args.norm):
        return reason
    # All CTAs, one for each row, run at the same time, as each waits for the other devices.
    if (tokens := len(args.norm.x)) > (most := min(MAX_ROWS, current_device().num_sms)):
        return f"{tokens} rows are above {most}"
    if args.before_gemm and args.pins.of("all_reduce_norm") is None and is_hidden(args):
        return "the norm is linked with the next GEMM, which hides it"
    return None


def is_hidden(args: AllReduceNormArgs) -> bool:
    """True if the norm alone, or with the next GEMM, has a Mosaic kernel that is linked with it.

    See ``api.all_reduce_norm`` for the figures.
    """
    if args.pins.of(LINKS) is not None:
        return False
    total: jax.Array = jax.ShapeDtypeStruct((1, *args.norm.x.shape), jnp.float32)  # type: ignore[assignment]
    return mosaic_launch.supports(args.after(total)) is None
