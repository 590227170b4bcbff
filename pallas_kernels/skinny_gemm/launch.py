"""Which calls the Mosaic kernel of skinny_gemm takes, and how it tiles them.

A launch is a tuned choice, else that of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.checks import not_hopper
from pallas_kernels.device import current_device
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase, Sizes, sizes_of

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
# 256 is the widest product of the matrix units; with swiglu two sums leave too few registers.
MOST_TOKENS_SWIGLU, MOST_TOKENS = 64, 256
TOKENS = 8  # that they take at a time; fewer are padded in shared memory
COLUMNS = 64  # of weights that they take at a time, and inner components that lie side by side
SHARED_BYTES = 224 << 10  # of a multiprocessor, less what barriers take
STEP_BYTES = 32768  # of weights and tokens
FEW_TOKENS = 16
FEW_TOKENS_BYTES = 96 << 10  # of weights on their way; more were no faster on an H200
BYTES = 112 << 10  # the same for more tokens
MOST_PARTS = 4  # each is written once and read once


@dataclass(frozen=True)
class Launch:
    """How a call is cut up.

    A program makes ``block_n`` columns of the result, with swiglu from as many gates and as many
    ups, in steps of ``block_k`` inner components. ``stages`` steps are on their way at once: 2 or
    more, as the room of one is free only when the next has begun. ``warpgroups`` share the work: by
    columns if there are enough, else by tokens. ``parts`` programs share the inner axis.
    """

    block_n: int
    block_k: int
    stages: int
    warpgroups: int = 1
    parts: int = 1

    def cuts_up(self, sizes: Sizes) -> bool:
        """Whether the kernel can run such a call so, room aside."""
        steps, rest = divmod(sizes.inner, self.block_k)
        whole = rest == 0 and sizes.outer % self.block_n == 0
        tokens, columns = max(sizes.tokens, TOKENS) // TOKENS, self.block_n // COLUMNS
        shared = columns % self.warpgroups == 0 or tokens % self.warpgroups == 0
        parts = 1 <= self.parts <= (steps if sizes.split else 1)
        return whole and shared and parts and self.stages >= 2


def supports(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool,
    split: bool,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    sizes = sizes_of(x, w, swiglu=swiglu, split=split)
    if sizes.dtype not in DTYPES or w.dtype != x.dtype:
        return f"tokens are {x.dtype} and weights {w.dtype}, not both of 16 bits and alike"
    if not 1 <= sizes.tokens <= (most := _most_tokens(sizes)):
        return f"{sizes.tokens} tokens are not between 1 and {most}"
    if sizes.tokens > TOKENS and sizes.tokens % (2 * TOKENS):  # two warpgroups may share them
        return f"{sizes.tokens} tokens are not a multiple of {2 * TOKENS}"
    if sizes.inner % COLUMNS or sizes.outer % COLUMNS:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {COLUMNS}"
    return not_hopper()


def results(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool,
    split: bool,
) -> jax.ShapeDtypeStruct:
    """What a call returns, as a shape."""
    sizes = sizes_of(x, w, swiglu=swiglu, split=split)
    return result_of(choose(sizes), sizes)


def result_of(choice: Launch, sizes: Sizes) -> jax.ShapeDtypeStruct:
    """What a call cut up like this returns: [T, O], or float32[S, T, O]."""
    shape = (sizes.tokens, sizes.outer)
    if choice.parts == 1:
        return jax.ShapeDtypeStruct(shape, sizes.dtype)
    return jax.ShapeDtypeStruct((choice.parts, *shape), jnp.float32)


def _most_tokens(sizes: Sizes) -> int:
    return MOST_TOKENS_SWIGLU if sizes.swiglu else MOST_TOKENS


def parts_for(sizes: Sizes) -> int:
    """As many as give each multiprocessor a program, where parts are asked for."""
    if not sizes.split:
        return 1
    most = min(MOST_PARTS, sizes.inner // COLUMNS)
    return max(1, min(current_device().multiprocessors // (sizes.outer // COLUMNS), most))


def by_rule(sizes: Sizes) -> Launch:
    """One wave of programs, each with enough bytes on their way. Timed on an H200 with Qwen3-4B.

    More programs than multiprocessors are small enough for two to fit into one: those that share
    one have twice the bytes on their way there, hence twice the bandwidth, and all end together.
    """
    parts = parts_for(sizes)
    together = 2 if sizes.outer // COLUMNS * parts > current_device().multiprocessors else 1
    weights = (1 + sizes.swiglu) * COLUMNS * ITEM_BYTES  # of an inner component
    both = weights + max(sizes.tokens, TOKENS) * ITEM_BYTES
    few = sizes.tokens <= FEW_TOKENS
    widest = 2 * COLUMNS if few else STEP_BYTES // both // together
    block_k = _block_k(sizes.inner // parts, sizes.inner, min(widest, 2 * COLUMNS))
    room = SHARED_BYTES // together // (block_k * both)
    wanted = (FEW_TOKENS_BYTES if few else BYTES) // (block_k * weights)
    warpgroups = 2 if sizes.tokens >= 2 * COLUMNS else 1
    return Launch(COLUMNS, block_k, min(room, wanted), warpgroups, parts)


def _block_k(span: int, inner: int, widest: int) -> int:
    """The most inner components of a step: a divisor of all of them, by rows of ``COLUMNS``."""
    most = min(span, max(widest, COLUMNS)) // COLUMNS
    return COLUMNS * max(n for n in range(1, most + 1) if inner // COLUMNS % n == 0)


def _alike(sizes: Sizes) -> Sizes:
    """The sizes that stand for all whose tokens take the same room."""
    return sizes._replace(tokens=max(sizes.tokens, TOKENS))


def shapes_of(case: GemmCase) -> Sizes:
    """What ``choose`` knows of a case's call."""
    return _alike(case.sizes)


def choose(sizes: Sizes) -> Launch:
    """The tuned choice for a call of these sizes on this device, else that of the rule."""
    choice = tuned.lookup("skinny_gemm", CASES, shapes_of, _alike(sizes))
    return Launch(**choice) if choice else by_rule(sizes)
