"""Which calls the Hopper kernels of experts support, their tile sizes, and the tiles of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.experts.stack import Activation

TILE = 64  # M of a wgmma, and the inputs of a swizzled tile
MMA_TOKENS = 8  # multiple of N of a wgmma
ITEM_BYTES = 2
SMEM_BYTES = 224 << 10  # of an SM, without barriers
FEW_TOKENS = 64  # at most so many are multiplied by ``decode``
ALL_TOKENS = 64  # at most so many are all multiplied by every expert in use
MAX_STAGES = 8


class GemmSizes(NamedTuple):
    """The sizes of one of the two GEMMs."""

    experts: int
    inner: int  # K
    outer: int  # O, of each half
    halves: int  # 2: gate and up; 1: down
    tokens: int  # T
    chosen: int  # k
    tiles: int  # N
    width: int  # rows of a tile
    all_tokens: bool  # of gate_up: x are the tokens, not sorted rows
    activation: Activation | None  # of gate_up
    dtype: str

    @property
    def pairs(self) -> int:
        """Tokens with one of their choices each."""
        return self.tokens * self.chosen

    @property
    def columns(self) -> int:
        """Tokens that are multiplied at once."""
        return -(-self.tokens // MMA_TOKENS) * MMA_TOKENS if self.all_tokens else self.width

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Of ``decode``: hidden values in rows of tiles, or weighted outputs of each choice."""
        if self.halves == 2:
            return jax.ShapeDtypeStruct((self.tiles * self.width, self.outer), self.dtype)
        return jax.ShapeDtypeStruct((self.chosen, self.tokens, self.outer), jnp.float32)


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of ``decode``: a CTA computes ``block_n`` outputs (of gate_up as many gates and
    ups), 64 in each of the compute ``warpgroups``, in K steps of ``block_k`` inputs, of which
    ``stages`` are in flight.
    """

    block_k: int
    stages: int
    warpgroups: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a CTA's item."""
        return TILE * self.warpgroups

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        divides = sizes.inner % self.block_k == 0 and sizes.outer % self.block_n == 0
        return divides and self.block_k % TILE == 0 and self.stages >= 2


def decode_config(sizes: GemmSizes) -> DecodeConfig:
    """One wide step is a few large copies; as many of them as shared memory holds."""
    warpgroups = 2 if sizes.columns > 32 and sizes.outer % (2 * TILE) == 0 else 1
    most = 3 if warpgroups == 1 else 2
    steps = sizes.inner // TILE
    block_k = TILE * max(n for n in range(1, most + 1) if steps % n == 0)
    step_bytes = (sizes.halves * TILE * warpgroups + sizes.columns) * block_k * ITEM_BYTES
    return DecodeConfig(block_k, max(2, min(SMEM_BYTES // step_bytes, MAX_STAGES)), warpgroups)
