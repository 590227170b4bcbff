"""Finds the fastest launch of the Triton kernel of paged_decode for each case of a GPU's steps.

Run on the GPU, from the repository root: ``python -m bench.tune [--case TEXT] [--output FILE]``.
From the rule's choice it varies one value after the other, keeps what is faster, and writes the
choices beside the op, where calls of the same shapes find them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.kernels import bench_cases, seconds_in_a_chain
from pallas_kernels.paged_decode import launch
from pallas_kernels.paged_decode.api import OP
from pallas_kernels.paged_decode.launch import Launch
from pallas_kernels.registry import Case
from pallas_kernels.tuned import tuned_file

WORTHWHILE = 0.99  # a choice must take less than this share of the best time so far
VALUES = (
    ("splits", (1, 2, 4, 8, 16, 32, 64)),
    ("block", (16, 32, 64, 128)),
    ("num_stages", (2, 3, 5, 7)),
    ("num_warps", (2, 4, 8)),
)


def neighbours(choice: Launch, name: str, values: tuple[int, ...]) -> Iterator[Launch]:
    """The choice with each other value in the named place."""
    for value in values:
        if value != getattr(choice, name):
            yield replace(choice, **{name: value})


def tune(case: Case) -> Launch:
    """The fastest choice found for a case."""
    from pallas_kernels.paged_decode.triton import launched  # wants Triton, hence a GPU

    inputs = OP.build(case, 0)
    arguments = [jnp.asarray(x) for x in inputs.args]
    cost = OP.cost(case)

    def seconds(choice: Launch) -> float:
        try:
            return seconds_in_a_chain(
                OP, partial(launched, choice, **inputs.static), arguments, cost
            )
        except jax.errors.JaxRuntimeError as error:  # more shared memory than there is
            print(f"  {choice}: {str(error).splitlines()[0]}")
            return math.inf

    best = launch.by_rule(arguments[0], arguments[1], arguments[3])
    least = seconds(best)
    print(f"{case.name}: {least * 1e6:.1f} us by the rule, {best}", flush=True)
    for name, values in VALUES:
        for choice in neighbours(best, name, values):
            if (taken := seconds(choice)) < WORTHWHILE * least:
                best, least = choice, taken
    rate = cost.bytes / least / 1e9
    print(f"{case.name}: {least * 1e6:.1f} us, {rate:.0f} GB/s, {best}", flush=True)
    return best


def main() -> None:
    """Tune, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="JSON file; by default beside the op")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"bench.tune times Triton kernels and needs a GPU, not {device}")
    output = options.output or Path(str(tuned_file(OP.name, device.device_kind)))
    cases = [case for case in bench_cases(OP, options.case) if "gpu" in case.tags]
    choices = {case.name: asdict(tune(case)) for case in cases}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(choices, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
