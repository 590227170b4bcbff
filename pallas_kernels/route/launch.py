"""Which calls the Triton kernel of route supports."""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.route.routing import Routing

MAX_EXPERTS = 1024  # one CTA holds the scores of a token in registers


def supports(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [E, D]
    bias: jax.Array | None,  # [E]
    choice_bias: jax.Array | None,  # float32[E]
    is_token: jax.Array | None,  # bool[T]
    *,
    routing: Routing,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None. Imports no Triton."""
    del bias, choice_bias, is_token, routing
    if len(w) > MAX_EXPERTS:
        return f"{len(w)} experts are more than {MAX_EXPERTS}"
    if not x.size:
        return "there are no tokens"
    return unfit_for_triton(x, x)
