"""Named calls of short_conv on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.short_conv.ref import ShortConvArgs

FALCON_H1_1_5B = 3584  # channels: 48 * 64 + 2 * 256
QWEN3_5_4B, QWEN3_5_27B = 8192, 10240  # channels: 2 * 16 * 128 + 32 * 128 or 48 * 128


@dataclass(frozen=True)
class ConvCase:
    """Rows of so many tokens; ``starts`` are the positions of the first ones, with ``padding``
    tokens behind. Each row saves its inputs after each number of tokens in ``saves``, if it has
    them. Every other row stores its last inputs where it read. ``x`` has ``more`` channels.
    """

    name: str
    lens: tuple[int, ...]
    starts: tuple[int, ...] = ()
    padding: int = 0
    saves: tuple[int, ...] = ()
    channels: int = 72
    more: int = 0
    width: int = 4
    bias: bool = False
    silu: bool = True
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


# rows of few tokens at each of the first positions, and later
_LENS = (1, 2, 3, 4, 5, 64, 0, 1, 2, 3, 4, 5, 1, 2, 3, 20, 1, 2, 3, 33)
_STARTS = (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 64, 64, 65, 66)
_STEPS = tuple(
    ConvCase(f"qwen3_5_{model}_t{t}", (t,), channels=size, dtype="bfloat16", tags=("bench", "gpu"))
    for model, size in (("4b", QWEN3_5_4B), ("27b", QWEN3_5_27B))
    for t in (512, 1024, 8192)
)
CASES = (
    ConvCase("edges", _LENS, _STARTS, padding=21),
    ConvCase("edges_bf16", _LENS, _STARTS, padding=21, dtype="bfloat16"),
    ConvCase("saves", _LENS, _STARTS, padding=21, saves=(1, 2, 3, 5, 16), more=8),
    ConvCase("one_token", (1,), starts=(130,), channels=300),
    ConvCase("only_padding", (0,), padding=16),
    ConvCase("two_taps", (1, 2, 40), starts=(1, 64, 0), saves=(1,), width=2),
    ConvCase("three_taps", (1, 2, 40), starts=(1, 64, 5), saves=(2,), width=3),
    ConvCase("bias", (1, 2, 40), starts=(1, 64, 5), bias=True),
    ConvCase("no_silu", (1, 2, 40), (1, 64, 5), saves=(2,), width=3, silu=False),
    ConvCase(
        "qwen3_5_4b",
        (70, 200, 0, 64, 1),
        starts=(0, 64, 0, 128, 3),
        padding=50,
        saves=(64,),
        channels=QWEN3_5_4B,
        more=4096,
        dtype="bfloat16",
        tags=("full",),
    ),
    ConvCase(
        "qwen3_5_4b_32x256",
        (256,) * 32,
        channels=QWEN3_5_4B,
        dtype="bfloat16",
        tags=("bench", "gpu"),
    ),
    *(
        ConvCase(
            f"falcon_h1_1_5b_t{t}",
            (t,),
            channels=FALCON_H1_1_5B,
            bias=True,
            dtype="bfloat16",
            tags=("bench", "gpu"),
        )
        for t in (1024, 8192)
    ),
    *_STEPS,
)


def build(case: ConvCase, seed: int) -> Inputs:
    """Inputs of a case. NaN are tokens of padding, channels of no weight, states that no row reads,
    and of the others what is not one of the W - 1 inputs before a row.
    """
    rng, dtype, width = np.random.default_rng(seed), jnp.dtype(case.dtype), case.width
    begins = np.asarray(case.starts or (0,) * len(case.lens), np.int32)
    num_rows, num_tokens = len(case.lens), sum(case.lens) + case.padding
    x = rng.standard_normal((num_tokens, case.channels + case.more), np.float32)
    x[num_tokens - case.padding :], x[:, case.channels :] = np.nan, np.nan
    weights = rng.standard_normal((width, case.channels), np.float32)
    # rows of the state: one that each row reads, one that it may write, those that it saves, and a
    # spare
    num_saves = len(case.saves)
    rows = rng.permutation(num_rows * (2 + num_saves) + 1).astype(np.int32)
    reads, writes = rows[:num_rows], rows[num_rows : 2 * num_rows].copy()
    writes[::2] = reads[::2]
    kept = np.full((len(rows), width, case.channels), np.nan, np.float32)
    for begin, read in zip(begins, reads, strict=True):
        for position in range(max(begin - width + 1, 0), begin):
            kept[read, position % width] = rng.standard_normal(case.channels, np.float32)
    save_tokens = save_rows = None
    if case.saves:
        save_rows = rows[2 * num_rows : -1].reshape(num_rows, num_saves)
        wanted = np.asarray(case.saves, np.int32)
        has = wanted[None] <= np.asarray(case.lens)[:, None]
        save_tokens = np.where(has, wanted, 0).astype(np.int32)
    args: dict[str, Any] = {
        "x": x.astype(dtype),
        "weights": weights.astype(dtype),
        "kept": kept.astype(dtype),
        "query_start_loc": np.cumsum((0, *case.lens)).astype(np.int32),
        "begins": begins,
        "reads": reads,
        "writes": writes,
        "save_tokens": save_tokens,
        "save_rows": save_rows,
        "silu": case.silu,
    }
    if case.bias:
        args["bias"] = rng.standard_normal(case.channels).astype(dtype)
    return Inputs((ShortConvArgs(**args),))


def observable(outputs: object) -> object:
    """All; states that no row stores, NaN, become 100, so that a stray write is a difference, and
    so is NaN where zeros belong.
    """
    out, kept = outputs  # type: ignore[misc]
    return out, jnp.where(jnp.isnan(kept), 100, kept)


def cost(case: ConvCase) -> Cost:
    """Inputs read and outputs written once, and the inputs that rows keep; two operations a tap."""
    tokens, item = sum(case.lens), jnp.dtype(case.dtype).itemsize
    moved = 2 * tokens + case.width * (1 + 2 * len(case.lens))
    return Cost(bytes=moved * case.channels * item, flops=2 * tokens * case.channels * case.width)
