"""experts on NVIDIA Hopper: tokens are sorted by expert, two GEMMs, and each token's sum.

For few tokens the second GEMM returns the weighted outputs of each choice, which the next norm may
add up. For more, its rows are gathered.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.experts import launch, triton
from pallas_kernels.experts.ref import NUM_ARRAYS
from pallas_kernels.experts.stack import Activation
from pallas_kernels.registry import imported_when_called

_gate_up = imported_when_called(
    "pallas_kernels.experts.mosaic", "gate_up", lambda *_, sizes: sizes.result
)
_down = imported_when_called(
    "pallas_kernels.experts.mosaic", "down", lambda *_, sizes: sizes.result
)


def experts(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
    split: bool,
) -> jax.Array:  # [T, D], or float32[k, T, D]
    """See ``experts.api``."""
    gate_up, down = arrays[:NUM_ARRAYS], arrays[NUM_ARRAYS : 2 * NUM_ARRAYS]
    gate_up_bias, down_bias = arrays[2 * NUM_ARRAYS :]
    first, second = launch.sizes_of(x, choices, *arrays, kinds=kinds, activation=activation)
    tiles = triton.tiles_of(choices, first.experts, first.width)
    rows = x if first.all_tokens else triton.spread(x, tiles.place, first.tiles * first.width)
    common = (tiles.expert, tiles.rows, tiles.used, tiles.pairs)
    hidden = _gate_up(rows, *common, gate_up_bias, *gate_up, sizes=first)
    out = _down(hidden, *common, tiles.place, weights, down_bias, *down, sizes=second)
    if not second.few:
        return triton.gather(out, tiles.place, weights)
    return out if split else out.sum(0).astype(x.dtype)
