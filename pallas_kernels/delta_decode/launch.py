"""Which calls the Triton kernel of delta_decode supports, and its launch parameters.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.numerics import power_of_two

MIN_DIM, MAX_DIM = 16, 256
MAX_STATE = 128 * 256  # elements of a head's state, which are in the registers of a CTA
STATE_OF_THREAD = 128  # elements
MAX_WIDTH = 8  # taps of a convolution, whose loop is unrolled


def supports(args: DeltaDecodeArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    *_, key_dim, value_dim = args.states.shape
    for name, size in (("keys", key_dim), ("values", value_dim)):
        if power_of_two(size) != size or not MIN_DIM <= size <= MAX_DIM:
            return f"{name} have {size} components, not a power of two from {MIN_DIM} to {MAX_DIM}"
    if key_dim * value_dim > MAX_STATE:
        return f"a state of {key_dim} x {value_dim} has more than {MAX_STATE} elements"
    if len(args.conv) > MAX_WIDTH:
        return f"the convolution has {len(args.conv)} taps, more than {MAX_WIDTH}"
    if args.beta_scale != 1:
        return f"betas are multiplied by {args.beta_scale}"
    return unfit_for_triton(args.qkv, args.convs)


def num_warps(args: DeltaDecodeArgs) -> int:
    """As many as the state of a head fills with ``STATE_OF_THREAD`` elements a thread.

    Half as many as the registers allow: sums over fewer warps take less time. Qwen3.5-4B, 64 rows,
    H200: 97 us with 4 warps, 140 with 8, in a chain of ``bench.kernels``.
    """
    *_, key_dim, value_dim = args.states.shape
    return max(1, key_dim * value_dim // (32 * STATE_OF_THREAD))
