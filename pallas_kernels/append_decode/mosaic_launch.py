"""Which calls the Mosaic kernel of append_decode takes, and how it tiles them.

A launch is a tuned choice, else that of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import tuned
from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.launch import call_shapes, queries_of, shapes_of
from pallas_kernels.checks import not_hopper
from pallas_kernels.device import current_device
from pallas_kernels.numerics import power_of_two

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
GROUP = 8  # query heads that the matrix units take at a time; fewer are padded
KEYS = 64  # that they take at a time: the least of a block
PAGE_SIZES = (8, 16, 32, 64)  # TMA fills swizzled rooms by 8 rows
TOGETHER = 2  # programs on a multiprocessor: one attends while another begins or ends
LARGEST_CLUSTER = 8  # that every device of the kind launches; 16 were slower at 16,416 keys
# With half as many, one row of 16,416 keys took 36.2 us for 24.7 (H200); Triton splits further.
LEAST_PROGRAMS = 64
SHARED_BYTES = 192 << 10  # of a multiprocessor, for keys and values on their way
ALONE_BYTES = 128 << 10  # of these, for a program that has a multiprocessor for itself


@dataclass(frozen=True)
class Launch:
    """How a call is cut up.

    ``splits`` programs, a power of two, share a row and a kv head: they take its blocks in turn.
    ``block``: keys of a step, a multiple of 64. ``stages`` blocks are on their way at once. At most
    ``programs``, or clusters of splits, take all rows and kv heads in turn.
    """

    splits: int
    block: int
    stages: int
    programs: int


def supports(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del cos, sin, v_pages, page_table, seq_lens, arrivals, scale, eps
    rows, n, h = queries_of(qkv, k_pages).shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    if str(qkv.dtype) not in DTYPES or k_pages.dtype != qkv.dtype:
        return f"heads are {qkv.dtype} and pages {k_pages.dtype}, not both of 16 bits and alike"
    if qk_norms is not None and qk_norms.dtype != qkv.dtype:
        return f"heads are {qkv.dtype} and norms {qk_norms.dtype}"
    if h not in HEAD_DIMS:
        return f"head_dim {h} is neither 64 nor 128"
    if n // num_kv_heads > GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {GROUP} may"
    if page_size not in PAGE_SIZES:
        return f"page_size {page_size} is not 8, 16, 32 or 64"
    if window is not None:
        return "it has no windows"
    if (programs := rows * num_kv_heads * LARGEST_CLUSTER) < LEAST_PROGRAMS:
        return f"{programs} programs leave most of the device idle, and more cannot share a row"
    return not_hopper()


def results(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    *_: Any,
    **static: Any,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a call returns, as shapes."""
    k_pool, v_pool = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pages, v_pages))
    return queries_of(qkv, k_pages), k_pool, v_pool


def by_rule(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """Splits as long as each program has a multiprocessor.

    With splits for two on each, 8 rows of Qwen3-4B took 17.7 us for 12.2 on an H200. A program that
    has one for itself takes blocks twice as large, which are fewer waits: a layer of one row took
    80.4 us for 86.0 at 16,416 keys, of 1,057 keys 61.8 for 61.5. More of them on their way would
    leave the kernel that comes next no room beside it: 63.8 at 1,057 keys. For 32 rows, two
    programs on each, a launch with such blocks took 44.9 us for 40.9.
    """
    (b, _, h), (page_size, num_kv_heads) = qkv.shape, k_pages.shape[1:3]
    longest = page_table.shape[1] * page_size
    multiprocessors = current_device().multiprocessors
    fitting = multiprocessors // (b * num_kv_heads)
    splits = max(min(fitting, -(-longest // KEYS), LARGEST_CLUSTER), 1)
    splits = power_of_two(splits + 1) // 2
    alone = b * num_kv_heads * splits <= multiprocessors
    large = alone and longest >= 2 * KEYS * splits
    block, room = (2 * KEYS, ALONE_BYTES) if large else (KEYS, SHARED_BYTES // TOGETHER)
    block_bytes = 2 * block * h * qkv.dtype.itemsize
    return Launch(splits, block, room // block_bytes, TOGETHER * multiprocessors)


def choose(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """The tuned choice for a call of these shapes on this device, else that of the rule."""
    choice = tuned.lookup("append_decode/mosaic", CASES, shapes_of, call_shapes(qkv, k_pages))
    return Launch(**choice) if choice else by_rule(qkv, k_pages, page_table)
