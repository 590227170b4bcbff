"""Named calls of delta_decode on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.delta_prefill.cases import (
    KIMI_LINEAR,
    QWEN3_5_4B,
    QWEN3_5_27B,
    TINY,
    DeltaHeads,
)
from pallas_kernels.harness.registry import Cost, Inputs


@dataclass(frozen=True)
class DecodeCase:
    """Rows at these positions, and ``padding`` rows behind. With ``kept`` every third row saves its
    states. ``width`` is W; with ``by_channel`` the decays and the gate are those of Kimi Linear.
    """

    name: str
    positions: tuple[int, ...]
    padding: int = 0
    kept: bool = False
    by_channel: bool = False
    heads: DeltaHeads = TINY
    dtype: str = "float32"
    width: int = 4
    beta_scale: float = 1.0
    tags: tuple[str, ...] = ("ci",)

    @property
    def channels(self) -> int:
        """C."""
        sizes = self.heads
        return 2 * sizes.num_k * sizes.k_dim + sizes.num_v * sizes.v_dim

    @property
    def decays(self) -> int:
        """G."""
        return self.heads.num_v * (self.heads.k_dim if self.by_channel else 1)


CASES = (
    DecodeCase("tiny_edges", (0, 1, 2, 3, 4, 63, 64, 1000), padding=2),
    DecodeCase("tiny_one_row", (5,)),
    DecodeCase("tiny_kept", (63, 5, 127, 191, 0), padding=1, kept=True),
    DecodeCase("tiny_channels", (0, 1, 4, 63, 64), padding=2, kept=True, by_channel=True),
    DecodeCase("tiny_channels_bf16", (0, 2, 77), padding=2, by_channel=True, dtype="bfloat16"),
    DecodeCase(
        "odd_channels",
        (0, 2, 9),
        padding=1,
        kept=True,
        by_channel=True,
        heads=DeltaHeads(2, 4, 20, 50),
        width=3,
        tags=("ci", "cpu"),
    ),
    DecodeCase(
        "odd_sizes",
        (0, 1, 2, 9),
        padding=2,
        kept=True,
        heads=DeltaHeads(2, 6, 20, 150),
        width=3,
        tags=("ci", "cpu"),
    ),
    DecodeCase("tiny_betas", (0, 2, 77), padding=2, beta_scale=2.0, tags=("ci", "cpu")),
    DecodeCase("tiny_rows_bf16", (0, 2, 77), padding=2, dtype="bfloat16"),
    DecodeCase(
        "qwen3_5_4b_bf16",
        (0, 2, 77),
        padding=2,
        heads=QWEN3_5_4B,
        dtype="bfloat16",
        tags=("full",),
    ),
    *(
        DecodeCase(
            f"qwen3_5_{model}_b{rows}",
            (1056,) * rows,
            heads=heads,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for model, heads in (("4b", QWEN3_5_4B), ("27b", QWEN3_5_27B))
        for rows in (1, 8, 64)
    ),
    *(
        DecodeCase(
            f"kimi_linear_b{rows}",
            (1056,) * rows,
            by_channel=True,
            heads=KIMI_LINEAR,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for rows in (1, 64)
    ),
)


def build(case: DecodeCase, seed: int) -> Inputs:
    """Inputs of a case. What precedes a sequence's first token holds NaN, and so do other rows.

    Padding rows are equal, as they write the same states in any order.
    """
    rng, sizes, dtype = np.random.default_rng(seed), case.heads, jnp.dtype(case.dtype)
    real, num_rows = len(case.positions), len(case.positions) + case.padding
    width = case.width
    positions = np.zeros(num_rows, np.int32)
    positions[:real] = case.positions
    # one is the sink, one is a spare
    places = rng.permutation(real + 2 + real * case.kept).astype(np.int32)
    rows = np.full(num_rows, places[-1], np.int32)
    rows[:real] = places[:real]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    states = np.full((len(places), sizes.num_v, sizes.k_dim, sizes.v_dim), np.nan, np.float32)
    convs = np.full((len(places), width, case.channels), np.nan, np.float32)
    for row, position in zip(rows[:real], positions[:real], strict=True):
        if position:
            states[row] = normal(*states.shape[1:])
        for before in range(max(position - width + 1, 0), position):
            convs[row, before % width] = normal(case.channels)

    def tokens(width: int) -> np.ndarray:
        values = normal(num_rows, width).astype(dtype)
        values[real:] = values[-1]
        return values

    args: dict[str, Any] = {
        "qkv": tokens(case.channels),
        "gates": tokens(sizes.num_v + case.decays),
        "z": tokens(sizes.num_v * sizes.v_dim),
        "conv": (0.5 * normal(width, case.channels)).astype(dtype),
        "decay": rng.uniform(-2, 1, sizes.num_v + case.decays).astype(np.float32),
        "norm": (1 + 0.1 * normal(sizes.v_dim)).astype(dtype),
        "states": states,
        "convs": convs.astype(dtype),
        "positions": positions,
        "rows": rows,
    }
    if case.kept:
        args["keeps"] = rows.copy()
        args["keeps"][:real:3] = places[real : real + len(range(0, real, 3))]
    z_act = "sigmoid" if case.by_channel else "silu"
    return Inputs((DeltaDecodeArgs(**args, eps=1e-6, z_act=z_act, beta_scale=case.beta_scale),))


def observable(outputs: object) -> object:
    """All, with NaN, which no row wrote, as 0."""
    out, *stored = outputs  # type: ignore[misc]
    return out, *(jnp.where(jnp.isnan(array), 0, array) for array in stored)


def cost(case: DecodeCase) -> Cost:
    """States read and written, channels and gates read, their inputs and outputs written."""
    sizes, rows, item = case.heads, len(case.positions), jnp.dtype(case.dtype).itemsize
    values = sizes.num_v * sizes.v_dim
    tokens = (case.width + 1) * case.channels + sizes.num_v + case.decays + 2 * values
    return Cost(
        bytes=rows * (2 * 4 * sizes.state + tokens * item),
        flops=rows * (7 * sizes.state + 2 * case.width * case.channels),
    )
