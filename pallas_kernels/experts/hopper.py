"""experts on NVIDIA Hopper: tokens are sorted by expert, two GEMMs, and each token's sum.

For few tokens the second GEMM returns the weighted outputs of each choice, which the next norm may
add up. For more, its rows are gathered.
"""

from __future__ import annotations

import jax

from pallas_kernels.experts import launch, triton
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.harness.registry import imported_when_called

_gate_up = imported_when_called(
    "pallas_kernels.experts.mosaic", "gate_up", lambda *_, sizes: sizes.result
)
_down = imported_when_called(
    "pallas_kernels.experts.mosaic", "down", lambda *_, sizes: sizes.result
)


def experts(args: ExpertsArgs) -> jax.Array:  # [T, D], or float32[k, T, D]
    """See ``experts.api``."""
    x, weights = args.x, args.weights
    first, second = launch.sizes_of(args)
    tiles = triton.tiles_of(args.choices, first.experts, first.width)
    rows = x if first.all_tokens else triton.spread(x, tiles.place, first.tiles * first.width)
    common = (tiles.expert, tiles.rows, tiles.used, tiles.pairs)
    hidden = _gate_up(rows, *common, args.gate_up_bias, args.gate_up, sizes=first)
    out = _down(hidden, *common, tiles.place, weights, args.down_bias, args.down, sizes=second)
    if not second.few:
        return triton.gather(out, tiles.place, weights)
    return out if args.split else out.sum(0).astype(x.dtype)
