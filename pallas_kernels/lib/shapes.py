"""Attention shapes of real models, and input arrays of test cases.

Owns: ``Heads``, ``LatentHeads``, ``PagedCase``, ``LatentCase``, the poisoned page pool of decode
and prefill, ``normal``, and how 8-bit pages are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.lib.latent_pages import ROPE_DTYPE, appended, num_groups
from pallas_kernels.lib.page_scales import BITS, VALUES

# Values of a larger array repeat after this many: drawing a GB of them takes seconds. A prime, so
# that no two tokens are equal.
MAX_DISTINCT_VALUES = 2_000_003


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale: float = 1.0
) -> np.ndarray:
    """Normal values with deviation ``scale``."""
    values = rng.standard_normal(min(math.prod(shape), MAX_DISTINCT_VALUES), np.float32)
    return np.resize((scale * values).astype(dtype), shape)


@dataclass(frozen=True)
class Heads:
    """Query heads, kv heads and head_dim of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


QWEN3_4B = Heads(32, 8, 128)
QWEN3_4B_TP8 = Heads(4, 1, 128)
QWEN3_0_6B = Heads(16, 8, 128)
QWEN3_30B_A3B = Heads(32, 4, 128)
LLAMA3_8B = Heads(32, 8, 128)
LLAMA3_2_3B = Heads(24, 8, 128)
QWEN3_14B = Heads(40, 8, 128)
GLM4_9B = Heads(32, 2, 128)
GLM4_5_TP8 = Heads(12, 1, 128)
SMOLLM2_135M = Heads(9, 3, 64)
SMOLLM2_135M_TP3 = Heads(3, 1, 64)
GPT2 = Heads(12, 12, 64)
QWEN2_5_7B = Heads(28, 4, 128)
GPT_OSS_20B = Heads(64, 8, 64)
GPT_OSS_20B_TP8 = Heads(8, 1, 64)
GEMMA3_4B = Heads(8, 4, 256)
QWEN3_5_4B = Heads(16, 4, 256)
GEMMA4_26B = Heads(16, 8, 256)  # layers with a window
GEMMA4_26B_FULL = Heads(16, 2, 512)  # and those without
GEMMA4_E2B_FULL = Heads(8, 1, 512)
PHI3_MINI = Heads(32, 32, 96)
LLAMA3_70B_TP8 = Heads(8, 1, 128)


@dataclass(frozen=True)
class LatentHeads:
    """The sizes of multi-head latent attention.

    A key has ``nope_dim`` components without rope and ``rope_dim`` with it, a value ``value_dim``,
    and a latent ``rank``.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int

    @property
    def entry(self) -> int:
        """Components of a token in the pages: its latent and its rotated key."""
        return self.rank + self.rope_dim

    @property
    def scale(self) -> float:
        """The factor on scores, without that of YaRN."""
        return (self.nope_dim + self.rope_dim) ** -0.5


DEEPSEEK_V2_LITE = LatentHeads(16, 128, 64, 128, 512)
KIMI_K2 = LatentHeads(64, 128, 64, 128, 512)
DEEPSEEK_V3 = LatentHeads(128, 128, 64, 128, 512)
TINY_LATENT = LatentHeads(5, 32, 16, 32, 64)


@dataclass(frozen=True)
class PagedCase:
    """Rows of paged attention. ``query_lens[r]`` queries end row r's context of ``seq_lens[r]``.

    ``padding`` counts padding rows (decode) or padding tokens (prefill) after the real ones.
    ``max_pages``: width of the page table, at least what the longest row needs.
    """

    name: str
    heads: Heads
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    page_size: int = 16
    max_pages: int = 0
    padding: int = 0
    window: int | None = None
    sinks: bool = False
    sink_values: bool = False
    slopes: bool = False
    root: bool = False
    cap: float | None = None
    dtype: str = "float32"
    kv_dtype: str = ""  # of the pages; empty: the dtype of the queries
    tags: tuple[str, ...] = ("ci",)

    def visible_keys(self, row: int) -> int:
        """Number of visible (query, key) pairs of the row."""
        lens = self.query_lens or (1,) * len(self.seq_lens)
        seq, queries = self.seq_lens[row], lens[row]
        if seq == 0:
            return 0
        seen = np.arange(seq - queries + 1, seq + 1)
        return int(np.minimum(seen, self.window or seq).sum())

    def touched_keys(self, row: int) -> int:
        """Number of keys that at least one of the row's queries sees."""
        lens = self.query_lens or (1,) * len(self.seq_lens)
        seq = self.seq_lens[row]
        if seq == 0 or lens[row] == 0:
            return 0
        return seq if self.window is None else min(seq, self.window + lens[row] - 1)


def sinks_of(
    case: PagedCase, rng: np.random.Generator, queries: int
) -> dict[str, np.ndarray | None]:
    """Sinks [N] that matter beside a case's scores, if it has any, or of each query [T, N] with
    values [T, N, H].
    """
    if case.sink_values:
        shape = (queries, case.heads.num_heads, case.heads.head_dim)
        made = rng.uniform(-1, 2, shape[:2]), rng.standard_normal(shape)
        sinks, values = (one.astype(np.float32) for one in made)
        return {"sinks": sinks, "sink_values": values}
    if not case.sinks:
        return {"sinks": None}
    sinks = rng.uniform(-1, 2, case.heads.num_heads).astype(jnp.dtype(case.dtype))
    return {"sinks": sinks}


def slopes_of(case: PagedCase) -> np.ndarray | None:  # float32[N]
    """Slopes of several sizes, if a case has any."""
    n = case.heads.num_heads
    return np.float32(2.0) ** -np.linspace(0, 8, n, dtype=np.float32) if case.slopes else None


@dataclass(frozen=True)
class LatentCase(PagedCase):
    """Rows of latent attention, whose pages hold one entry a token."""

    heads: Heads = field(init=False)  # of the pages: one head of a token's entry
    sizes: LatentHeads = TINY_LATENT

    def __post_init__(self) -> None:
        """Derive the heads of the pages."""
        object.__setattr__(self, "heads", Heads(self.sizes.num_heads, 1, self.sizes.entry))


@dataclass(frozen=True)
class PagedArrays:
    """The pool of a case: NaN in every slot that no row owns, junk in spare table entries.

    The pool's last page is the last page of a row, so a read past it is out of bounds.
    """

    k_pages: np.ndarray  # [P, S, K, H]
    v_pages: np.ndarray  # [P, S, K, H]
    page_table: np.ndarray  # int32[R, M]
    k_scales: np.ndarray | None = None  # float32[P, S, K]: of 8-bit pages
    v_scales: np.ndarray | None = None  # float32[P, S, K]

    @property
    def pools(self) -> tuple[np.ndarray, ...]:
        """All pools, with those of scales."""
        own = (self.k_pages, self.v_pages, self.k_scales, self.v_scales)
        return tuple(pool for pool in own if pool is not None)


def as_floats(pool: Any) -> Any:
    """A pool as numbers that can be compared: the bits of 8-bit floats become such floats."""
    return np.asarray(pool).view(VALUES) if pool.dtype == BITS else pool


@dataclass(frozen=True, eq=False)
class ScaledHeads:
    """Heads of 8-bit pages times their scales, which are compared by steps of their rounding.

    A value may differ by one step of e4m3, an eighth of it at most, and by ``slack`` of its head's
    largest magnitude: a step of the dtype in which heads are normalised and rotated, where two
    large components may cancel.
    """

    values: np.ndarray  # float32[..., H]
    slack: float

    dtype = VALUES

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    def is_finite(self) -> bool:
        """True if all values are."""
        return bool(np.isfinite(self.values).all())

    def errors(self, reference: ScaledHeads) -> np.ndarray:
        """Differences in the steps that are accepted; NaN where a value is not a number."""
        expected = np.abs(reference.values)
        largest = expected.max(-1, keepdims=True)
        step = expected / 8 + reference.slack * largest + np.finfo(np.float32).tiny
        return np.abs(self.values - reference.values) / step


# By the dtype of heads: a step of it and, of any, the smallest step of e4m3 beside 448.
_SLACK = MappingProxyType({"float32": 2.0**-17, "bfloat16": 2.0**-7, "float16": 2.0**-10})


def comparable(out: Any, pools: Any) -> tuple[Any, ...]:
    """The observable parts of an op's queries or results and its pools: all but page 0.

    8-bit pages and their scales become ``ScaledHeads``. Slots of NaN, which hold nothing, become 0,
    so that a stray write is a difference.
    """
    if len(pools) == 2:
        kept = (pool[1:] for pool in pools)
        return out, *(jnp.where(jnp.isnan(pool), 0, pool) for pool in kept)
    pages = [np.asarray(as_floats(pool), np.float32)[1:] for pool in pools[:2]]
    scales = [np.asarray(pool)[1:, ..., None] for pool in pools[2:]]
    return out, *(
        ScaledHeads(_scaled(*own), _SLACK[str(out.dtype)])
        for own in zip(pages, scales, strict=True)
    )


def _scaled(pages: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Products; what is written without its counterpart stays, and is 0 without both."""
    alone = sum(np.where(np.isnan(x), np.float32(0), x) for x in (pages, scales))
    return np.where(np.isnan(pages) | np.isnan(scales), alone, pages * scales)


def poison(pools: tuple[np.ndarray, ...], at: Any) -> None:
    """Write NaN there into each pool."""
    for pool in pools:
        as_floats(pool)[at] = np.nan


def latent_pools(
    arrays: PagedArrays, sizes: LatentHeads, dtype: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:  # and [P, S, C + R]
    """The pools of latent attention by the names of arguments, and the entries that they were made
    of, with NaN where ``arrays`` have it.
    """
    pages = arrays.k_pages[:, :, 0]
    if arrays.k_scales is None:
        return {"pages": pages}, pages
    entries = (as_floats(pages).astype(np.float32) * arrays.k_scales).astype(jnp.dtype(dtype))
    groups = num_groups(sizes.rank)
    empty = (
        jnp.zeros((1, 1, sizes.rank), BITS),
        jnp.zeros((1, 1, groups), jnp.float32),
        jnp.zeros((1, 1, sizes.rope_dim), ROPE_DTYPE),
    )
    made = appended(jnp.asarray(entries.reshape(-1, sizes.entry)), empty)
    names = ("pages", "scales", "rope_pages")
    shape = entries.shape[:2]
    pools = {n: np.array(x).reshape(*shape, -1) for n, x in zip(names, made, strict=True)}
    return pools, entries


def random_pools(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Pools of K and V with random values, of 8 bits with scales."""
    is_scaled = dtype == str(BITS)
    own = VALUES if is_scaled else jnp.dtype(dtype)
    pools = tuple(rng.standard_normal(shape, np.float32).astype(own) for _ in range(2))
    if not is_scaled:
        return pools
    scales = (rng.uniform(0.5, 2.0, shape[:-1]).astype(np.float32) for _ in range(2))
    return (*(pool.view(BITS) for pool in pools), *scales)


def paged_arrays(case: PagedCase, num_rows: int, rng: np.random.Generator) -> PagedArrays:
    """A pool for the case in shuffled page order; rows past the rows of the case are padding."""
    size, heads, is_scaled = case.page_size, case.heads, case.kv_dtype == str(BITS)
    dtype = VALUES if is_scaled else jnp.dtype(case.kv_dtype or case.dtype)
    needed = [-(-length // size) for length in case.seq_lens]
    max_pages = max(case.max_pages, *needed, 1)
    num_pages = 1 + sum(needed) + 2  # the padding sink, the rows' pages, two unused ones
    shape = (num_pages, size, heads.num_kv_heads, heads.head_dim)
    k_pages, v_pages = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    scales = [np.full(shape[:3], np.nan, np.float32) for _ in range(2 * is_scaled)]
    pages = rng.permutation(np.arange(1, num_pages - 1))
    free = iter((*pages[: max(sum(needed) - 1, 0)], num_pages - 1))
    junk = [0, pages[-1], num_pages + 7, -1]
    table = rng.choice(junk, size=(num_rows, max_pages)).astype(np.int32)
    width = shape[2] * shape[3]
    values = rng.standard_normal(
        min(2 * sum(case.seq_lens) * width, MAX_DISTINCT_VALUES), np.float32
    )
    values = values.astype(dtype)
    for row, (length, count) in enumerate(zip(case.seq_lens, needed, strict=True)):
        table[row, :count] = [next(free) for _ in range(count)]
        slots = np.arange(length)
        for pool in (k_pages, v_pages):
            tokens = np.resize(values, (length, *shape[2:]))
            pool[table[row, slots // size], slots % size] = tokens
            values = np.roll(values, -length * width)
        for pool in scales:
            drawn = rng.uniform(0.1, 1.0, (length, shape[2])).astype(np.float32)
            pool[table[row, slots // size], slots % size] = drawn
    if not is_scaled:
        return PagedArrays(k_pages, v_pages, table)
    return PagedArrays(k_pages.view(BITS), v_pages.view(BITS), table, *scales)
