"""kv_append: write a step's keys and values into their pages."""

from __future__ import annotations

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.kv_append import cases, ref, xla
from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.page_scales import Pools, check_scales
from pallas_kernels.lib.shapes import as_floats

_triton = imported_when_called("pallas_kernels.kv_append.triton", "kv_append")


def _triton_supports(args: KvAppendArgs) -> str | None:
    return unfit_for_triton(args.k, args.k_pages)


OP = KernelOp(
    name="kv_append",
    ref=ref.kv_append,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=_triton_supports),
        Impl("xla", xla.kv_append),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0, "float8_e4m3fn": 0.0},
    observable=lambda pools: tuple(as_floats(pages)[1:] for pages in pools),
    donate=(2, 3, 5, 6),
    feeds=((2, 0), (3, 1), (5, 2), (6, 3)),
)


def kv_append(args: KvAppendArgs, impl: str | None = None) -> Pools:
    """The pools with token t's K and V at slot ``slot_mapping[t]`` = page * page_size + offset.

    Padding tokens have a slot of page 0, the sink, which is never read; no other slot may occur
    twice. In place when the caller donates the pools. Values take the pools' dtype; pages of 8
    bits have scales, which are the last two results (``lib.page_scales``).
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.
    """
    if args.k.shape != args.v.shape or args.k_pages.shape != args.v_pages.shape:
        raise ValueError(
            f"kv_append: K and V differ in shape: {args.k.shape} and {args.v.shape}, "
            f"pages {args.k_pages.shape} and {args.v_pages.shape}"
        )
    if args.k.shape[1:] != args.k_pages.shape[2:] or args.slot_mapping.shape != args.k.shape[:1]:
        raise ValueError(
            f"kv_append: tokens {args.k.shape} and slot_mapping {args.slot_mapping.shape} "
            f"do not fit pages {args.k_pages.shape}"
        )
    check_scales("kv_append", args)
    return dispatch(OP, (args,), {}, impl)
