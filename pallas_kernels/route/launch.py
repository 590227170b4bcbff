"""Which calls the Triton kernels of route support, and the tiles of the logits."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.route.ref import RouteArgs

MAX_EXPERTS = 1024  # one CTA holds the scores of a token in registers

# For so many tokens one kernel makes the logits, split over K. XLA needs two to four: it pads up to
# 16 tokens and adds its own partials. For one token its GEMV takes 1.7 us (H100).
MIN_TOKENS, MAX_TOKENS = 2, 64
BLOCK_K = 128  # inner components that a CTA has in flight for each stage
MMA_TOKENS = 16  # the fewest rows of a Triton matmul
MAX_SPLITS = 32  # partials of a logit, which the next kernel reads
MAX_PARTIALS = 4096  # of a token, which a CTA of that kernel holds in registers
MAX_STAGES = 4


class LogitTiles(NamedTuple):
    """Tile sizes of the logits: a CTA multiplies all tokens by ``experts`` rows of the router, over
    ``blocks`` blocks of BLOCK_K inner components.
    """

    tokens: int
    experts: int
    blocks: int
    splits: int


def logit_tiles(args: RouteArgs) -> LogitTiles | None:
    """A CTA for each SM where the sizes permit it; None where XLA makes the logits."""
    (tokens, inner), count = args.x.shape, len(args.w)
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        return None
    if args.w.dtype != args.x.dtype or args.x.dtype.itemsize != 2:
        return None
    experts = 16 if count <= 128 else 32
    most = min(
        current_device().num_sms // -(-count // experts),
        MAX_SPLITS,
        MAX_PARTIALS // power_of_two(count),
    )
    needed = -(-inner // BLOCK_K)
    blocks = -(-needed // max(most, 1))
    splits = -(-needed // blocks)
    return LogitTiles(max(MMA_TOKENS, power_of_two(tokens)), experts, blocks, splits)


def supports_fixed(args: RouteArgs) -> str | None:
    """Why the kernel with fixed bits cannot run the call, or None."""
    if args.w.dtype != args.x.dtype:
        return f"tokens are {args.x.dtype} and the router {args.w.dtype}"
    return supports(args)


def supports(args: RouteArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None. Imports no Triton."""
    if len(args.w) > MAX_EXPERTS:
        return f"{len(args.w)} experts are more than {MAX_EXPERTS}"
    if args.routing.scores == "sqrtsoftplus":
        return "scores are square roots of softplus"
    if args.given is not None:
        return "the experts are chosen elsewhere"
    if not args.x.size:
        return "there are no tokens"
    return unfit_for_triton(args.x, args.x)
