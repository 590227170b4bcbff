"""Which calls the Mosaic kernel of residual_norm takes.

Owns: ``supports``, ``results`` and how a row is cut up, for ``norm_gemm``, too.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import not_hopper

DTYPES = ("bfloat16", "float16")
MOST_TOKENS = 256  # of a step that decodes; what has more are prompts, whose kernels are not linked
COLUMNS = 64  # components that lie side by side, a tile
TILES = 8  # four components of each thread, that a warpgroup reads at once
WIDEST = 4096  # components: more, and four parts of them, are more than the registers of a thread
MOST_PARTS = 4


def supports(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del row, eps
    if str(x.dtype) not in DTYPES or weights.dtype != x.dtype:
        return f"tokens are {x.dtype} and weights {weights.dtype}, not both of 16 bits and alike"
    if parts is None or parts.size > MOST_PARTS * x.size:
        return f"there are no parts to add, or more than {MOST_PARTS}"
    tokens, width = x.shape
    if not 1 <= tokens <= MOST_TOKENS:
        return f"{tokens} tokens are not between 1 and {MOST_TOKENS}"
    if width % (TILES * COLUMNS) or width > WIDEST:
        return f"{width} components are not a multiple of {TILES * COLUMNS} up to {WIDEST}"
    return not_hopper()


def results(
    x: jax.Array,  # [T, D]
    parts: jax.Array,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a call returns, as shapes."""
    del parts, weights, row, eps
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return whole, whole
