"""Which calls the Mosaic kernel of residual_norm supports.

Owns: ``supports``, ``result_shapes`` and the tiles of a row, which ``norm_gemm`` also uses.
"""

from __future__ import annotations

import jax

from pallas_kernels.lib.checks import not_hopper, unfit_norms
from pallas_kernels.residual_norm.ref import NormArgs

DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 256  # of a decode step; steps with prompts have more, and their kernels are not linked
COLUMNS = 64  # components of a tile
TILES = 8  # tiles that a warpgroup loads at once: four components a thread
MAX_WIDTH = 4096  # components; a wider row with four partials would spill registers
MAX_PARTIAL_COMPONENTS = 4 * MAX_WIDTH  # components of all partials of a token


def supports(args: NormArgs) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    x = args.x
    if str(x.dtype) not in DTYPES:
        return f"tokens are {x.dtype}, not one of {', '.join(DTYPES)}"
    if reason := unfit_norms(x, args.weights):
        return reason
    if args.partials is None or args.partials.size > MAX_PARTIAL_COMPONENTS * x.shape[0]:
        return f"there are no partials to add, or more than {MAX_PARTIAL_COMPONENTS} components"
    tokens, width = x.shape
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} tokens are not between 1 and {MAX_TOKENS}"
    if width % (TILES * COLUMNS) or width > MAX_WIDTH:
        return f"{width} components are not a multiple of {TILES * COLUMNS} up to {MAX_WIDTH}"
    return not_hopper()


def result_shapes(args: NormArgs) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the results of a call."""
    result = jax.ShapeDtypeStruct(args.x.shape, args.x.dtype)
    return result, result
