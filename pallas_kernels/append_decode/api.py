"""append_decode: a decode layer from its QKV GEMM to its output GEMM, in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from pallas_kernels.append_decode import cases, launch, mosaic_launch, ref, xla
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_paged
from pallas_kernels.lib.page_scales import check_scales
from pallas_kernels.native import attention
from pallas_kernels.paged_prefill.fixed import launch as fixed_launch

_triton = imported_when_called("pallas_kernels.append_decode.triton", "append_decode")
_triton_fixed = imported_when_called("pallas_kernels.append_decode.fixed", "append_decode")
_mosaic = imported_when_called(
    "pallas_kernels.append_decode.mosaic", "append_decode", mosaic_launch.result_shapes
)


def _mosaic_without_arrivals(args: DecodeArgs) -> Any:
    """The Mosaic kernel without ``arrivals``, which it does not need: a call with a Ref would be
    lowered again for every layer.
    """
    return _mosaic(replace(args, arrivals=None))


OP = KernelOp(
    name="append_decode",
    ref=ref.append_decode,
    impls=(
        Impl(
            "mosaic",
            _mosaic_without_arrivals,
            platforms=("gpu",),
            supports=mosaic_launch.supports,
        ),
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl(
            "native",
            attention.append_decode,
            platforms=("cpu",),
            supports=attention.append_decode_supports,
        ),
        Impl("xla", xla.append_decode),
        Impl("triton_fixed", _triton_fixed, ("gpu",), fixed_launch.supports),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # Of attention and of appended keys, which are rounded after the norm and after the rotation.
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3, "float8_e4m3fn": 1.0},
    observable=cases.observable,
    donate=(4, 5, 10, 11),
    feeds=((4, 1), (5, 2), (10, 3), (11, 4)),
    refs=(8,),
)


def append_decode(
    args: DecodeArgs, impl: str | None = None
) -> tuple[jax.Array, ...]:  # [B, N, H] and the pools
    """Attention of each row's newest token, and the pools with that token in them.

    The same as ``qk_rope_append`` (``kv_append`` where ``cos`` and ``sin`` are None) at the last
    slot of each row's context, then ``attend_ref.attend``. Rows of length 0 are padding and yield
    zeros; page 0 may be written for them. Without ``appends`` the tokens are in the pages, which
    stay as they are. In place when the caller donates the pools. A row's bits do not depend on the
    other rows. With ``xla`` and "triton_fixed" they do not depend on the number of rows either; the
    other GPU kernels use more splits with fewer rows. ``impl`` pins an implementation. Raises
    ValueError on arguments that do not fit together.

    The online softmax is that of FlashAttention-2 (Dao, 2023, arXiv:2307.08691), paging that of
    PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
    """
    num_kv_heads, head_dim = args.k_pages.shape[2:]
    rows, qkv = args.seq_lens.shape[0], args.qkv
    if qkv.ndim != 3 or qkv.shape[0] != rows or args.queries.shape[1] < 1:
        raise ValueError(f"append_decode: heads {qkv.shape} do not fit pages {args.k_pages.shape}")
    context = args.page_table, args.seq_lens, args.window, args.sinks, args.slopes
    context = (*context, args.sink_values)
    check_paged("append_decode", args.queries, args.k_pages, args.v_pages, *context)
    check_scales("append_decode", args)
    cos, sin, qk_norms, arrivals = args.cos, args.sin, args.qk_norms, args.arrivals
    if not args.appends and args.values != "projected":
        raise ValueError(f"append_decode: without appends there are no values to be {args.values}")
    if (cos is None) != (sin is None):
        raise ValueError("append_decode: cos and sin come together or not at all")
    if cos is not None and sin is not None and not cos.shape == sin.shape == (rows, head_dim // 2):
        raise ValueError(
            f"append_decode: cos {cos.shape} and sin {sin.shape} do not fit {rows} rows of "
            f"head_dim {head_dim}"
        )
    normed = ("one", "two")[args.appends]  # queries, and keys
    if qk_norms is not None and (cos is None or qk_norms.shape != (1 + args.appends, head_dim)):
        raise ValueError(
            f"append_decode: qk_norms {qk_norms.shape} must be {normed} of head_dim {head_dim}, "
            "with cos and sin"
        )
    if arrivals is not None and arrivals.shape[0] < rows * num_kv_heads:
        raise ValueError(
            f"append_decode: arrivals {arrivals.shape} are fewer than {rows} rows times "
            f"{num_kv_heads} kv heads"
        )
    return dispatch(OP, (args,), {}, impl)
