"""Runs the kernels with fixed bits in Triton's interpreter: ``python -m kit.triton_fixed NAME...``.

A process of its own, with TRITON_INTERPRET=1, as ``kit.triton_sweep``. Prints one JSON object: for
each check what differs in some bit, or from the definition.

Matmuls add in the order of the inner components here: numpy's may choose an order by the number of
rows, which tensor cores do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime.interpreter import TensorHandle

from kit import triton_shims
from pallas_kernels.append_decode.api import DecodeArgs, append_decode
from pallas_kernels.experts.api import ExpertsArgs, experts
from pallas_kernels.harness.pins import invariant_pins
from pallas_kernels.harness.registry import all_ops
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.numerics import logsumexp_last, sum_last
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill
from pallas_kernels.paged_prefill.fixed import launch as fixed_launch
from pallas_kernels.qk_rope_append.api import RopeAppendArgs, qk_rope_append
from pallas_kernels.residual_norm.api import NormArgs, residual_norm
from pallas_kernels.route.api import RouteArgs, route
from pallas_kernels.route.routing import Routing
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.swiglu_gemm.api import swiglu_gemm

PINS = invariant_pins("gpu")
COUNTS = (1, 2, 7, 16, 33, 64)
MOST = 70  # rows, more than those of the tiles for few
DTYPES = ("bfloat16", "float32")
PAGE, HEADS, KV_HEADS, DIM = 16, 6, 2, 16
PLANS = (
    ((70, 80), False),
    ((63, 1, 1, 64, 1, 20), False),
    ((17, 133), True),
    ((128, *[1] * 22), False),
)
FEW_PLANS = (((66, 1, 3), False), ((17, 53), True))
OPS = tuple(op.name for op in all_ops() if any(impl.name == "triton_fixed" for impl in op.impls))


def _dot_in_order(a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    left, right = (triton_shims._float_values(x.data, x.dtype).astype("float32") for x in (a, b))
    total = d.data.copy()
    for i in range(left.shape[1]):
        total += left[:, i, None] * right[None, i]
    return TensorHandle(total, d.dtype.scalar)


def _values(shape: Sequence[int], dtype: str = "float32", seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def _bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


def _same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(_bits(a), _bits(b), strict=True))


def _by_rows(of: Callable[[slice], Any]) -> list[str]:
    """The numbers of rows, and places of rows, at which ``of`` some rows differs from all."""
    whole = of(slice(MOST))
    found = []
    for count in COUNTS:
        for first in (0, 3):
            own = slice(first, first + count)
            if not _same(of(own), jax.tree.map(lambda x, own=own: x[own], whole)):
                found.append(f"{count} rows from {first}")
    return found


def of_gemm(dtype: str, **static: Any) -> list[str]:
    """Rows of a GEMM of uneven sizes, in float32, as rounding hides a difference."""
    x, by_output = _values((MOST, 80), dtype), static.get("by_output", False)
    w = _values((40, 80) if by_output else (80, 48), dtype, 1)
    gemm = swiglu_gemm if static.get("swiglu") else skinny_gemm
    return _by_rows(lambda own: gemm(GemmArgs(x=x[own], w=w, wide=True, **static), "triton_fixed"))


def of_norm(dtype: str) -> list[str]:
    """Rows of a norm of a sum, and sums over rows."""
    x, delta, w = _values((MOST, 80), dtype), _values((MOST, 80), dtype, 1), _values((2, 80), dtype)

    def of(own: slice) -> Any:
        args = NormArgs(x=x[own], partials=delta[own], weights=w, row=1, eps=1e-5)
        x32 = x[own].astype("float32")
        sums = sum_last(x32, fixed=True), logsumexp_last(x32, fixed=True)
        return residual_norm(args, PINS.of("residual_norm")), sums

    return _by_rows(of)


def of_experts(dtype: str) -> list[str]:
    """Rows of a mixture of experts and of its router."""
    x, router = _values((MOST, 32), dtype), _values((8, 32), dtype, 1)
    gate_up, down = _values((8, 32, 32), dtype, 2), _values((8, 32, 16), dtype, 3)
    routing = Routing(chosen=3, renormalised=True)

    def of(own: slice) -> Any:
        choices, weights = route(RouteArgs(x=x[own], w=router, routing=routing), PINS.of("route"))
        args = ExpertsArgs(x=x[own], choices=choices, weights=weights, gate_up=gate_up, down=down)
        return choices, weights, experts(args, PINS.of("experts"))

    return _by_rows(of)


def of_attention(
    dtype: str,
    plans: Sequence[tuple[Sequence[int], bool]],
    window: int | None = None,
    cap: float | None = None,
    *,
    sinks: bool = False,
) -> list[str]:
    """A sequence's tokens in chunks of several sizes, next to another one, and as decode rows.

    ``plans``: sizes of chunks, of which one token alone is a decode row; and whether the other
    sequence is in the same steps.
    """
    length, others, pages = sum(plans[0][0]), 37, 20
    table = np.full((2, 10), -1, np.int32)
    order = np.random.default_rng(2).permutation(np.arange(1, pages))
    table[0], table[1, :4] = order[:10], order[10:14]
    heads = _values((length + others, HEADS + 2 * KV_HEADS, DIM), dtype)
    angle = np.random.default_rng(3).uniform(0, 6, (length + others, DIM // 2)).astype("float32")
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    norms = _values((2, DIM), dtype, 4)
    of_heads = _values((HEADS,), dtype, 5) if sinks else None
    position = np.concatenate([np.arange(length), np.arange(others)])
    row = np.repeat([0, 1], [length, others])
    slots = jnp.asarray(table[row, position // PAGE] * PAGE + position % PAGE, jnp.int32)
    static = {"scale": 0.3, "window": window, "cap": cap}
    empty = jnp.full((pages, PAGE, KV_HEADS, DIM), jnp.nan, dtype)

    def chunks(sizes: Sequence[int], *, beside: bool) -> tuple[list[jax.Array], Any]:
        """The outputs of chunks of the first sequence, and the pages after them."""
        pools, found, first = (empty, empty), [], 0
        for size in sizes:
            own = list(range(first, first + size))
            first += size
            tokens = np.array([*range(length, length + others), *own] if beside else own)
            ropes = {"cos": cos[tokens], "sin": sin[tokens], "qk_norms": norms, "eps": 1e-6}
            if size == 1 and not beside:
                out, *pools = append_decode(
                    DecodeArgs(
                        qkv=heads[tokens],
                        **ropes,
                        k_pages=pools[0],
                        v_pages=pools[1],
                        page_table=jnp.asarray(table[:1]),
                        seq_lens=jnp.asarray([first], jnp.int32),
                        sinks=of_heads,
                        **static,
                    ),
                    PINS.of("append_decode"),
                )
            else:
                args = RopeAppendArgs(
                    qkv=heads[tokens], **ropes, k_pages=pools[0], v_pages=pools[1],
                    slot_mapping=slots[tokens],
                )  # fmt: skip
                q, *pools = qk_rope_append(args, PINS.of("qk_rope_append"))
                rows = [1, 0] if beside else [0]
                lens = [others, first] if beside else [first]
                starts = [0, others, others + size] if beside else [0, size]
                out = paged_prefill(
                    PrefillArgs(
                        q=q,
                        k_pages=pools[0],
                        v_pages=pools[1],
                        page_table=jnp.asarray(table[rows]),
                        seq_lens=jnp.asarray(lens, jnp.int32),
                        query_start_loc=jnp.asarray(starts, jnp.int32),
                        sinks=of_heads,
                        **static,
                    ),
                    PINS.of("paged_prefill"),
                )
            found.append(out[-size:])
        return found, [pool[order[:10]] for pool in pools]

    whole, pools = chunks([length], beside=False)
    assert np.isfinite(np.asarray(whole[0], np.float32)).all()
    problems = []
    for sizes, beside in plans:
        found, own = chunks(sizes, beside=beside)
        if not (_same(jnp.concatenate(found), whole[0]) and _same(own, pools)):
            problems.append(f"chunks {sizes}")
    return problems


def of_definitions(name: str) -> list[str]:
    """The cases of CI whose results are not those of the definition."""
    op = next(op for op in all_ops() if op.name == name)
    impl = next(impl for impl in op.impls if impl.name == "triton_fixed")
    found = []
    for case in op.cases:
        inputs = op.build(case, 0) if "ci" in case.tags else None
        if inputs is not None and impl.refuses("gpu", inputs.args, inputs.static) is None:
            found.append(mismatch(op, impl, case, inputs))
    assert found, f"no case of {name} is computed"
    return [one for one in found if one is not None]


def checks() -> dict[str, Callable[[], list[str]]]:
    """All checks by name; those in ``BY_DAY`` are short."""
    found: dict[str, Callable[[], list[str]]] = {}
    for dtype in DTYPES:
        found |= {
            f"gemm {dtype}": partial(of_gemm, dtype),
            f"by output {dtype}": partial(of_gemm, dtype, by_output=True),
            f"swiglu {dtype}": partial(of_gemm, dtype, swiglu=True),
            f"geglu {dtype}": partial(of_gemm, dtype, swiglu=True, gelu=True),
            f"norm {dtype}": partial(of_norm, dtype),
            f"experts {dtype}": partial(of_experts, dtype),
            f"chunks {dtype}": partial(of_attention, dtype, FEW_PLANS),
            f"attention {dtype}": partial(of_attention, dtype, PLANS),
            f"window {dtype}": partial(of_attention, dtype, PLANS, 50, 20.0, sinks=True),
        }
    return found | {f"{name} as defined": partial(of_definitions, name) for name in OPS}


BY_DAY = ("gemm bfloat16", "chunks bfloat16")


if __name__ == "__main__":
    with (
        compiling_for(Device("gpu", "NVIDIA H200", "9.0")),
        triton_shims.in_place_of_triton_call(triton_shims.interpreted),
        patch.object(triton_shims, "_dot", _dot_in_order),
        patch.object(fixed_launch, "MIN_SPLIT", 64),
    ):
        json.dump({name: checks()[name]() for name in sys.argv[1:]}, sys.stdout)
