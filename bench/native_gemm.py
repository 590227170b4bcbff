"""Measures the native CPU kernel of quantised_gemm on matrices of models of 1.5 and 4 B parameters.

Run from the repository root: ``python -m bench.native_gemm [--tokens 1,8,64,512]``. For each matrix
and number of tokens it prints the best time of a call, the weights' bytes per second, also as a
share of what a plain read of memory by all threads gets, and multiplications per second. Calls with
few tokens go through several copies of the matrix, which no cache holds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.native import library
from pallas_kernels.quantised_gemm import native
from pallas_kernels.quantised_gemm.cases import random_matrix
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs

COLD_BYTES = 300 << 20  # of all copies: beyond every cache
FEW_TOKENS = 16  # more take so long that memory is no bound
SECONDS_PER_CASE = 1.0


@dataclass(frozen=True)
class Case:
    """A matrix: its form and sizes."""

    name: str
    form: str
    group: int
    inputs: int
    outputs: int
    swiglu: bool = False


CASES = (
    Case("q4_k", "q4_k", 32, 1536, 8960),
    Case("q4_k gate_up", "q4_k", 32, 1536, 8960, swiglu=True),
    Case("q4_k", "q4_k", 32, 8960, 1536),
    Case("q6_k", "q6_k", 16, 1536, 8960),
    Case("q6_k", "q6_k", 16, 8960, 1536),
    Case("int8", "int8", 2560, 2560, 9728),
    Case("fp8", "fp8", 2560, 2560, 9728),
    Case("fp8 blocks", "fp8_blocks", 128, 2560, 9728),
)


def best_seconds(call: Callable[[], Any]) -> float:
    """The shortest of the calls of a second: other processes only make a call longer."""
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS_PER_CASE
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def read_bandwidth() -> float:
    """Bytes per second of a maximum over an array, by a thread for each processor."""
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(COLD_BYTES // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = best_seconds(lambda: list(pool.map(np.max, parts)))
    return COLD_BYTES / seconds


def measure(case: Case, tokens: int, bandwidth: float) -> str:
    """A line of the table."""
    rng = np.random.default_rng(0)
    rows = case.outputs * (1 + case.swiglu)
    w = LANES.arrange(random_matrix(rng, case.form, rows, case.inputs, case.group))
    size = sum(part.nbytes for part in w.arrays if part is not None)
    count = max(1, COLD_BYTES // size) if tokens <= FEW_TOKENS else 1
    copies = [jax.tree.map(jnp.array, w) for _ in range(count)]
    x = jnp.asarray(rng.normal(size=(tokens, case.inputs)), jnp.float32)

    @jax.jit
    def run(x: jax.Array, copies: list[Quantised]) -> list[jax.Array]:
        calls = (QuantisedGemmArgs(x=x, w=copy, swiglu=case.swiglu) for copy in copies)
        return [native.quantised_gemm(call) for call in calls]

    seconds = best_seconds(lambda: jax.block_until_ready(run(x, copies))) / count
    products = tokens * rows * case.inputs / seconds
    rate = size / seconds
    return (
        f"{case.name:13} {case.inputs:5} x {case.outputs:<5} {tokens:4} tokens"
        f" {seconds * 1e3:8.3f} ms {rate / 1e9:6.1f} GB/s {rate / bandwidth:5.0%}"
        f" {products / 1e9:5.0f} G/s"
    )


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,64,512", help="numbers of tokens")
    tokens = [int(text) for text in parser.parse_args().tokens.split(",")]
    bandwidth = read_bandwidth()
    print(f"{library.variants()[0]}, {os.cpu_count()} processors, reads {bandwidth / 1e9:.1f} GB/s")
    for case in CASES:
        for count in tokens:
            print(measure(case, count, bandwidth), flush=True)


if __name__ == "__main__":
    main()
