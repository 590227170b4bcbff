"""Times launches of attention on 8-bit pages on a GPU, next to bfloat16 pages.

Run on a GPU, from the repository root:
``python -m bench.fp8_pages [--op append_decode|paged_prefill] [--rows N,...] [--contexts N,...]
[--launches A-B-C-D,...] [--instructions]``.
A launch of append_decode is named by its splits, keys of a block, warps and pipeline stages, one of
paged_prefill by its rows instead of splits; "default" is the choice of the op's ``launch``,
"converted" converts the pages to bfloat16 first. "bf16" is the same call with bfloat16 pages and
the kernel that the op chooses, "bf16-triton" with Triton's. Shapes are those of a layer of
Qwen3-4B; a call of paged_prefill has the 8,192 newest tokens of its rows. Pools are made on the
device and hold random numbers, so no result is compared: ``bench.kernels --check --case fp8`` does
that. Calls are chained as in ``bench.kernels``.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels import chained, parts, seconds_in_a_chain
from pallas_kernels.append_decode import api as append_decode
from pallas_kernels.append_decode import launch as append_decode_launch
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness.registry import Cost, arrays_of, imported_when_called
from pallas_kernels.lib.page_scales import rounded
from pallas_kernels.lib.shapes import QWEN3_4B
from pallas_kernels.paged_prefill import api as paged_prefill
from pallas_kernels.paged_prefill import launch as paged_prefill_launch
from pallas_kernels.paged_prefill.ref import PrefillArgs

PAGE_SIZE = 16
PROMPT_TOKENS = 8192  # of a call of paged_prefill
APIS = MappingProxyType({"append_decode": append_decode, "paged_prefill": paged_prefill})
CONFIGS: Any = MappingProxyType(
    {
        "append_decode": append_decode_launch.TritonConfig,
        "paged_prefill": paged_prefill_launch.TritonConfig,
    }
)
LAUNCHES = MappingProxyType(  # by op and rows
    {
        ("append_decode", 1): "bf16,bf16-triton,default,16-64-4-5",
        ("append_decode", 8): "bf16,default,8-64-4-5,16-64-4-5,8-128-8-5",
        ("append_decode", 64): "bf16,default,2-64-4-5,1-128-8-5,1-32-2-5,1-64-2-5",
        ("paged_prefill", 1): "bf16,default,converted,128-128-8-3,128-64-8-5,64-64-4-5,64-128-4-3",
    }
)


def arguments(op: str, rows: int, context: int, *, is_scaled: bool) -> Any:
    """A call with ``rows`` rows, each of ``context`` tokens on pages in random order."""
    heads, pages = QWEN3_4B, -(-context // PAGE_SIZE)
    key = jax.random.key(0)
    shape = (rows * pages + 1, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    pool = jax.random.normal(key, shape, jnp.bfloat16)
    order = jax.random.permutation(key, jnp.arange(1, rows * pages + 1, dtype=jnp.int32))
    pools: dict[str, Any] = {"k_pages": pool, "v_pages": pool + 0}
    if is_scaled:
        bits, scales = jax.jit(rounded)(pool)
        pools = {"k_pages": bits, "v_pages": bits + 0, "k_scales": scales, "v_scales": scales + 0}
    common: dict[str, Any] = {
        **pools,
        "page_table": order.reshape(rows, pages),
        "seq_lens": jnp.full(rows, context, jnp.int32),
        "scale": heads.head_dim**-0.5,
    }
    if op == "paged_prefill":
        tokens = min(PROMPT_TOKENS // rows, context)
        q = jax.random.normal(key, (rows * tokens, heads.num_heads, heads.head_dim), jnp.bfloat16)
        starts = tokens * jnp.arange(rows + 1, dtype=jnp.int32)
        return PrefillArgs(q=q, query_start_loc=starts, **common)
    common["arrivals"] = jnp.zeros(rows * heads.num_kv_heads, jnp.int32)
    new = (rows, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    angles = jnp.full((rows, heads.head_dim // 2), 0.5**0.5)
    return DecodeArgs(
        qkv=jax.random.normal(key, new, jnp.bfloat16),
        cos=angles,
        sin=angles,
        qk_norms=jnp.ones((2, heads.head_dim), jnp.bfloat16),
        eps=1e-6,
        **common,
    )


def bytes_read(args: Any, context: int) -> int:
    """Keys, values and their scales of all rows."""
    entries = 2 * args.seq_lens.shape[0] * context * args.k_pages.shape[2]
    scales = 4 if args.k_scales is not None else 0
    return entries * (args.k_pages.shape[3] * args.k_pages.dtype.itemsize + scales)


def function_of(op: str, name: str) -> Callable[[Any], Any]:
    """The op, pinned to the named launch."""
    if name == "bf16":
        return getattr(APIS[op], op)
    if name in ("bf16-triton", "default", "converted"):
        return partial(getattr(APIS[op], op), impl=name if name == "converted" else "triton")
    launch_with = imported_when_called(f"pallas_kernels.{op}.triton", "launch_with")
    return partial(launch_with, CONFIGS[op](*map(int, name.split("-"))))


def instructions(op: str, name: str, args: Any) -> str:
    """How often each instruction is in XLA's module of two calls: the kernels, and any copies."""
    call, (arrays, structure) = function_of(op, name), arrays_of((args,))
    run = chained(APIS[op].OP, lambda *x: call(*structure.unflatten(x)), 2)
    updated, fixed, rest = parts(APIS[op].OP, arrays)
    text = run.lower([updated], [fixed], rest).compile().as_text()
    found = Counter(re.findall(r"^ *(?:ROOT )?\S+ = .*? ([a-z-]+)\(", text, re.MULTILINE))
    return " ".join(f"{name} {count}" for name, count in found.most_common())


def time_rows(
    op: str, rows: int, context: int, names: Sequence[str], *, counts: bool = False
) -> None:
    """Print a line for each launch: its time, or its instructions in XLA's module."""
    for is_scaled in (False, True):
        own = [name for name in names if name.startswith("bf16") != is_scaled]
        args = arguments(op, rows, context, is_scaled=is_scaled) if own else None
        for name in own:
            size = bytes_read(args, context)
            label = f"{op:14}b{rows}_ctx{context:<8}{name:14}"
            if counts:
                print(label, instructions(op, name, args), flush=True)
                continue
            try:
                run, cost = function_of(op, name), Cost(bytes=size, flops=0)
                seconds = seconds_in_a_chain(APIS[op].OP, run, (args,), cost)
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                print(f"{label}{str(error).splitlines()[0]}", flush=True)
                continue
            print(f"{label}{seconds * 1e6:10.1f} us{size / seconds / 1e9:9.0f} GB/s", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    several = partial(str.split, sep=",")
    parser.add_argument("--op", choices=APIS, default="append_decode")
    parser.add_argument("--rows", type=several, metavar="N,...")
    parser.add_argument("--contexts", type=several, metavar="N,...")
    parser.add_argument("--launches", type=several, metavar="A-B-C-D,...")
    parser.add_argument("--instructions", action="store_true", help="count XLA's, time nothing")
    options = parser.parse_args(argv)
    known = [rows for op, rows in LAUNCHES if op == options.op]
    contexts = {"append_decode": (1056, 8192, 16416), "paged_prefill": (8192, 16384)}[options.op]
    for rows in map(int, options.rows or known):
        nearest = min(known, key=lambda x: abs(x - rows))
        names = options.launches or LAUNCHES[options.op, nearest].split(",")
        for context in map(int, options.contexts or contexts):
            time_rows(options.op, rows, context, names, counts=options.instructions)


if __name__ == "__main__":
    main()
