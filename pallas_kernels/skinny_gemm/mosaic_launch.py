"""Which calls the Mosaic kernel of skinny_gemm takes, and how it cuts them up.

Owns: ``supports``, ``Launch``, ``choose``, ``parts_for``. Must not know: the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels.checks import not_hopper
from pallas_kernels.skinny_gemm.sizes import Sizes, sizes_of

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
MOST_TOKENS = 256  # the widest product of the matrix units
TOKENS = 8  # that they take at a time; fewer are padded in shared memory
COLUMNS = 64  # of weights that they take at a time, and inner components that lie side by side
STAGE_BYTES = 32768  # of weights
SHARED_BYTES = 224 << 10  # of a multiprocessor, less what barriers take
MOST_STAGES = 12
MULTIPROCESSORS = 132  # of an H100 or H200
MOST_PARTS = 4  # each is written once and read once


@dataclass(frozen=True)
class Launch:
    """How a call is cut up.

    A program makes ``block_n`` columns of the result, with swiglu from as many gates and as many
    ups, in steps of ``block_k`` inner components. ``stages`` steps are on their way at once: 2 or
    more, as the room of one is free only when the next has begun. ``warpgroups`` share the work: by
    columns if there are enough, else by tokens. ``cluster`` programs side by side read the tokens
    once for all. ``ahead``: weights are asked for before the kernel launched before this one has
    ended, which must not be the one that writes them.
    """

    block_n: int
    block_k: int
    stages: int
    warpgroups: int = 1
    cluster: int = 1
    ahead: bool = False


def supports(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None,  # [I]
    residual: jax.Array | None,  # [T, O]
    arrivals: jax.Ref | None,  # int32[>= ARRIVALS]
    *,
    eps: float,
    swiglu: bool,
    parts: int,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del arrivals, eps
    sizes = sizes_of(x, w, norm, swiglu)
    if sizes.dtype not in DTYPES or w.dtype != x.dtype:
        return f"tokens are {x.dtype} and weights {w.dtype}, not both of 16 bits and alike"
    if norm is not None or residual is not None:
        return "it neither normalises tokens nor adds a residual"
    if not 1 <= sizes.tokens <= MOST_TOKENS:
        return f"{sizes.tokens} tokens are not between 1 and {MOST_TOKENS}"
    if sizes.tokens > TOKENS and sizes.tokens % TOKENS:
        return f"{sizes.tokens} tokens are not a multiple of {TOKENS}"
    if sizes.inner % COLUMNS or sizes.outer % COLUMNS:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {COLUMNS}"
    if parts > sizes.inner // COLUMNS:
        return f"{sizes.inner} inner components are too few for {parts} parts"
    return not_hopper()


def parts_for(sizes: Sizes) -> int:
    """Parts that a product is best asked for in: as many as give each multiprocessor a program."""
    if sizes.swiglu:
        return 1
    most = min(MOST_PARTS, sizes.inner // COLUMNS)
    return max(1, min(MULTIPROCESSORS // (sizes.outer // COLUMNS), most))


def by_rule(sizes: Sizes, parts: int) -> Launch:
    """One wave of programs, each with as many bytes on their way as fit. Not yet timed.

    More programs than multiprocessors are small enough for two to fit into one: those that share
    one have twice the bytes on their way there, hence twice the bandwidth, and all end together.
    """
    tiles = sizes.outer // COLUMNS
    together = 2 if tiles * parts > MULTIPROCESSORS else 1
    weights = (1 + sizes.swiglu) * COLUMNS * ITEM_BYTES  # of an inner component
    tokens = max(sizes.tokens, TOKENS) * ITEM_BYTES
    widest = STAGE_BYTES // (weights + tokens) // together
    block_k = _block_k(sizes.inner // parts, sizes.inner, widest)
    stages = SHARED_BYTES // together // (block_k * (weights + tokens))
    # Tokens come from the second cache, which is not much faster than memory.
    wanted = 1 if tokens <= weights // 4 else 2 if tokens <= weights else 4
    return Launch(
        COLUMNS,
        block_k,
        stages=min(stages, MOST_STAGES),
        warpgroups=2 if sizes.tokens >= 2 * COLUMNS else 1,
        cluster=max(n for n in (1, 2, 4) if n <= wanted and tiles % n == 0),
    )


def _block_k(span: int, inner: int, widest: int) -> int:
    """The most inner components of a step: a divisor of all of them, by rows of ``COLUMNS``."""
    most = min(span, max(widest, COLUMNS)) // COLUMNS
    return COLUMNS * max(n for n in range(1, most + 1) if inner // COLUMNS % n == 0)


def choose(sizes: Sizes, parts: int) -> Launch:
    """The rule's choice: nothing is tuned yet."""
    return by_rule(sizes, parts)
