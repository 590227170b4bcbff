"""qk_rope_append: norm and rotate queries and keys, write keys and values into their pages."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.page_scales import check_scales
from pallas_kernels.lib.shapes import comparable
from pallas_kernels.native import attention
from pallas_kernels.qk_rope_append import cases, launch, ref, xla
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs

_triton = imported_when_called("pallas_kernels.qk_rope_append.triton", "qk_rope_append")
_triton_fixed = imported_when_called("pallas_kernels.qk_rope_append.triton", "qk_rope_append_fixed")

OP = KernelOp(
    name="qk_rope_append",
    ref=ref.qk_rope_append,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl(
            "native",
            attention.qk_rope_append,
            platforms=("cpu",),
            supports=attention.rope_append_supports,
        ),
        Impl("xla", xla.qk_rope_append),
        Impl("triton_fixed", _triton_fixed, platforms=("gpu",), supports=launch.supports),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # Heads are rounded after the norm and after the rotation; each rounding may differ by one step.
    tolerance={"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3, "float8_e4m3fn": 1.0},
    observable=lambda outputs: comparable(outputs[0], outputs[1:]),
    donate=(4, 5, 7, 8),
    feeds=((4, 1), (5, 2), (7, 3), (8, 4)),
)


def qk_rope_append(
    args: RopeAppendArgs, impl: str | None = None
) -> tuple[jax.Array, ...]:  # [T, N, H] and the pools
    """Queries ready for attention, and the pools with the step's keys and values.

    ``qkv`` holds a token's heads: N of queries, K of keys, K of values; ``values`` may change
    these, or make values of the keys. Queries and keys are
    normalised over H by their root mean square (``qk_norms``: weights of queries, of keys; None
    no norm; ``eps`` under the root), then components i and i + H/2 are rotated by the token's
    angles. Keys and values go to the slots of ``slot_mapping``, as in ``kv_append``, and
    take the pools' dtype, with scales of 8-bit pages. In place when the caller donates the pools.
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.

    Rotary embedding: Su et al., 2021 (arXiv:2104.09864); RMS norm: Zhang and Sennrich, 2019.
    """
    qkv, cos, sin, slots = args.qkv, args.cos, args.sin, args.slot_mapping
    k_pages, v_pages = args.k_pages, args.v_pages
    num_kv_heads, head_dim = k_pages.shape[2:]
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"qk_rope_append: k_pages {k_pages.shape} and v_pages {v_pages.shape} differ"
        )
    if qkv.ndim != 3 or args.num_heads < 1 or qkv.shape[2] != head_dim:
        raise ValueError(f"qk_rope_append: heads {qkv.shape} do not fit pages {k_pages.shape}")
    tokens = qkv.shape[0]
    if not cos.shape == sin.shape == (tokens, head_dim // 2) or slots.shape != (tokens,):
        raise ValueError(
            f"qk_rope_append: cos {cos.shape}, sin {sin.shape} and slot_mapping {slots.shape} do "
            f"not fit {tokens} tokens of head_dim {head_dim}"
        )
    if args.qk_norms is not None and args.qk_norms.shape != (2, head_dim):
        raise ValueError(
            f"qk_rope_append: qk_norms {args.qk_norms.shape} are not two of head_dim {head_dim}"
        )
    check_scales("qk_rope_append", args)
    return dispatch(OP, (args,), {}, impl)
