"""kv_append: write a step's keys and values into their pages."""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.kv_append import cases, ref, xla
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.kv_append.triton", "kv_append")


def _triton_supports(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> str | None:
    del v, v_pages, slot_mapping
    return unfit_for_triton(k, k_pages)


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
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    observable=lambda pools: tuple(pages[1:] for pages in pools),
    donate=(2, 3),
    feeds=((2, 0), (3, 1)),
)


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
    *,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The pools with token t's K and V at slot ``slot_mapping[t]`` = page * page_size + offset.

    Padding tokens have a slot of page 0, the sink, which is never read; no other slot may occur
    twice. In place when the caller donates the pools. Values take the pools' dtype.
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.
    """
    if k.shape != v.shape or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"kv_append: K and V differ in shape: {k.shape} and {v.shape}, "
            f"pages {k_pages.shape} and {v_pages.shape}"
        )
    if k.shape[1:] != k_pages.shape[2:] or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"kv_append: tokens {k.shape} and slot_mapping {slot_mapping.shape} "
            f"do not fit pages {k_pages.shape}"
        )
    return dispatch(OP, (k, v, k_pages, v_pages, slot_mapping), {}, impl)
