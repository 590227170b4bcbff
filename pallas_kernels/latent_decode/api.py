"""latent_decode: attention of decode rows over latents, which are keys and values of all heads."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.latent_decode import cases, launch, ref, xla
from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.lib.latent_pages import check_pools
from pallas_kernels.native import latents

_triton = imported_when_called("pallas_kernels.latent_decode.triton", "latent_decode")

OP = KernelOp(
    name="latent_decode",
    ref=ref.latent_decode,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("native", latents.latent_decode, platforms=("cpu",), supports=latents.supports),
        Impl("xla", xla.latent_decode),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3, "float8_e4m3fn": 0.1},
    observable=cases.observable,
    donate=(3, 6, 7),
    feeds=((0, 0), (3, 1), (6, 2), (7, 3)),
)


def latent_decode(args: LatentDecodeArgs, impl: str | None = None) -> tuple[jax.Array, ...]:
    """The weighted sums of latents [B, N, C] for each row's newest token, and the pools with it.

    Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024, arXiv:2405.04434): an entry
    is a token's latent (C) and its rotated key (R), and ``q_latent`` are queries multiplied by the
    weights that expand latents to keys. Head n's score of a token is (q_latent[n] . latent +
    q_rope[n] . key) * ``scale``. The caller expands the result to values.

    Row b's ``entries[b]`` is the last of its ``seq_lens[b]`` tokens and is appended to its pages.
    Rows of length 0 are padding and yield zeros; page 0 may be written for them. Pages, NaN and
    dtypes are as in ``append_decode``, 8-bit pages as in ``lib.latent_pages``. In place when the
    caller donates the pools. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.
    """
    (rows, heads, rank), pages = args.q_latent.shape, args.pages
    check_pools("latent_decode", args, args.entries, args.page_table, args.seq_lens)
    num_lens, rope = args.seq_lens.shape[0], args.entries.shape[1] - rank
    if args.q_rope.shape != (rows, heads, rope) or num_lens != rows:
        raise ValueError(
            f"latent_decode: queries {args.q_latent.shape} and {args.q_rope.shape} do not fit "
            f"pages {pages.shape} and {num_lens} rows"
        )
    return dispatch(OP, (args,), {}, impl)
