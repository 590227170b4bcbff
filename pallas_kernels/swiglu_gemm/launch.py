"""Which calls the Mosaic kernel of swiglu_gemm takes, and how it cuts them up.

Owns: ``supports``, ``results``, ``Launch``, ``choose`` (a tuned choice, else a rule). Must not
know: the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import jax

from pallas_kernels import tuned
from pallas_kernels.checks import not_hopper
from pallas_kernels.device import current_device
from pallas_kernels.swiglu_gemm.cases import CASES, SwigluCase

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
FEWEST_TOKENS = 128  # a tile's; at 128 and 256 as fast as XLA's product and pass, and linked
LANES, FEWEST_LANES = 64, 32  # values that lie side by side in shared memory
TOKENS = 8  # that TMA copies at a time
ROWS = 64  # of tokens that the matrix units take at once
WIDEST = 256  # columns of weights that they take at once
WORKERS = 2  # warpgroups that multiply: each half of a tile's tokens
MOST_SUMS = 128 * 320  # float32 of a tile: 160 of a worker's 232 registers
SHARED_BYTES = 225 << 10  # of a multiprocessor, less what barriers take
LARGE_LEAD, SMALL_LEAD = 1, 2  # steps; without a lead 2 % slower on an H200


class Sizes(NamedTuple):
    """What a choice may depend on: [T, I] @ [I, 2 * O]."""

    tokens: int
    inner: int
    outer: int


@dataclass(frozen=True)
class Launch:
    """How a call is cut up.

    A program makes tiles of ``block_t`` tokens and ``block_n`` columns, from as many gates and as
    many ups, in steps of ``block_k`` inner components, of which ``stages`` are on their way at
    once. ``cluster`` programs, 1 or 2, take neighbouring tokens and load the weights together.
    Tiles that are made at the same time lie side by side: ``group`` of them along the tokens. The
    first worker is ``lead`` steps ahead, so that it makes its results while the second multiplies.
    """

    block_t: int
    block_n: int
    block_k: int
    stages: int
    cluster: int
    group: int
    lead: int = 0

    @property
    def lanes(self) -> int:
        """Values that lie side by side in shared memory."""
        return math.gcd(self.block_n, LANES)

    @property
    def shared_bytes(self) -> int:
        """What a program holds of tokens, weights and results."""
        step = (self.block_t + 2 * self.block_n) * self.block_k
        return (self.stages * step + self.block_t * self.block_n) * ITEM_BYTES

    def cuts_up(self, sizes: Sizes) -> bool:
        """Whether the kernel can run such a call so."""
        whole = sizes.inner % self.block_k == 0
        blocks = self.lanes >= FEWEST_LANES and self.block_k % self.lanes == 0
        rows = self.block_t % (ROWS * WORKERS) == 0
        sums = self.block_t * 2 * self.block_n <= MOST_SUMS
        room = self.shared_bytes <= SHARED_BYTES and self.stages >= 2
        # The first worker must not be a whole tile ahead: the second would miss its signal.
        lead = not self.lead or self.lead < self.stages <= sizes.inner // self.block_k
        return whole and blocks and rows and sums and room and lead and self.cluster in (1, 2)


def sizes_of(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> Sizes:
    """Of a call."""
    tokens, inner = x.shape
    return Sizes(tokens, inner, w.shape[1] // 2)


def supports(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    sizes = sizes_of(x, w)
    if str(x.dtype) not in DTYPES or w.dtype != x.dtype:
        return f"tokens are {x.dtype} and weights {w.dtype}, not both of 16 bits and alike"
    if sizes.tokens < FEWEST_TOKENS:
        return f"{sizes.tokens} tokens are below {FEWEST_TOKENS}"
    if sizes.tokens % TOKENS:
        return f"{sizes.tokens} tokens are not a multiple of {TOKENS}"
    if sizes.inner % LANES or sizes.outer % LANES:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {LANES}"
    return not_hopper()


def results(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> jax.ShapeDtypeStruct:
    """What a call returns, as a shape."""
    sizes = sizes_of(x, w)
    return jax.ShapeDtypeStruct((sizes.tokens, sizes.outer), x.dtype)


LARGE = Launch(128, 128, LANES, 4, 1, 1)
SMALL = Launch(128, 64, LANES, 6, 2, 1)
WIDE = Launch(128, 160, LANES // 2, 6, 2, 1)  # 256 tokens of Qwen3-4B: one turn of 122 programs
NARROW = Launch(128, 96, LANES, 5, 1, 1)  # 128 tokens of it: one turn of 102
# What a column takes, relative. Timed on an H200: large tiles in pairs are 1 % behind lone ones,
# small lone ones 20 % behind pairs. A turn of wide ones takes a step of 256 rows 49.8 us, of small
# ones 17.8: 32 lanes are more lines to ask for than 64, and 16 took twice as long.
COSTS = MappingProxyType({LARGE: 1.0, SMALL: 1.04, WIDE: 1.15, NARROW: 1.25})


def by_rule(sizes: Sizes) -> Launch:
    """The tiles that are done first.

    All programs begin their last turn together, so that what counts is the number of turns.
    """
    fit = [launch for launch in COSTS if launch.cuts_up(sizes)]
    best = min(fit, key=lambda launch: _turns(launch, sizes) * launch.block_n * COSTS[launch])
    leads = _turns(best, sizes) > 1 and sizes.inner // best.block_k >= best.stages
    lead = SMALL_LEAD if best is SMALL else LARGE_LEAD
    return replace(best, group=_group(best), lead=lead if leads else 0)


def _turns(launch: Launch, sizes: Sizes) -> int:
    along = -(-sizes.tokens // (launch.block_t * launch.cluster))
    tiles = along * -(-sizes.outer // launch.block_n)
    return -(-tiles // (current_device().multiprocessors // launch.cluster))


def _group(launch: Launch) -> int:
    """So many that all tiles of a turn read about as many tokens as columns of weights."""
    tiles = current_device().multiprocessors // launch.cluster
    square = tiles * 2 * launch.block_n / (launch.block_t * launch.cluster)
    return 2 ** round(math.log2(square) / 2)


def shapes_of(case: SwigluCase) -> Sizes:
    """What ``choose`` knows of a case's call."""
    return Sizes(case.tokens, case.inner, case.outer)


def choose(sizes: Sizes) -> Launch:
    """The tuned choice for a call of these sizes on this device, else that of the rule."""
    choice = tuned.lookup("swiglu_gemm", CASES, shapes_of, sizes)
    return Launch(**choice) if choice else by_rule(sizes)
