"""Named calls of ssd_decode on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_prefill.cases import (
    FALCON_H1_1_5B,
    FEW_FALCON_H1,
    FEW_NEMOTRON,
    GRANITE_4_H_TINY,
    MINIMAX_TEXT,
    TINY,
    WIDE,
    SsdHeads,
    token_arrays,
)
from pallas_kernels.ssd_prefill.ref import NO_LIMIT


@dataclass(frozen=True)
class DecodeCase:
    """Rows at these positions, and ``padding`` rows behind. With ``kept`` every third row saves its
    state; ``constant`` as in ``SsdCase``. ``width`` is W, 0 without a convolution.
    """

    name: str
    positions: tuple[int, ...]
    padding: int = 0
    kept: bool = False
    constant: bool = False
    limits: tuple[float, float] = NO_LIMIT
    width: int = 4
    heads: SsdHeads = TINY
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


CASES = (
    DecodeCase("tiny_edges", (0, 1, 63, 64, 1000), padding=2, kept=True),
    DecodeCase("tiny_constant", (0, 5), constant=True, width=0, heads=SsdHeads(2, 16, 2, 16)),
    DecodeCase("tiny_limits", (0, 5), limits=(0.3, 2.0), width=3, heads=SsdHeads(2, 16, 1, 32)),
    DecodeCase("wide_bf16", (0, 2, 77), padding=2, heads=WIDE, dtype="bfloat16"),
    *(
        DecodeCase(
            f"{name}_{dtype}",
            (0, 2, 77, 64, 1056),
            padding=2,
            kept=True,
            heads=heads,
            dtype=dtype,
            tags=("full",),
        )
        for name, heads in (("few_falcon_h1", FEW_FALCON_H1), ("few_nemotron", FEW_NEMOTRON))
        for dtype in ("bfloat16", "float32")
    ),
    *(
        DecodeCase(
            f"{model}_b{rows}",
            (1056,) * rows,
            constant=heads is MINIMAX_TEXT,
            width=0 if heads is MINIMAX_TEXT else 4,
            heads=heads,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for model, heads in (
            ("falcon_h1_1_5b", FALCON_H1_1_5B),
            ("granite_4_h_tiny", GRANITE_4_H_TINY),
            ("minimax_text", MINIMAX_TEXT),
        )
        for rows in (1, 8, 64)
    ),
)


def build(case: DecodeCase, seed: int) -> Inputs:
    """Inputs of a case. States of sequences that begin hold NaN, and so do those of no row, and
    inputs of the convolution that precede a sequence's first token.

    Padding rows are equal, as they write the same states in any order.
    """
    rng, sizes = np.random.default_rng(seed), case.heads
    real, num_rows = len(case.positions), len(case.positions) + case.padding
    positions = np.zeros(num_rows, np.int32)
    positions[:real] = case.positions
    # one is the sink, one is a spare
    places = rng.permutation(real + 2 + real * case.kept).astype(np.int32)
    rows = np.full(num_rows, places[-1], np.int32)
    rows[:real] = places[:real]
    tokens = token_arrays(rng, num_rows, sizes, case.dtype, constant=case.constant)
    for array in (tokens["mixed"], tokens["steps"]):
        if array is not None:
            array[real:] = array[-1]
    shape = (sizes.num, sizes.width, sizes.state_dim)
    states = np.full((len(places), *shape), np.nan, np.float32)
    for row, position in zip(rows[:real], positions[:real], strict=True):
        if position:
            states[row] = rng.standard_normal(shape, np.float32)
    args: dict[str, Any] = {**tokens, "states": states, "positions": positions, "rows": rows}
    if width := case.width:
        convs = np.full((len(places), width, sizes.channels), np.nan, np.float32)
        for row, position in zip(rows[:real], positions[:real], strict=True):
            for before in range(max(position - width + 1, 0), position):
                convs[row, before % width] = rng.standard_normal(sizes.channels)
        args["conv"] = (0.5 * rng.standard_normal((width, sizes.channels))).astype(case.dtype)
        args["convs"] = convs.astype(case.dtype)
        if case.kept:
            args["conv_bias"] = rng.standard_normal(sizes.channels).astype(case.dtype)
    if case.kept:
        args["keeps"] = rows.copy()
        args["keeps"][:real:3] = places[real : real + len(range(0, real, 3))]
    return Inputs((SsdDecodeArgs(**args, limits=case.limits),))


def observable(outputs: object) -> object:
    """All, with NaN, which no row wrote, as 0."""
    out, *stored = outputs  # type: ignore[misc]
    return out, *(None if x is None else jnp.where(jnp.isnan(x), 0, x) for x in stored)


def cost(case: DecodeCase) -> Cost:
    """States read and written, tokens, steps and inputs of convolutions read, outputs and a token's
    inputs written.
    """
    sizes, rows, width = case.heads, len(case.positions), case.width
    item = np.dtype("float32").itemsize if case.dtype == "float32" else 2
    tokens = item * (sizes.channels * (1 + width) + sizes.num + sizes.num * sizes.width)
    return Cost(
        bytes=rows * (2 * 4 * sizes.state + tokens),
        flops=rows * (6 * sizes.state + 2 * width * sizes.channels),
    )
