"""Runs the kernels that sort tokens by expert in Triton's interpreter:
``python -m kit.experts_sort_sweep``.

A process of its own, with TRITON_INTERPRET=1, since a process either interprets kernels or compiles
them. Prints one JSON object: for each case the names of results that differ from the definition's.
"""

import json
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.experts import tiles, triton

WIDTH = 40  # of tokens
# Name: tokens, choices of a token, experts, rows of a tile, and whether some choices are outside.
CASES: dict[str, tuple[int, int, int, int, bool]] = {
    "one_token": (1, 8, 128, 8, False),
    "odd_experts_outside": (33, 3, 7, 16, True),
    "one_expert": (200, 1, 1, 64, False),
    "counted_first": (400, 3, 13, 64, True),
}


def differences(tokens: int, chosen: int, experts: int, width: int, outside: bool) -> list[str]:
    """Names of what differs: parts of the tiles, and the sum of tokens that were spread."""
    rng = np.random.default_rng(0)
    choices = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    if outside:
        values = np.array([-1, experts, 2**30], np.int32)
        is_outside = rng.random(choices.shape) < 0.3
        choices = np.where(is_outside, rng.choice(values, choices.shape), choices)
    found = triton.tiles_of(jnp.asarray(choices), experts, width)
    expected = tiles.tiles_of(jnp.asarray(choices), experts, width)
    rows = np.asarray(expected.rows)
    in_use = np.arange(width) < rows[:, None]
    kept: dict[str, Any] = {"expert": rows > 0, "pairs": in_use}
    names = []
    for name in tiles.Tiles._fields:
        one, other = (np.asarray(getattr(result, name)) for result in (found, expected))
        if name in kept:
            one, other = one[kept[name]], other[kept[name]]
        if not np.array_equal(one, other):
            names.append(name)
    x = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    weights = rng.random(choices.shape).astype(np.float32)
    spread = triton.spread(jnp.asarray(x), found.place, rows.size * width)
    total = triton.gather(spread, found.place, jnp.asarray(weights))
    inside = (choices >= 0) & (choices < experts)
    whole = x * np.where(inside, weights, 0).sum(axis=1, keepdims=True)
    if not np.allclose(total, whole, rtol=1e-5, atol=1e-5):
        names.append("sum")
    return names


if __name__ == "__main__":
    with in_place_of_triton_call(interpreted):
        json.dump({name: differences(*case) for name, case in CASES.items()}, sys.stdout)
