"""Which calls the Triton kernel of route supports."""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.route.routing import Routing

MAX_EXPERTS = 1024  # one CTA holds the scores of a token in registers


def supports(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [D, E]
    bias: jax.Array | None,  # [E]
    choice_bias: jax.Array | None,  # float32[E]
    *,
    routing: Routing,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None. Imports no Triton."""
    del bias, choice_bias, routing
    if w.shape[1] > MAX_EXPERTS:
        return f"{w.shape[1]} experts are more than {MAX_EXPERTS}"
    if not x.size:
        return "there are no tokens"
    return unfit_for_triton(x, x)
