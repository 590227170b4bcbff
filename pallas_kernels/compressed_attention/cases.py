"""Named calls of compressed_attention on the shapes of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.compressed_attention.ref import CompressedAttentionArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.index_topk.cases import IndexCase
from pallas_kernels.index_topk.ref import NO_POSITION
from pallas_kernels.lib.shapes import Heads, paged_arrays


@dataclass(frozen=True, kw_only=True)
class CompressedCase(IndexCase):
    """Rows whose last tokens read ``near`` entries and, with a ratio, those of whole windows of
    ``ratio`` tokens: all of them, or with a choice ``top_k``, in any order.

    A row's pages of near entries begin with its first token's window, as an engine's nearly do.
    """

    heads: Heads = Heads(5, 1, 16)
    near: int = 6
    ratio: int = 0
    pieces: int = 1
    has_choice: bool = False

    @property
    def near_lens(self) -> tuple[int, ...]:
        """The near entries of each row."""
        pairs = zip(self.seq_lens, self.query_lens, strict=True)
        return tuple([min(seq, self.near + queries) for seq, queries in pairs])

    @property
    def num_whole(self) -> np.ndarray:  # int32[T]
        """The compressed entries that each token sees."""
        return np.maximum(self.lens, 0) // max(self.ratio, 1)

    @property
    def num_read(self) -> int:
        """The entries that all tokens read."""
        far = self.num_whole if self.ratio else np.zeros_like(self.num_whole)
        far = np.minimum(far, self.top_k) if self.has_choice else far
        return int((np.minimum(np.maximum(self.lens, 0), self.near) + far).sum())


V4_FLASH, V4_PRO, V4_FLASH_TP8 = (Heads(count, 1, 512) for count in (64, 128, 8))
WINDOW: Mapping[str, Any] = MappingProxyType({"near": 128})
ALL: Mapping[str, Any] = MappingProxyType({"near": 128, "ratio": 128, "pieces": 16})
CHOSEN: Mapping[str, Any] = MappingProxyType(
    {"near": 128, "ratio": 4, "top_k": 512, "has_choice": True}
)


def _steps() -> tuple[dict[str, Any], ...]:
    """Decode steps on a GPU and a prompt, of each kind of layer."""
    common = {"heads": V4_FLASH, "max_pages": 2048, "dtype": "bfloat16", "tags": ("bench", "gpu")}
    shapes = [
        (f"step_b{rows}_ctx{context}", (context,) * rows, (1,) * rows)
        for rows, context in ((1, 8192), (64, 8192))
    ]
    shapes.append(("t2048_ctx2048", (2048,), (2048,)))
    kinds = (("window", WINDOW), ("all", ALL), ("chosen", CHOSEN))
    return tuple(
        {"name": f"v4_{kind}_{name}", "seq_lens": seqs, "query_lens": queries, **common, **sizes}
        for kind, sizes in kinds
        for name, seqs, queries in shapes
    )


CASES = (
    CompressedCase(
        name="tiny_window",
        seq_lens=(15, 17, 1, 33, 0),
        query_lens=(3, 17, 1, 7, 0),
        padding=2,
        max_pages=40,
    ),
    CompressedCase(  # pages with four whole entries
        name="tiny_all",
        seq_lens=(15, 65, 1, 133, 0),
        query_lens=(3, 17, 1, 7, 0),
        padding=2,
        ratio=8,
        pieces=4,
        max_pages=40,
    ),
    CompressedCase(  # rows of one, two and many splits, also of the windows' entries
        name="tiny_all_splits",
        seq_lens=(1400, 36, 300),
        query_lens=(1, 1, 1),
        padding=1,
        near=40,
        ratio=2,
        pieces=2,
        max_pages=100,
    ),
    CompressedCase(
        name="tiny_chosen",
        seq_lens=(15, 65, 1, 133, 0),
        query_lens=(3, 17, 1, 7, 0),
        padding=2,
        ratio=4,
        has_choice=True,
        max_pages=40,
    ),
    CompressedCase(
        name="tiny_chosen_splits",
        seq_lens=(1400, 40, 150),
        query_lens=(1, 1, 1),
        padding=1,
        near=40,
        ratio=4,
        top_k=288,
        has_choice=True,
        max_pages=100,
    ),
    CompressedCase(
        name="tiny_bf16",
        seq_lens=(40, 129),
        query_lens=(9, 1),
        page_size=64,
        ratio=8,
        pieces=4,
        dtype="bfloat16",
    ),
    CompressedCase(
        name="v4_all_bf16",
        heads=V4_FLASH,
        seq_lens=(2200, 40),
        query_lens=(2, 1),
        dtype="bfloat16",
        tags=("full",),
        **ALL,
    ),
    CompressedCase(
        name="v4_chosen_bf16",
        heads=V4_PRO,
        seq_lens=(2200, 40),
        query_lens=(2, 1),
        dtype="bfloat16",
        tags=("full",),
        **CHOSEN,
    ),
    *(CompressedCase(**step) for step in _steps()),
    CompressedCase(
        name="v4_tp8_chosen_step_b64_ctx8192",
        heads=V4_FLASH_TP8,
        seq_lens=(8192,) * 64,
        query_lens=(1,) * 64,
        max_pages=2048,
        dtype="bfloat16",
        tags=("bench", "gpu"),
        **CHOSEN,
    ),
)


def build(case: CompressedCase, seed: int) -> Inputs:
    """Inputs of a case; the queries of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    heads, dtype, num_rows = case.heads, jnp.dtype(case.dtype), len(case.seq_lens)
    num_rows += bool(case.padding)
    lens, whole = case.lens, case.num_whole
    near = paged_arrays(replace(case, seq_lens=case.near_lens), num_rows, rng)
    q = rng.standard_normal((len(lens), heads.num_heads, heads.head_dim), np.float32)
    q[lens <= 0] = np.nan
    passed = np.array([*case.seq_lens, 0]) - np.array([*case.near_lens, 0])
    args: dict[str, Any] = {
        "q": q.astype(dtype),
        "pages": near.k_pages[:, :, 0],
        "page_table": near.page_table,
        "sinks": rng.uniform(-1, 2, heads.num_heads).astype(np.float32),
        "rows": case.rows,
        "last": np.where(lens > 0, lens - 1 - passed[case.rows], -1).astype(np.int32),
    }
    if case.ratio:
        entries = tuple([seq // case.ratio * case.pieces for seq in case.seq_lens])
        width = -(-max(case.max_pages, 1) * case.pieces // case.ratio)
        own = Heads(heads.num_heads, 1, heads.head_dim // case.pieces)
        far = paged_arrays(
            replace(case, seq_lens=entries, heads=own, max_pages=width), num_rows, rng
        )
        args |= {"far_pages": far.k_pages[:, :, 0], "far_table": far.page_table, "reads": whole}
    if case.has_choice:
        reads = np.full((len(lens), case.top_k), NO_POSITION, np.int32)
        for token, count in enumerate(whole):
            chosen = rng.permutation(count)[: case.top_k]
            reads[token, : len(chosen)] = chosen
        args["reads"] = reads
    scale = heads.head_dim**-0.5
    return Inputs((CompressedAttentionArgs(**args, window=case.near, scale=scale),))


def cost(case: CompressedCase) -> Cost:
    """Each row's entries that are read, once; queries read, outputs written."""
    heads, item = case.heads, jnp.dtype(case.dtype).itemsize
    entries = sum(case.near_lens)
    if case.ratio:
        far = sum(seq // case.ratio for seq in case.seq_lens)
        entries += min(far, len(case.lens) * case.top_k) if case.has_choice else far
    moved = (entries + 2 * len(case.lens) * heads.num_heads) * heads.head_dim
    return Cost(bytes=moved * item, flops=4 * case.num_read * heads.num_heads * heads.head_dim)
