"""Items of the persistent kernels of experts: a block of outputs of one tile of tokens each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.launch import GemmSizes
from pallas_kernels.experts.stack import Activation
from pallas_kernels.gemm.tiles import resident_ctas

type Ref = Any


@dataclass(frozen=True)
class Spec:
    """Compile-time constants of a kernel."""

    sizes: GemmSizes
    config: Any  # with the properties block_n, block_k and stages

    @property
    def num_steps(self) -> int:
        """K steps of an item."""
        return self.sizes.inner // self.config.block_k

    @property
    def blocks(self) -> int:
        """Items of a tile of tokens; outputs of the last one may be missing."""
        return -(-self.sizes.outer // self.config.block_n)

    @property
    def ctas(self) -> int:
        """Number of resident CTAs."""
        return resident_ctas(self.sizes.tiles * self.blocks)

    def num_items(self, used: Ref) -> jax.Array:
        """Number of items that the CTA computes; items are dealt out in turn."""
        others = used[0] * self.blocks - 1 - lax.axis_index("cta")
        return lax.div(others + self.ctas, jnp.int32(self.ctas))


class Gmem(NamedTuple):
    """Refs to arrays in global memory; None where a call has none."""

    x: Ref  # [T, K], or the rows of tiles: [N * width, K]
    expert: Ref  # int32[N]
    rows: Ref  # int32[N]
    used: Ref  # int32[1]: tiles in use
    pairs: Ref  # int32[N * width]
    place: Ref  # int32[T * k], of down
    weights: Ref  # float32[T * k], of down
    w: Ref  # [E, halves, O, K], or None: quantised
    bias: Ref  # [E, halves, O]
    out: Ref  # [N * width, O], or float32[k, T, O] of down


class Item(NamedTuple):
    """A CTA's item; int32 scalars."""

    tile: jax.Array
    first_output: jax.Array
    first_step: jax.Array  # among all K steps of the CTA


def load_bias(
    gmem: Gmem, item: Item, half: jax.Array | int, outputs: Any, axis: int
) -> jax.Array:  # float32
    """The biases of a slice of outputs; ``axis`` is the other one of the result."""
    ref = gmem.bias.at[gmem.expert[item.tile], half, outputs]
    layout = plgpu.Layout.WGMMA.reduce(axis)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def activated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``activation`` of values in registers."""
    if activation.limit is not None:
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.maximum(jnp.minimum(up, activation.limit), -activation.limit)
    if activation.shift:
        up = up + activation.shift
    # The square of a reciprocal root is cheaper than a division, which is several instructions.
    root = lax.rsqrt(1.0 + jnp.exp(-activation.alpha * gate))
    return gate * up * root * root
