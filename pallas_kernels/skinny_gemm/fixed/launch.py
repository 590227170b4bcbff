"""Which calls the GEMM with fixed bits supports on a GPU, and its tiles.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.skinny_gemm.ref import GemmArgs

FEW_ROWS = 64
MMA_INNER = 16  # inner components of an instruction of the tensor cores


@dataclass(frozen=True)
class FixedTiles:
    """Tile sizes and launch parameters.

    A sum is over blocks of ``block_k`` inner components in order, of which the tensor cores add
    ``MMA_INNER`` at a time. All tiles of one dtype have at least 64 rows, so that Hopper's have one
    kind of instruction, also for one row: those for fewer rows could add in another order.
    """

    rows: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int


# Few rows are bound by the bytes of weights in flight: 32 KB of a CTA, two of which fit on an SM.
FEW = FixedTiles(64, 32, 64, 4, 8)
MANY = FixedTiles(128, 128, 64, 8, 3)
FLOAT32 = FixedTiles(32, 64, 32, 4, 3)  # without tensor cores


def supports(args: GemmArgs) -> str | None:
    """Why the kernel cannot run the call, or None."""
    x, w = args.x, args.w
    if w.dtype != x.dtype:
        return f"tokens are {x.dtype} and weights {w.dtype}"
    if not x.size or not w.size:
        return f"tokens {x.shape} or weights {w.shape} are empty"
    return unfit_for_triton(x, x)


def tiles_for(args: GemmArgs) -> FixedTiles:
    """The tiles of a call; a row's bits are the same with each that its dtype can have."""
    if args.x.dtype.itemsize > 2:
        return FLOAT32
    return FEW if len(args.x) <= FEW_ROWS else MANY
