"""Times the sums and gathers of several devices: the library's kernels, NCCL, and XLA's own kernel.

Run from the repository root on a machine with several GPUs:
``python -m bench.all_reduce [--devices N] [--rows ...] [--width ...] [--sums N] [--norms |
--gathers | --decodes] [--output FILE]``.
One computation has a chain of sums of float32[rows, width], each the argument of the next; the time
is that of one sum of the chain. A sum of equal values doubles them (of two devices), so the result
of a chain is known to the bit, and is checked after ``--sums`` sums of the library's kernel. With
``--norms`` the chains are of sums, each with the residual addition and the RMS norm after it, in
bfloat16: in one kernel, and in two. The first call of both must have the same sums, and norms that
differ by no more than ``all_reduce_norm`` allows, on every device. With
``XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE`` "xla" is XLA's own kernel.

With ``--gathers`` the chains are of gathers of float32[rows, width], ``width`` that of all devices.
Each device then adds 1 to the columns of the next one, and these are its own of the next gather, so
after any number of gathers all values are known to the bit; the time includes this addition. The
first gather is compared with the matrix as well, on every device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.exec.run.exchange import Exchange
from jaxinfer.nn.placement import TENSOR, Placement, default_placement
from pallas_kernels.all_gather.api import AllGatherArgs, all_gather
from pallas_kernels.all_reduce.api import AllReduceArgs, Peers, all_reduce
from pallas_kernels.all_reduce_norm.api import OP as NORM_OP
from pallas_kernels.all_reduce_norm.api import AllReduceNormArgs, all_reduce_norm
from pallas_kernels.harness.pins import Pins
from pallas_kernels.residual_norm.ref import NormArgs

CHAIN = 60  # sums of one computation: those of a model with 30 layers
FIRST = 2.0**-100  # whose doubles of a chain on up to 8 devices are finite
SAMPLES, CALLS = 7, 20


def chain_of(impl: str, placement: Placement, *, decodes: bool = False) -> Callable[..., jax.Array]:
    """A chain of sums of each device's values [N * rows, width]; ``decodes`` is as in ``Peers``."""

    def run(x: jax.Array, addresses: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index(TENSOR).reshape(1).astype(jnp.int32)
        peers = Peers(rank=rank, addresses=addresses, decodes=decodes)
        for i in range(CHAIN):
            x = all_reduce(AllReduceArgs(partials=x, peers=peers, axis=TENSOR), impl)
            if i % 10 == 9:  # of 8 devices, ten sums are 2 ** 30 times as much
                x = x * float(placement.num_devices) ** -10
        return x

    mapped = jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(P(TENSOR), P()),
        out_specs=P(TENSOR),
        check_vma=False,
    )
    return jax.jit(mapped)


def norm_chain_of(impl: str, placement: Placement, length: int) -> Callable[..., Any]:
    """A chain of sums with norms; it returns the residual stream and its norm on each device."""

    def run(x: jax.Array, own: jax.Array, weights: jax.Array, addresses: jax.Array) -> Any:
        rank = jax.lax.axis_index(TENSOR).reshape(1).astype(jnp.int32)
        on: dict[str, Any] = {"peers": Peers(rank=rank, addresses=addresses), "axis": TENSOR}
        on["pins"] = Pins((("all_reduce_norm", impl),))
        for _ in range(length):
            norm = NormArgs(x=x, partials=own, weights=weights, row=0, eps=1e-6)
            x, own = all_reduce_norm(AllReduceNormArgs(norm=norm, **on))
        return x, own

    mapped = jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(P(), P(TENSOR), P(), P()),
        out_specs=P(TENSOR),
        check_vma=False,
    )
    return jax.jit(mapped)


def norm_row(placement: Placement, shape: tuple[int, int], addresses: jax.Array) -> dict[str, Any]:
    """The times of a sum with its norm, by each way, and whether both agree."""
    rng, count = np.random.default_rng(0), placement.num_devices

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.bfloat16)

    own = jax.sharding.NamedSharding(placement.mesh, P(TENSOR))
    parts = jax.device_put(random(count * shape[0], shape[1]), own)
    given = (placement.put(random(*shape)), parts, placement.put(random(1, shape[1])), addresses)
    us, first = {}, {}
    for impl in ("triton", "unfused"):
        arrays = norm_chain_of(impl, placement, 1)(*given)
        first[impl] = [np.asarray(one, np.float32).reshape(count, *shape) for one in arrays]
        run = partial(norm_chain_of(impl, placement, CHAIN), *given)
        us[impl] = round(1e6 * seconds_per_sum(run), 2)
    (total, normed), (other, other_normed) = first["triton"], first["unfused"]
    tolerance = NORM_OP.tolerance["bfloat16"]
    right = np.array_equal(total, other) and all(
        np.array_equal(one[0], each) for one in (total, normed) for each in one
    )
    right &= np.allclose(normed, other_normed, rtol=tolerance, atol=tolerance)
    return {"rows": shape[0], "width": shape[1], "us": us, "norms": True, "right": bool(right)}


def gather_chain_of(impl: str, placement: Placement, length: int) -> Callable[..., Any]:
    """A chain of gathers of each device's columns, and on each device the last one's result."""

    def run(x: jax.Array, addresses: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank = jax.lax.axis_index(TENSOR).reshape(1).astype(jnp.int32)
        peers, width = Peers(rank=rank, addresses=addresses), x.shape[1]
        start = (rank[0] + 1) % placement.num_devices * width
        columns = placement.num_devices * width
        for _ in range(length):
            args = AllGatherArgs(x=x, columns=columns, peers=peers, axis=TENSOR)
            gathered = all_gather(args, impl)
            x = jax.lax.dynamic_slice_in_dim(gathered, start, width, axis=1) + 1
        return x, gathered

    mapped = jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(P(None, TENSOR), P()),
        out_specs=(P(None, TENSOR), P(TENSOR)),
        check_vma=False,
    )
    return jax.jit(mapped)


def gather_row(
    placement: Placement, shape: tuple[int, int], addresses: jax.Array, gathers: int
) -> dict[str, Any]:
    """The times of a gather, by each way, and whether all values of so many gathers are right."""
    count = placement.num_devices
    host = np.random.default_rng(0).integers(0, 1 << 20, shape).astype(np.float32)
    own = jax.sharding.NamedSharding(placement.mesh, P(None, TENSOR))
    us, right, x = {}, True, jax.device_put(host, own)
    for impl in ("triton", "xla"):
        _, first = gather_chain_of(impl, placement, 1)(x, addresses)
        right &= bool((np.asarray(first).reshape(count, *shape) == host).all())
        chain = gather_chain_of(impl, placement, CHAIN)
        us[impl] = round(1e6 * seconds_per_sum(partial(chain, x, addresses)), 2)
    chain, done, left = gather_chain_of("triton", placement, CHAIN), 0, x
    while done < max(gathers, CHAIN):
        for _ in range(CALLS):
            left, _ = chain(left, addresses)
        left.block_until_ready()
        done += CHAIN * CALLS
    moved = np.roll(host, -done * (shape[1] // count), axis=1)
    right &= np.array_equal(np.asarray(left), moved + done)
    return {"rows": shape[0], "width": shape[1], "us": us, "gathers": done, "right": right}


def seconds_per_sum(run: Callable[[], Any]) -> float:
    """The median over samples, of several computations in a row each."""
    for _ in range(3):
        jax.block_until_ready(run())
    found = []
    for _ in range(SAMPLES):
        begun = time.perf_counter()
        for _ in range(CALLS):
            result = run()
        jax.block_until_ready(result)
        found.append((time.perf_counter() - begun) / CALLS / CHAIN)
    return median(found)


def rows_of(options: argparse.Namespace, placement: Placement) -> list[dict[str, Any]]:
    """The times of each size, by each way."""
    exchange = Exchange(tuple(d.local_hardware_id for d in placement.devices))
    addresses = placement.put(exchange.words)
    kinds = ("triton", "xla")
    chains = {impl: chain_of(impl, placement, decodes=options.decodes) for impl in kinds}
    made = []
    for rows in options.rows:
        for width in options.width:
            if options.norms:
                made.append(row := norm_row(placement, (rows, width), addresses))
                exchange.check()
                print(row, flush=True)
                continue
            if options.gathers:
                size = rows, width // placement.num_devices * placement.num_devices
                made.append(row := gather_row(placement, size, addresses, options.sums))
                exchange.check()
                print(row, flush=True)
                continue
            shape = (placement.num_devices * rows, width)
            values = np.random.default_rng(0).random(shape[1:], np.float32)
            host = np.tile(values * np.float32(FIRST), (shape[0], 1))
            x = jax.device_put(host, jax.sharding.NamedSharding(placement.mesh, P(TENSOR)))
            found = {impl: partial(run, x, addresses) for impl, run in chains.items()}
            us = {impl: round(1e6 * seconds_per_sum(run), 2) for impl, run in found.items()}
            done = CHAIN * CALLS * SAMPLES
            while done < options.sums:
                for _ in range(CALLS):
                    result = found["triton"]()
                result.block_until_ready()
                done += CHAIN * CALLS
            right = bool(np.array_equal(np.asarray(found["triton"]()), host))
            exchange.check()
            row = {"rows": rows, "width": width, "us": us, "sums": done, "right": right}
            print(row, flush=True)
            made.append(row)
    return made


def main() -> None:
    """Measure the sizes on the command line."""
    parser = argparse.ArgumentParser(description="sums of several devices")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--width", type=int, nargs="+", default=[2560, 4096])
    parser.add_argument("--sums", type=int, default=0, help="or gathers of each size, at least")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--norms", action="store_true", help="with the norm after each sum")
    kinds.add_argument("--gathers", action="store_true", help="of columns, instead of sums")
    kinds.add_argument("--decodes", action="store_true", help="sums as large as decode steps may")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    placement = default_placement(options.devices)
    rows = rows_of(options, placement)
    if options.output:
        report = {**host_circumstances(), "device": placement.device.device_kind}
        report |= {"devices": options.devices, "commit": options.commit, "chain": CHAIN}
        write_report(options.output, {**report, "rows": rows})
    if not all(row["right"] for row in rows):
        raise SystemExit("a result is wrong")


if __name__ == "__main__":
    main()
