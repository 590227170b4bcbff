"""experts in plain XLA: a loop over tiles of tokens that chose the same expert.

The number of tiles is an upper bound; for those without tokens nothing is read. Only the weights of
one expert are dequantised at a time. It has gradients: a tile is computed again for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import Stack, matrix_of, size_of
from pallas_kernels.experts.tiles import max_tiles, tiles_of
from pallas_kernels.lib.numerics import power_of_two

FEWEST_ROWS = 16  # of a tile, if there are as many tokens


def rows_of_tile(tokens: int, chosen: int, num_experts: int) -> int:
    """Rows of a tile: about as many as an expert has on average."""
    return min(tokens, max(FEWEST_ROWS, power_of_two(tokens * chosen // num_experts)))


def workspace_bytes(args: ExpertsArgs) -> int:
    """A bound on the bytes that ``experts`` allocates.

    In float32: outputs of all tiles, and of all pairs; of one tile inputs, gates, ups, hidden
    values and outputs; and the matrices of its expert.
    """
    (tokens, chosen), pairs = args.choices.shape, args.choices.size
    count, width, inner = size_of(args.down)
    rows = rows_of_tile(tokens, chosen, count)
    outputs = (max_tiles(pairs, count, rows) * rows + pairs) * width
    of_tile = rows * (3 * inner + 2 * width) + 3 * inner * width
    return 4 * (outputs + of_tile)


def experts(args: ExpertsArgs) -> jax.Array:  # [T, D]; the sum of partials costs little here
    """See ``experts.api``."""
    x, (tokens, per_token) = args.x, args.choices.shape
    num_experts, _, _ = size_of(args.gate_up)
    width = rows_of_tile(tokens, per_token, num_experts)
    tiles = tiles_of(args.choices, num_experts, width)
    # By default XLA rounds float32 to TF32 for the tensor cores of a GPU.
    precision = "highest" if x.dtype == jnp.float32 else None

    def product(rows: jax.Array, stack: Stack, bias: Any, expert: jax.Array) -> jax.Array:
        w = matrix_of(stack, expert).astype(x.dtype)
        y = jnp.matmul(rows, w.T, precision=precision, preferred_element_type=jnp.float32)
        if bias is None:
            return y
        own = jax.lax.dynamic_index_in_dim(bias, expert, keepdims=False)
        return y + own.astype(jnp.float32)

    def computed(expert: jax.Array, pairs: jax.Array) -> jax.Array:  # float32[width, D]
        rows = x[pairs // per_token]
        hidden = product(rows, args.gate_up, args.gate_up_bias, expert)
        hidden = args.activation.hidden(hidden).astype(x.dtype)
        return product(hidden, args.down, args.down_bias, expert)

    @jax.checkpoint
    def tile(expert: jax.Array, rows: jax.Array, pairs: jax.Array) -> jax.Array:
        def nothing(*_: jax.Array) -> jax.Array:  # made of ``rows``, which vary among devices
            return jnp.broadcast_to(0 * rows.astype(jnp.float32), (width, x.shape[1]))

        return jax.lax.cond(rows > 0, computed, nothing, expert, pairs)

    outputs = jax.lax.map(lambda one: tile(*one), (tiles.expert, tiles.rows, tiles.pairs))
    outputs = outputs.reshape(-1, x.shape[1]).at[tiles.place].get(mode="fill", fill_value=0.0)
    return jnp.sum(outputs * args.weights[..., None], axis=1).astype(x.dtype)
