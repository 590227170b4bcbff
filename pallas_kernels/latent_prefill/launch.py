"""Which calls the Triton kernels of latent_prefill support."""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton


def supports(
    q: jax.Array,  # [T, N, D + R]
    entries: jax.Array,  # [T, C + R]
    k_up: jax.Array,  # [N * D, C]
    v_up: jax.Array,  # [N * V, C]
    pages: jax.Array,  # [P, S, C + R]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
) -> str | None:
    """Why the Triton kernels cannot run the call, or None."""
    return unfit_for_triton(q, pages)
