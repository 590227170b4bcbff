"""Which calls experts with fixed bits support on a GPU, and their tiles.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import size_of
from pallas_kernels.experts.tiles import max_tiles
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.skinny_gemm.fixed.launch import FixedTiles

WIDTH = 64  # rows of a tile: see ``skinny_gemm.fixed.launch``
TILES = FixedTiles(WIDTH, 64, 64, 4, 4)
FLOAT32 = FixedTiles(WIDTH, 32, 32, 4, 3)  # without tensor cores


def supports(args: ExpertsArgs) -> str | None:
    """Why the kernels cannot run the call, or None."""
    if not args.choices.size:
        return "there are no tokens"
    if isinstance(args.gate_up, Quantised) or isinstance(args.down, Quantised):
        return "weights are quantised"
    return unfit_for_triton(args.x, args.x)


def tiles_for(args: ExpertsArgs) -> FixedTiles:
    """The tiles of a call, which its dtype alone chooses."""
    return FLOAT32 if args.x.dtype.itemsize > 2 else TILES


def num_rows(args: ExpertsArgs) -> int:
    """Rows of all tiles of a call."""
    return WIDTH * max_tiles(args.choices.size, size_of(args.gate_up)[0], WIDTH)


def workspace_bytes(args: ExpertsArgs) -> int:
    """A bound on the bytes that the kernels need: of each row of tiles the token, gates and ups in
    float32, hidden values, and the output.
    """
    _, hidden, width = size_of(args.gate_up)
    itemsize = args.x.dtype.itemsize
    return num_rows(args) * (2 * width * itemsize + hidden * (4 + itemsize))
