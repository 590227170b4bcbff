"""Times launches of append_decode with 8-bit pages on a GPU, next to bfloat16 pages.

Run on a GPU, from the repository root:
``python -m bench.fp8_pages [--rows N,...] [--contexts N,...] [--launches S-B-W-P,...]``.
A launch is named by its splits, keys of a block, warps and pipeline stages; "default" is the
choice of ``append_decode.launch``, "bf16" the same call with bfloat16 pages and the kernel that the
op chooses. Shapes are those of a layer of Qwen3-4B. Pools are made on the device and hold random
numbers, so no result is compared: ``bench.kernels --check --op append_decode --case fp8`` does
that. Calls are chained as in ``bench.kernels``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels import seconds_in_a_chain
from pallas_kernels.append_decode import api, launch
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness.registry import Cost, imported_when_called
from pallas_kernels.lib.page_scales import rounded
from pallas_kernels.lib.shapes import QWEN3_4B

PAGE_SIZE = 16
LAUNCHES = {  # by rows
    8: "bf16,default,8-64-4-5,16-64-4-5,8-128-8-5",
    64: "bf16,default,2-64-4-5,1-128-8-5,1-32-2-5,1-64-2-5",
}

_launch_with = imported_when_called("pallas_kernels.append_decode.triton", "launch_with")


def arguments(rows: int, context: int, *, is_scaled: bool) -> DecodeArgs:
    """A step of ``rows`` rows, each of ``context`` tokens on pages in random order."""
    heads, pages = QWEN3_4B, -(-context // PAGE_SIZE)
    key = jax.random.key(0)
    shape = (rows * pages + 1, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    pool = jax.random.normal(key, shape, jnp.bfloat16)
    order = jax.random.permutation(key, jnp.arange(1, rows * pages + 1, dtype=jnp.int32))
    new = (rows, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    angles = jnp.full((rows, heads.head_dim // 2), 0.5**0.5)
    pools: dict[str, Any] = {"k_pages": pool, "v_pages": pool + 0}
    if is_scaled:
        bits, scales = jax.jit(rounded)(pool)
        pools = {"k_pages": bits, "v_pages": bits + 0, "k_scales": scales, "v_scales": scales + 0}
    return DecodeArgs(
        qkv=jax.random.normal(key, new, jnp.bfloat16),
        cos=angles,
        sin=angles,
        qk_norms=jnp.ones((2, heads.head_dim), jnp.bfloat16),
        **pools,
        page_table=order.reshape(rows, pages),
        seq_lens=jnp.full(rows, context, jnp.int32),
        scale=heads.head_dim**-0.5,
        eps=1e-6,
    )


def bytes_read(args: DecodeArgs, context: int) -> int:
    """Keys, values and their scales of all rows."""
    entries = 2 * args.seq_lens.shape[0] * context * args.k_pages.shape[2]
    scales = 4 if args.k_scales is not None else 0
    return entries * (args.k_pages.shape[3] * args.k_pages.dtype.itemsize + scales)


def function_of(name: str) -> Callable[[DecodeArgs], Any]:
    """The op, pinned to the named launch."""
    if name == "bf16":
        return api.append_decode
    if name == "default":
        return partial(api.append_decode, impl="triton")
    return partial(_launch_with, launch.TritonConfig(*map(int, name.split("-"))))


def time_rows(rows: int, context: int, names: Sequence[str]) -> None:
    """Print a line for each launch."""
    for is_scaled in (False, True):
        own = [name for name in names if (name != "bf16") == is_scaled]
        args = arguments(rows, context, is_scaled=is_scaled) if own else None
        for name in own:
            assert args is not None
            size = bytes_read(args, context)
            label = f"b{rows}_ctx{context}"
            if name == "default":
                name += " " + "-".join(map(str, _sizes(launch.choose_config(args))))
            try:
                run = function_of(name.split()[0])
                seconds = seconds_in_a_chain(api.OP, run, (args,), Cost(bytes=size, flops=0))
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # too much shared memory
                print(f"{label:14}{name:22}{str(error).splitlines()[0]}", flush=True)
                continue
            print(f"{label:14}{name:22}{seconds * 1e6:10.1f} us{size / seconds / 1e9:9.0f} GB/s",
                  flush=True)  # fmt: skip


def _sizes(config: launch.TritonConfig) -> tuple[int, ...]:
    return config.splits, config.block, config.num_warps, config.num_stages


def main(argv: list[str] | None = None) -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    several = partial(str.split, sep=",")
    parser.add_argument("--rows", type=several, default=["8", "64"], metavar="N,...")
    parser.add_argument("--contexts", type=several, default=["1056", "8192", "16416"])
    parser.add_argument("--launches", type=several, metavar="S-B-W-P,...")
    options = parser.parse_args(argv)
    for rows in map(int, options.rows):
        nearest = min(LAUNCHES, key=lambda known: abs(known - rows))
        names = options.launches or LAUNCHES[nearest].split(",")
        for context in map(int, options.contexts):
            time_rows(rows, context, names)


if __name__ == "__main__":
    main()
