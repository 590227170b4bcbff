"""Items of the persistent kernels of experts: a block of outputs of one tile of tokens each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.experts.launch import GemmSizes
from pallas_kernels.experts.stack import Activation
from pallas_kernels.gemm.epilogues import geglu, times_sigmoid
from pallas_kernels.gemm.pipeline import launch
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
    """Arrays in global memory, or refs to them; None where a call has none."""

    tiled: Any  # ``quantised_gemm.tiled.step.Gmem`` of quantised weights
    x: Ref  # [T, K], or the rows of tiles: [N * width, K]
    expert: Ref  # int32[N]
    used: Ref  # int32[1]: tiles in use
    rows: Ref = None  # int32[N], of few tokens
    pairs: Ref = None  # int32[N * width], of few tokens
    place: Ref = None  # int32[T * k], of down and few tokens
    weights: Ref = None  # float32[T * k], of down and few tokens
    bias: Ref = None  # [E, halves, O]
    w: Ref = None  # [E, halves, O, K]
    out: Ref = None  # [N * width, O], or of down and few tokens float32[k, T, O]


def launch_items(
    name: str, kernel: Callable[..., None], spec: Spec, gmem: Gmem, scratch: Any, warpgroups: int
) -> jax.Array:
    """Run a kernel of ``spec``, ``gmem`` and its scratch; returns the array ``out``."""
    sizes = spec.sizes
    return launch(
        f"experts_{'gate_up' if sizes.halves == 2 else 'down'}{name}",
        lambda refs, out, scratch: kernel(spec, refs._replace(out=out), scratch),
        gmem,
        out_type=sizes.result,
        scratch=scratch,
        grid={"cta": spec.ctas},
        warpgroups=warpgroups + 1,
    )


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
    if activation.kind == "gelu_tanh":
        return geglu(gate, up)
    if activation.limits is not None:
        of_gate, of_up = activation.limits
        gate = jnp.minimum(gate, of_gate)
        up = jnp.maximum(jnp.minimum(up, of_up), -of_up)
    if activation.shift:
        up = up + activation.shift
    return times_sigmoid(gate * up, activation.alpha * gate)
