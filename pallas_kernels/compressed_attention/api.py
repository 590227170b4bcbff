"""compressed_attention: attention of tokens to a window and to compressed entries of their rows."""

from __future__ import annotations

import jax

from pallas_kernels.compressed_attention import cases, launch, ref, xla
from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.compressed_attention.triton", "compressed_attention")

OP = KernelOp(
    name="compressed_attention",
    ref=ref.compressed_attention,
    impls=(
        Impl(
            "triton",
            _triton,
            platforms=("gpu",),
            supports=launch.supports,
            workspace=launch.workspace,
        ),
        Impl("xla", xla.compressed_attention, workspace=xla.workspace),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3},
    feeds=((0, 0),),
)


def compressed_attention(
    args: CompressedAttentionArgs, impl: str | None = None
) -> jax.Array:  # [T, N, H]
    """Attention of each token to its last ``window`` entries, up to ``last``, and to those of
    ``far_pages`` that it ``reads``, in one softmax with the sinks (DeepSeek-V4, 2026).

    All heads share an entry, which is key and value. Decode rows and prompts are the same to it:
    each token has a row of both page tables. Pages and NaN are as in ``append_decode``; the tokens'
    own entries are in the pages. Tokens that read nothing yield zeros. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.
    """
    (tokens, heads, width), pages = args.q.shape, args.pages
    fits = pages.ndim == 3 and pages.shape[2] == width and args.sinks.shape == (heads,)
    if not fits or args.page_table.ndim != 2 or args.window < 1:
        raise ValueError(
            f"compressed_attention: queries {args.q.shape} do not fit pages {pages.shape}, "
            f"page_table {args.page_table.shape}, sinks {args.sinks.shape} and a window of "
            f"{args.window}"
        )
    if args.rows.shape != (tokens,) or args.last.shape != (tokens,):
        raise ValueError(
            f"compressed_attention: rows {args.rows.shape} and last {args.last.shape} must have an "
            f"entry for each of {tokens} tokens"
        )
    far, table, reads = args.far_pages, args.far_table, args.reads
    if far is None and table is None and reads is None:
        return dispatch(OP, (args,), {}, impl)
    if far is None or table is None or reads is None:
        raise ValueError(
            "compressed_attention: far_pages, far_table and reads must be given together"
        )
    fits = far.ndim == 3 and not width % far.shape[2] and table.ndim == 2
    if not fits or reads.shape[:1] != (tokens,) or (args.has_choice and args.pieces > 1):
        raise ValueError(
            f"compressed_attention: reads {reads.shape} and far_table {table.shape} do not fit "
            f"far_pages {far.shape}; entries are chosen whole, for each of {tokens} tokens"
        )
    return dispatch(OP, (args,), {}, impl)
