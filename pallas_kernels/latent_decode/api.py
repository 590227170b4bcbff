"""latent_decode: attention of decode rows over latents, which are keys and values of all heads."""

from __future__ import annotations

import jax

from pallas_kernels.checks import check_latent
from pallas_kernels.latent_decode import cases, launch, ref, xla
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.latent_decode.triton", "latent_decode")

OP = KernelOp(
    name="latent_decode",
    ref=ref.latent_decode,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.latent_decode),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3},
    observable=cases.observable,
    donate=(3,),
    feeds=((0, 0), (3, 1)),
)


def latent_decode(
    q_latent: jax.Array,  # [B, N, C]
    q_rope: jax.Array,  # [B, N, R]
    entries: jax.Array,  # [B, C + R]
    pages: jax.Array,  # [P, S, C + R]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of latents [B, N, C] for each row's newest token, and the pool with it.

    Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024, arXiv:2405.04434): an entry
    is a token's latent (C) and its rotated key (R), and ``q_latent`` are queries multiplied by the
    weights that expand latents to keys. Head n's score of a token is (q_latent[n] . latent +
    q_rope[n] . key) * ``scale``. The caller expands the result to values.

    Row b's ``entries[b]`` is the last of its ``seq_lens[b]`` tokens and is appended to its pages.
    Rows of length 0 are padding and yield zeros; page 0 may be written for them. Pages, NaN and
    dtypes are as in ``append_decode``. In place when the caller donates the pool. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.
    """
    rows, heads, rank = q_latent.shape
    check_latent("latent_decode", entries, pages, page_table, seq_lens)
    if q_rope.shape != (rows, heads, pages.shape[2] - rank) or seq_lens.shape[0] != rows:
        raise ValueError(
            f"latent_decode: queries {q_latent.shape} and {q_rope.shape} do not fit pages "
            f"{pages.shape} and {seq_lens.shape[0]} rows"
        )
    args = (q_latent, q_rope, entries, pages, page_table, seq_lens)
    return dispatch(OP, args, {"scale": scale}, impl)
