"""Which calls the Triton kernel of publish takes.

Needs no Triton, so that a machine without it can ask. Must not know: the kernel.
"""

from __future__ import annotations

from importlib.util import find_spec

import jax

from pallas_kernels.checks import NOT_INSTALLED


def supports(
    tokens: jax.Array,  # int32[B]
    place: jax.Array,  # int32[3]
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del place
    if not tokens.size:
        return "there are no rows"
    return None if find_spec("jax_triton") and find_spec("triton") else NOT_INSTALLED
