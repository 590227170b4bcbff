"""Named calls of delta_prefill on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.chunk_scan import CHUNK


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer: of keys, of values, and their widths."""

    num_k: int
    num_v: int
    k_dim: int
    v_dim: int

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.num_v * self.k_dim * self.v_dim


TINY = DeltaHeads(2, 4, 32, 16)
QWEN3_5_4B = DeltaHeads(16, 32, 128, 128)
QWEN3_5_27B = DeltaHeads(16, 48, 128, 128)
KIMI_LINEAR = DeltaHeads(32, 32, 128, 128)  # with a decay of each channel


@dataclass(frozen=True)
class DeltaCase:
    """Rows of so many tokens; ``starts`` are the positions of the first ones, with ``padding``
    tokens behind. Each row saves its state after each number of tokens in ``saves``, if it has
    them. With ``repeated`` all tokens of a row have the same key and no decay; ``by_channel``: see
    ``DeltaPrefillArgs``. With ``strong`` single channels forget all in each of 64 tokens.
    """

    name: str
    lens: tuple[int, ...]
    starts: tuple[int, ...] = ()
    padding: int = 0
    saves: tuple[int, ...] = ()
    repeated: bool = False
    by_channel: bool = False
    strong: bool = False
    heads: DeltaHeads = TINY
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


_STEPS = tuple(
    DeltaCase(f"qwen3_5_{model}_t{t}", (t,), heads=heads, dtype="bfloat16", tags=("bench", "gpu"))
    for model, heads in (("4b", QWEN3_5_4B), ("27b", QWEN3_5_27B))
    for t in (512, 1024, 8192)
) + tuple(
    DeltaCase(
        f"kimi_linear_t{t}",
        (t,),
        by_channel=True,
        heads=KIMI_LINEAR,
        dtype="bfloat16",
        tags=("bench", "gpu"),
    )
    for t in (512, 8192)
)
CASES = (
    DeltaCase(
        "tiny_edges",
        (1, 63, 64, 0, 65, 130),
        starts=(0, 64, 0, 0, 128, 64),
        padding=5,
        saves=(64, 128),
    ),
    DeltaCase(
        "tiny_channels",
        (1, 63, 0, 130),
        starts=(0, 64, 0, 64),
        padding=5,
        saves=(64, 128),
        by_channel=True,
    ),
    DeltaCase("tiny_strong_channels", (200,), starts=(64,), by_channel=True, strong=True),
    DeltaCase("tiny_channels_bf16", (1, 130), saves=(64,), by_channel=True, dtype="bfloat16"),
    DeltaCase("tiny_one_token", (1,), starts=(192,)),
    DeltaCase("tiny_only_padding", (0,), padding=16, tags=("full",)),
    DeltaCase("tiny_repeated", (200,), repeated=True),
    DeltaCase("tiny_same_key_bf16", (200,), repeated=True, dtype="bfloat16"),
    DeltaCase("tiny_saves_bf16", (130, 40), starts=(64, 0), saves=(64,), dtype="bfloat16"),
    DeltaCase(
        "qwen3_5_4b_bf16",
        (70, 200, 0, 64),
        starts=(0, 64, 0, 128),
        padding=50,
        saves=(64,),
        heads=QWEN3_5_4B,
        dtype="bfloat16",
        tags=("full",),
    ),
    DeltaCase(
        "qwen3_5_4b_repeated_bf16",
        (300,),
        repeated=True,
        heads=QWEN3_5_4B,
        dtype="bfloat16",
        tags=("full",),
    ),
    DeltaCase(
        "kimi_linear_bf16",
        (70, 0, 64),
        starts=(64, 0, 128),
        padding=50,
        saves=(64,),
        by_channel=True,
        heads=KIMI_LINEAR,
        dtype="bfloat16",
        tags=("full",),
    ),
    DeltaCase(
        "qwen3_5_4b_32x256", (256,) * 32, heads=QWEN3_5_4B, dtype="bfloat16", tags=("bench", "gpu")
    ),
    *_STEPS,
)


def build(case: DeltaCase, seed: int) -> Inputs:
    """Inputs of a case: unit keys, decays and betas as models have them.

    Padding tokens hold NaN, and so do states that no row reads.
    """
    rng, sizes, dtype = np.random.default_rng(seed), case.heads, jnp.dtype(case.dtype)
    starts_at = np.asarray(case.starts or (0,) * len(case.lens), np.int32)
    num_rows, num_tokens = len(case.lens), sum(case.lens) + case.padding
    query_start_loc = np.cumsum((0, *case.lens)).astype(np.int32)

    def vectors(heads: int, width: int) -> np.ndarray:
        return rng.standard_normal((num_tokens, heads, width), np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (
        unit(vectors(sizes.num_k, sizes.k_dim)) * sizes.k_dim**-0.5,
        unit(vectors(sizes.num_k, sizes.k_dim)),
    )
    v = vectors(sizes.num_v, sizes.v_dim)
    decays = (num_tokens, sizes.num_v, *[sizes.k_dim] * case.by_channel)
    log_decay = -np.exp(rng.uniform(-4, 1, decays)).astype(np.float32)
    beta = rng.uniform(0, 1, (num_tokens, sizes.num_v)).astype(np.float32)
    if case.strong:
        log_decay[64:128, :, ::3] = -20
    if case.repeated:
        k[:], log_decay[:], beta[:] = k[:1], 0, 1
    for array in (q, k, v, log_decay, beta):
        array[num_tokens - case.padding :] = np.nan
    # rows of states: one that each row reads, one that it writes, those that it saves, and a spare
    num_saves = len(case.saves)
    rows = rng.permutation(num_rows * (2 + num_saves) + 1).astype(np.int32)
    reads, writes = rows[:num_rows], rows[num_rows : 2 * num_rows]
    states = np.full((len(rows), sizes.num_v, sizes.k_dim, sizes.v_dim), np.nan, np.float32)
    states[reads[starts_at > 0]] = rng.standard_normal(states.shape[1:], np.float32)
    save_tokens = save_rows = None
    if case.saves:
        save_rows = rows[2 * num_rows : -1].reshape(num_rows, num_saves)
        wanted = np.asarray(case.saves, np.int32)
        has = wanted[None] <= np.asarray(case.lens)[:, None]
        save_tokens = np.where(has, wanted, 0).astype(np.int32)
    args: dict[str, Any] = {
        "q": q.astype(dtype),
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "log_decay": log_decay,
        "beta": beta,
        "states": states,
        "query_start_loc": query_start_loc,
        "begins": starts_at,
        "reads": reads,
        "writes": writes,
        "save_tokens": save_tokens,
        "save_rows": save_rows,
    }
    return Inputs((DeltaPrefillArgs(**args),))


def observable(outputs: object) -> object:
    """All; states that no row stores, NaN, become 0, so that a stray write is a difference."""
    out, states = outputs  # type: ignore[misc]
    return out, jnp.where(jnp.isnan(states), 0, states)


def cost(case: DeltaCase) -> Cost:
    """Tokens read and written once, states read and written; products of chunks of 64."""
    sizes, tokens = case.heads, sum(case.lens)
    item = jnp.dtype(case.dtype).itemsize
    widths = 2 * sizes.num_k * sizes.k_dim + 2 * sizes.num_v * sizes.v_dim
    gates = sizes.num_v * (1 + (sizes.k_dim if case.by_channel else 1))
    moved = tokens * (widths * item + 4 * gates) + 2 * 4 * len(case.lens) * sizes.state
    # of a token and value head: q.k and k.k of the chunk, the inverse times keys and values, the
    # scores times the changes, and three products with the state
    products = CHUNK * (2 * sizes.k_dim + sizes.k_dim + 2 * sizes.v_dim)
    products += 3 * sizes.k_dim * sizes.v_dim
    return Cost(bytes=moved, flops=2 * tokens * sizes.num_v * products)
