"""Thresholds that sample's Triton kernels find: ``python -m kit.sample_thresholds``.

A token that is seldom drawn rarely reveals a threshold that is slightly wrong, so this checks the
thresholds themselves. A process of its own, with TRITON_INTERPRET=1, as ``kit.triton_sweep``.
Prints one JSON object: for each case the rows with a wrong threshold.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from triton import jit
from triton import language as tl

from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.sample import launch, triton
from pallas_kernels.sample.cases import HARD, MIXED, Draw, SampleCase, build
from pallas_kernels.sample.levels import least_of
from pallas_kernels.sample.ref import SampleArgs

ROUNDING = 2e-6  # of a sum of probabilities
REACH = 19.5  # below the most likely token, where noise cannot lift another token above it
NUCLEI = (
    Draw(0.3, top_p=0.9),  # few tokens, then more and more
    Draw(0.4, top_p=0.99),
    Draw(1.0, top_p=0.1),
    Draw(1.0, top_p=0.9),
    Draw(1.0, top_p=0.999),
)
SMALL = (
    SampleCase("one_tile", 1001, MIXED, 8),
    SampleCase("equal_logits", 1001, MIXED, 8, grid=1.0),
    SampleCase("mostly_masked", 1001, MIXED, 8, masked=0.97),
)
LARGE = (
    SampleCase("many_tiles", 9001, (*MIXED, *HARD), 14),
    SampleCase("flat", 9001, HARD, 6, spread=0.1),
    SampleCase("nucleus", 9001, NUCLEI, 5),
)


def thresholds(args: SampleArgs) -> np.ndarray:  # float32[B]
    """The threshold of each row; a greedy row's has no meaning."""
    seen = {}

    def stand_in(*values: Any, kernel: Any, **params: Any) -> Any:
        seen[kernel.__name__] = out = interpreted(*values, kernel=kernel, **params)
        return out

    with in_place_of_triton_call(stand_in):
        triton.sample(jax.tree.map(jnp.asarray, args))
    chosen, bounds = map(np.asarray, seen["choose_among_few"][:2])
    return np.where(chosen >= 0, bounds[:, 1], seen["find_threshold"][0])


def is_right(found: float, logits: np.ndarray, heat: float, k: int, p: float, share: float) -> bool:
    """True if a row's threshold keeps the same tokens as the definition."""
    scaled = logits / heat
    top = scaled.max()
    weights = np.exp(scaled.astype(np.float64) - top)
    floor = float(np.sort(scaled)[-k]) if 0 < k < scaled.size else -np.inf
    floor = max(floor, float(top + np.log(share)) if share > 0 else -np.inf)
    if found < floor:  # too low, unless the reach of noise binds
        return False
    if p < 1:
        needed = p * weights[scaled >= floor].sum()
        enough = weights[scaled >= found].sum() >= needed * (1 - ROUNDING)
        return enough and weights[scaled > found].sum() <= needed * (1 + ROUNDING)
    return bool(found <= max(floor, top - REACH))


def wrong_rows(case: SampleCase) -> list[int]:
    """Rows of the case whose threshold is wrong."""
    (args,) = build(case, 0).args
    columns = zip(args.logits, args.temperature, args.top_k, args.top_p, args.min_p, strict=True)
    found = thresholds(args)
    return [
        row
        for row, (logits, heat, k, p, share) in enumerate(columns)
        if heat > 0 and not is_right(found[row], logits, heat, k, p, share)
    ]


@jit
def _least(levels: Any, heats: Any, found: Any) -> None:  # float32[N] each
    at = tl.program_id(0)
    tl.store(found + at, least_of(tl.load(levels + at), tl.load(heats + at)))


def wrong_leasts() -> list[int]:
    """Indices of levels with a wrong least logit; some of the levels equal a logit."""
    rng = np.random.default_rng(0)
    logits = np.append(rng.standard_normal(400) * 10, [1e-30, -1e-30, 65504, -65504, 1e30])
    heats = rng.choice([0.7, 1, 1.3, 1e-3, 50, 2 / 3], logits.size).astype(np.float32)
    levels = logits.astype(np.float32) / heats
    levels[::2] = np.nextafter(levels[::2], np.float32(np.inf))
    out_type = jax.ShapeDtypeStruct(levels.shape, levels.dtype)
    args = jnp.asarray(levels), jnp.asarray(heats)
    found = np.asarray(interpreted(*args, kernel=_least, out_type=out_type, grid=levels.shape))
    below = np.nextafter(found, np.float32(-np.inf))
    return np.flatnonzero((found / heats < levels) | (below / heats >= levels)).tolist()


if __name__ == "__main__":
    problems: dict[str, list[int]] = {"least_of": wrong_leasts()}
    problems |= {case.name: wrong_rows(case) for case in (*SMALL, *LARGE)}
    with patch.object(launch, "CTAS_PER_SM", 0):  # one CTA per row, as in a large batch
        problems |= {f"{case.name}/alone": wrong_rows(case) for case in LARGE}
    with patch.object(launch, "FEW", 1):  # all launches, also for rows that need only one
        problems |= {f"{case.name}/all_launches": wrong_rows(case) for case in (*SMALL, *LARGE)}
    json.dump(problems, sys.stdout)
