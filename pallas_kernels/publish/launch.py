"""Which calls the Triton kernel of publish takes.

Needs no Triton, so that a machine without it can ask.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import without_triton


def supports(
    tokens: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del place
    return without_triton() if tokens.size else "there are no rows"
