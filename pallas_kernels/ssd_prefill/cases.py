"""Named calls of ssd_prefill on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.chunk_scan import CHUNK
from pallas_kernels.ssd_prefill.ref import NO_LIMIT, SsdPrefillArgs


@dataclass(frozen=True)
class SsdHeads:
    """The heads of a layer, their width, their groups, and the columns of a state."""

    num: int
    width: int
    groups: int
    state_dim: int

    @property
    def channels(self) -> int:
        """C."""
        return self.num * self.width + 2 * self.groups * self.state_dim

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.num * self.width * self.state_dim


TINY = SsdHeads(4, 32, 2, 16)
FALCON_H1_1_5B = SsdHeads(48, 64, 1, 256)
GRANITE_4_H_TINY = SsdHeads(48, 64, 1, 128)
NEMOTRON_NANO_9B = SsdHeads(128, 80, 8, 128)
MINIMAX_TEXT = SsdHeads(64, 128, 64, 128)  # lightning attention
# Of these heads the first ones, so that the definition takes seconds.
FEW_FALCON_H1 = SsdHeads(4, 64, 1, 256)
FEW_NEMOTRON = SsdHeads(16, 80, 8, 128)
FEW_NARROW = SsdHeads(8, 80, 2, 64)
WIDE = SsdHeads(2, 80, 1, 16)


@dataclass(frozen=True)
class SsdCase:
    """Rows of so many tokens; ``starts`` are the positions of the first ones, with ``padding``
    tokens behind. Each row saves its state after each number of tokens in ``saves``, if it has
    them. With ``constant`` steps are 1, and some heads hardly decay, as in lightning attention;
    with ``strong`` some tokens forget all.
    """

    name: str
    lens: tuple[int, ...]
    starts: tuple[int, ...] = ()
    padding: int = 0
    saves: tuple[int, ...] = ()
    constant: bool = False
    strong: bool = False
    limits: tuple[float, float] = NO_LIMIT
    heads: SsdHeads = TINY
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


_LENS = (1, 3, 63, 64, 0, 65, 129, 300)
_STARTS = (0, 64, 64, 0, 0, 128, 0, 64)
_STEPS = tuple(
    SsdCase(f"{model}_t{t}", (t,), heads=heads, dtype="bfloat16", tags=("bench", "gpu"))
    for model, heads in (("falcon_h1_1_5b", FALCON_H1_1_5B), ("granite_4_h_tiny", GRANITE_4_H_TINY))
    for t in (512, 1024, 8192)
)
CASES = (
    SsdCase("tiny_edges", (1, 63, 64, 0, 65, 130), (0, 64, 0, 0, 128, 64), 5, saves=(64, 128)),
    SsdCase("tiny_constant", (1, 130), (64, 0), 3, constant=True, heads=SsdHeads(2, 16, 2, 16)),
    SsdCase("tiny_limits", (70,), limits=(0.3, 2.0), strong=True, heads=SsdHeads(2, 16, 1, 32)),
    SsdCase("wide_bf16", (1, 130), (64, 0), 3, saves=(64,), heads=WIDE, dtype="bfloat16"),
    SsdCase("tiny_one_token", (1,), starts=(192,), tags=("full",)),
    SsdCase("tiny_only_padding", (0,), padding=16, tags=("full",)),
    *(
        SsdCase(
            name,
            _LENS,
            starts=_STARTS,
            padding=70,
            saves=(64, 128),
            heads=heads,
            dtype=dtype,
            tags=("full",),
        )
        for name, heads, dtype in (
            ("few_falcon_h1_bf16", FEW_FALCON_H1, "bfloat16"),
            ("few_nemotron_bf16", FEW_NEMOTRON, "bfloat16"),
            ("few_narrow", FEW_NARROW, "float32"),
            ("wide", WIDE, "float32"),
        )
    ),
    SsdCase(
        "few_lightning_bf16",
        (70, 200),
        starts=(64, 0),
        saves=(64,),
        constant=True,
        heads=SsdHeads(4, 128, 4, 128),
        dtype="bfloat16",
        tags=("full",),
    ),
    *(
        SsdCase(f"{name}_{t}x{n}", (n,) * t, heads=heads, dtype="bfloat16", tags=("bench", "gpu"))
        for name, heads, t, n in (
            ("falcon_h1_1_5b", FALCON_H1_1_5B, 32, 256),
            ("nemotron_nano_9b", NEMOTRON_NANO_9B, 1, 1024),
        )
    ),
    SsdCase(
        "minimax_text_t1024",
        (1024,),
        constant=True,
        heads=MINIMAX_TEXT,
        dtype="bfloat16",
        tags=("bench", "gpu"),
    ),
    *_STEPS,
)


def token_arrays(
    rng: np.random.Generator,
    num_tokens: int,
    heads: SsdHeads,
    dtype: str,
    *,
    constant: bool,
) -> dict[str, Any]:
    """Inputs, steps and decays as models have them: steps from 0.001 to 0.1, and some larger."""
    mixed = rng.standard_normal((num_tokens, heads.channels), np.float32)
    mixed[:, heads.num * heads.width :] /= heads.state_dim**0.25  # so that outputs are of order 1
    steps = rng.standard_normal((num_tokens, heads.num), np.float32)
    biases = rng.uniform(-7, 0, heads.num)
    rates = np.log(rng.uniform(1, 16, heads.num))
    if constant:  # smaller inputs, since hundreds of tokens are added up
        steps, rates = None, rng.uniform(-17, 0, heads.num)
        mixed[:, : heads.num * heads.width] /= 4
    decay = np.stack((rates, biases, rng.standard_normal(heads.num))).astype(np.float32)
    steps = None if steps is None else steps.astype(dtype)
    return {"mixed": mixed.astype(dtype), "steps": steps, "decay": decay}


def build(case: SsdCase, seed: int) -> Inputs:
    """Inputs of a case. Padding tokens hold NaN, and so do states that no row reads."""
    rng, sizes = np.random.default_rng(seed), case.heads
    begins = np.asarray(case.starts or (0,) * len(case.lens), np.int32)
    num_rows, num_tokens = len(case.lens), sum(case.lens) + case.padding
    tokens = token_arrays(rng, num_tokens, sizes, case.dtype, constant=case.constant)
    if case.strong:
        tokens["steps"][20:40, ::2] = 30
    for array in (tokens["mixed"], tokens["steps"]):
        if array is not None:
            array[num_tokens - case.padding :] = np.nan
    # rows of states: one that each row reads, one that it writes, those that it saves, and a spare
    num_saves = len(case.saves)
    rows = rng.permutation(num_rows * (2 + num_saves) + 1).astype(np.int32)
    reads, writes = rows[:num_rows], rows[num_rows : 2 * num_rows]
    shape = (sizes.num, sizes.width, sizes.state_dim)
    states = np.full((len(rows), *shape), np.nan, np.float32)
    states[reads[begins > 0]] = rng.standard_normal(shape, np.float32)
    save_tokens = save_rows = None
    if case.saves:
        save_rows = rows[2 * num_rows : -1].reshape(num_rows, num_saves)
        wanted = np.asarray(case.saves, np.int32)
        has = wanted[None] <= np.asarray(case.lens)[:, None]
        save_tokens = np.where(has, wanted, 0).astype(np.int32)
    args = SsdPrefillArgs(
        **tokens,
        states=states,  # type: ignore[arg-type]
        query_start_loc=np.cumsum((0, *case.lens)).astype(np.int32),  # type: ignore[arg-type]
        begins=begins,  # type: ignore[arg-type]
        reads=reads,  # type: ignore[arg-type]
        writes=writes,  # type: ignore[arg-type]
        save_tokens=save_tokens,  # type: ignore[arg-type]
        save_rows=save_rows,  # type: ignore[arg-type]
        limits=case.limits,
    )
    return Inputs((args,))


def observable(outputs: object) -> object:
    """All; states that no row stores, NaN, become 0, so that a stray write is a difference."""
    out, states = outputs  # type: ignore[misc]
    return out, jnp.where(jnp.isnan(states), 0, states)


def cost(case: SsdCase) -> Cost:
    """Tokens read and written once, states read and written; products of chunks of 64."""
    sizes, tokens, item = case.heads, sum(case.lens), jnp.dtype(case.dtype).itemsize
    inner = sizes.num * sizes.width
    moved = tokens * item * (sizes.channels + sizes.num + inner)
    moved += 2 * 4 * len(case.lens) * sizes.state
    # of a token: b.c of the chunk in each group; the scores times the inputs, and two products with
    # the state in each head
    products = sizes.groups * CHUNK * sizes.state_dim + CHUNK * inner + 2 * sizes.state
    return Cost(bytes=moved, flops=2 * tokens * products)
