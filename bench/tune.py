"""Finds the fastest launch of the Triton kernel of paged_decode for the steps of a GPU.

Run on the GPU, from the repository root: ``python -m bench.tune [--case TEXT] [--output FILE]``.
From the rule's choice it varies one value after the other, keeps what is faster, and writes the
choices beside the op, where calls of the same shapes find them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.kernels import bench_cases, seconds_in_a_chain
from pallas_kernels.paged_decode import launch
from pallas_kernels.paged_decode.api import OP
from pallas_kernels.paged_decode.launch import Launch
from pallas_kernels.shapes import PagedCase
from pallas_kernels.tuned import read_choices, tuned_file

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


def tune(cases: Sequence[PagedCase]) -> Launch:
    """The fastest choice found for cases whose calls only differ in their contexts.

    They must share one, since contexts are data: the sum of their seconds per byte counts.
    """
    from pallas_kernels.paged_decode.triton import launched  # wants Triton, hence a GPU

    calls = [OP.build(case, 0) for case in cases]
    arrays = [[jnp.asarray(x) for x in inputs.args] for inputs in calls]
    costs = [OP.cost(case) for case in cases]

    def score(choice: Launch) -> float:
        total = 0.0
        for inputs, arguments, cost in zip(calls, arrays, costs, strict=True):
            function = partial(launched, choice, **inputs.static)
            try:
                total += seconds_in_a_chain(OP, function, arguments, cost) / cost.bytes
            except jax.errors.JaxRuntimeError as error:  # more shared memory than there is
                print(f"  {choice}: {str(error).splitlines()[0]}")
                return math.inf
        return total

    q, k_pages, _, page_table, _ = arrays[0]
    best = launch.by_rule(q, k_pages, page_table)
    least = by_rule = score(best)
    for name, values in VALUES:
        for choice in neighbours(best, name, values):
            if (taken := score(choice)) < WORTHWHILE * least:
                best, least = choice, taken
    rates = (len(cases) / x / 1e9 for x in (by_rule, least))
    print(
        "{}: {:.0f} GB/s by the rule, {:.0f} by {}".format(cases[0].name, *rates, best), flush=True
    )
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
    groups: dict[Hashable, list[PagedCase]] = {}
    for case in bench_cases(OP, options.case):
        if isinstance(case, PagedCase) and "gpu" in case.tags:
            groups.setdefault(launch.shapes_of(case), []).append(case)
    found = {cases[0].name: asdict(tune(cases)) for cases in groups.values()}
    choices = read_choices(output) | found  # cases that were not tuned now keep what they had
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(choices, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
