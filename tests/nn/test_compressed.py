"""Attention to a window and to compressed tokens: steps of any rows equal the dense form, and that
equals a plain definition.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.context import Angles, Pages, Rows, Saves, StepContext, dense_context
from jaxinfer.nn.linear import Norm, Stream
from jaxinfer.nn.mixers.compressed_spec import (
    CompressedAttentionConfig,
    CompressorConfig,
    EntryIndexerConfig,
)
from jaxinfer.nn.rope import RopeConfig, rope_tables
from jaxinfer.nn.state import state_layout
from pallas_kernels.compressed_attention.api import CompressedAttentionArgs, compressed_attention
from pallas_kernels.harness.pins import ALL_XLA

D, LENGTH, WINDOW = 24, 53, 7
MAX_PAGES, NUM_SEQS = 64, 4
SINK, SNAPSHOTS = NUM_SEQS, NUM_SEQS + 1  # state rows: that of padding, then snapshots
DECODES, TOKENS, PREFILLS, NUM_SAVES = 2, 24, 2, 2  # of the bucket of every step
INDEXER = EntryIndexerConfig(num_heads=12, head_dim=8, top_k=3)
CONFIGS = {
    "window": None,
    "all windows": CompressorConfig(ratio=8),
    "windows in pieces": CompressorConfig(ratio=16),
    "windows of several pages": CompressorConfig(ratio=16),
    "chosen windows": CompressorConfig(ratio=4, indexer=INDEXER),
}
PAGE_SIZES = dict.fromkeys(CONFIGS, 2) | {"windows of several pages": 1}


def config_of(name: str) -> CompressedAttentionConfig:
    sizes = {"num_heads": 4, "head_dim": 16, "query_rank": 12, "num_groups": 2, "group_rank": 6}
    rope = RopeConfig(8, 1e3)
    return CompressedAttentionConfig(**sizes, window=WINDOW, rope=rope, compressor=CONFIGS[name])


@cache
def params_of(name: str) -> dict[str, jax.Array]:
    """Random parameters with which every part has an effect."""
    c, rng = config_of(name), np.random.default_rng(3)
    h, q, heads = c.head_dim, c.query_rank, c.num_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_kv_a": (D, q + h),
        "q_b": (q, heads),
        "q_norm": (q,),
        "kv_norm": (h,),
        "sinks": (c.num_heads,),
        "o_a": (c.num_groups, c.group_rank, heads // c.num_groups),
        "o_b": (c.num_groups * c.group_rank, D),
    }
    if (own := c.compressor) is not None:
        widths = {"compress": own.num_series * h}
        if (index := own.indexer) is not None:
            widths["index_compress"] = own.num_series * index.head_dim
            shapes |= {"index_q": (q, index.num_heads * index.head_dim)}
            shapes |= {"index_weights": (index.num_heads, D)}
        for part, width in widths.items():
            shapes |= {part: (D, 2 * width), f"{part}_bias": (own.ratio, width)}
            shapes |= {f"{part}_norm": (width // own.num_series,)}

    def made(part: str, shape: tuple[int, ...]) -> jax.Array:
        noise = rng.standard_normal(shape).astype(np.float32)
        if "norm" in part:
            return jnp.asarray(1 + 0.2 * noise)
        plain = part == "sinks" or part.endswith("bias")
        inputs = shape[-1] if part in ("o_a", "index_weights") else shape[0]
        return jnp.asarray(noise if plain else noise * 1.5 / inputs**0.5)

    return {part: made(part, shape) for part, shape in shapes.items()}


def applied(name: str, params: Any, x: jax.Array, state: Any, ctx: StepContext, only: Any) -> Any:
    """The module's output and state; positions decide the angles."""
    c = config_of(name)
    ctx = replace(ctx, angles=(Angles(*rope_tables(c.rope, ctx.positions)),))
    variables, norm = {"params": params}, Norm(None, 0, 1e-6, "none")
    found: Any = c.module().apply(variables, Stream(x), norm, state, ctx, only)
    _, out, state = found
    return out, state


_jit = jax.jit(applied, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


def dense(name: str, x: Any, only: Any = None) -> np.ndarray:  # [T, D]
    x = jnp.asarray(x)
    return np.asarray(_jit(name, params_of(name), x, None, dense_context(len(x)), only)[0])


class Sequence(NamedTuple):
    """The inputs of one sequence, its slot and its pages of each kind, which no other one has."""

    x: np.ndarray  # [LENGTH, D]
    slot: int

    @property
    def pages(self) -> np.ndarray:  # int32[MAX_PAGES]
        return np.arange(MAX_PAGES, dtype=np.int32) + 1 + self.slot * MAX_PAGES


class Row(NamedTuple):
    """The tokens [start, stop) of a sequence; ``reads`` is a snapshot, ``saves`` are pairs of a
    number of the row's tokens and a state row.
    """

    seq: Sequence
    start: int
    stop: int
    reads: int | None = None
    saves: tuple[tuple[int, int], ...] = ()


EMPTY = Row(Sequence(np.ones((1, D), np.float32), SINK), 0, 0)  # padding


def sequence(number: int) -> Sequence:
    rng = np.random.default_rng(10 + number)
    return Sequence(rng.standard_normal((LENGTH, D)).astype(np.float32), number)


def nan_state(name: str) -> dict[str, jax.Array]:
    """A layer's arrays, in which every value is NaN until it is written."""
    layout = state_layout([config_of(name).state(jnp.dtype(jnp.float32))])
    pools, num_pages = len(layout.bytes_per_entry), 1 + NUM_SEQS * MAX_PAGES
    arrays = layout.abstract((num_pages,) * pools, PAGE_SIZES[name], SNAPSHOTS + 8)
    return layout.layers[0].take(tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in arrays))


def pages_of(rows: list[Row], of_token: Any, positions: Any, real: Any, name: str) -> Any:
    """The pages of each kind, as ``exec.step.batch`` makes them."""
    size = PAGE_SIZES[name]
    begins, ends = (np.array([row[i] for row in rows]) for i in (1, 2))
    found = []
    for kind in config_of(name).state(jnp.dtype(jnp.float32)).paged:
        each, table = kind.tokens_per_entry, np.zeros((len(rows), MAX_PAGES), np.int32)
        first = np.zeros(len(rows), np.int32)
        if kind.window is not None:
            first = np.maximum(begins - kind.window + 1, 0) // size
        for i, row in enumerate(rows):
            own = row.seq.pages[first[i] :] if row is not EMPTY else np.zeros(0, np.int32)
            table[i, : len(own)] = own
        entry = positions // each
        page = np.maximum(entry // size - first[of_token], 0)
        slots = table[of_token, page] * size + entry % size
        slots = np.where(real & (positions % each == each - 1), slots, 0)
        lens = ends // each - first * size
        found.append(Pages(*(jnp.asarray(part, jnp.int32) for part in (slots, table, lens))))
    return tuple(found)


def run_step(
    name: str, state: Any, decodes: list[Row], prefills: list[Row], *, only_last: bool = False
) -> tuple[list[np.ndarray], Any]:
    """The outputs of each row's tokens, or of its last one, and the new state."""
    given = decodes + prefills
    decodes = decodes + [EMPTY] * (DECODES - len(decodes))
    prefills = prefills + [EMPTY] * (PREFILLS - len(prefills))
    rows, lens = decodes + prefills, [row.stop - row.start for row in prefills]
    starts = np.cumsum([0, *lens])
    spans = [(i, row, row.start, max(row.stop, 1 + row.start)) for i, row in enumerate(decodes)]
    spans += [(i, row, row.start, row.stop) for i, row in enumerate(prefills, DECODES)]
    x = np.full((DECODES + TOKENS, D), np.nan, np.float32)
    of_token = np.full(len(x), len(rows) - 1, np.int32)
    positions, real, at, places = np.zeros(len(x), np.int32), np.zeros(len(x), bool), 0, {}
    for i, row, start, stop in spans:
        own = slice(at, at + stop - start)
        x[own], of_token[own] = row.seq.x[start:stop], i
        positions[own], real[own] = np.arange(start, stop), row is not EMPTY
        places[i], at = own, own.stop
    last = np.array([max(places[i].stop - 1, 0) for i in range(len(rows))])
    saves = [[*row.saves, *[(0, SINK)] * (NUM_SAVES - len(row.saves))] for row in prefills]
    table = np.array(saves, np.int32)
    slots = np.array([row.seq.slot for row in rows])
    kept = [row.saves[0][1] if row.saves else row.seq.slot for row in decodes]
    reads = [row.seq.slot if row.reads is None else row.reads for row in rows]
    int32 = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    ctx = StepContext(
        int32(positions),
        Rows(
            of_token=int32(of_token),
            is_token=jnp.asarray(real),
            slots=int32(slots),
            begins=int32([row.start for row in rows]),
            last_tokens=int32(last),
            query_start_loc=int32(starts),
            keeps=int32(kept),
            reads=int32(reads),
            saves=Saves(int32(table[..., 0]), int32(table[..., 1])),
        ),
        pages_of(rows, of_token, positions, real, name),
        num_decodes=DECODES,
        pins=ALL_XLA,
    )
    only = int32(last) if only_last else None
    out, state = _jit(name, params_of(name), jnp.asarray(x), state, ctx, only)
    out, numbers = np.asarray(out), [i for i, row in enumerate(rows) if row is not EMPTY]
    assert len(numbers) == len(given)
    return [out[[i] if only_last else places[i]] for i in numbers], state


def check(outputs: list[np.ndarray], rows: list[Row], expected: dict[int, np.ndarray]) -> None:
    for out, row in zip(outputs, rows, strict=True):
        wanted = expected[row.seq.slot][row.stop - len(out) : row.stop]
        np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=0, err_msg=str(row[1:3]))


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_the_dense_form(name: str) -> None:
    """Chunks end anywhere in windows, decode rows go on, and a prefix is reused."""
    a, b, c = sequence(0), sequence(1), sequence(2)
    again = Sequence(a.x.copy(), 3)  # with the prefix of ``a``, of 16 tokens, then others
    again.x[16:] = sequence(4).x[16:]
    expected = {seq.slot: dense(name, seq.x) for seq in (a, b, c, again)}
    state, first = nan_state(name), SNAPSHOTS
    steps: list[tuple[list[Row], list[Row]]] = [
        ([], [Row(a, 0, 19, saves=((16, first),)), Row(b, 0, 5)]),
        ([Row(a, 19, 20)], [Row(b, 5, 8), Row(c, 0, 21)]),
        ([Row(a, 20, 21), Row(b, 8, 9)], [Row(c, 21, 44)]),
        *[([Row(a, 21 + i, 22 + i), Row(b, 9 + i, 10 + i)], []) for i in range(18)],
        ([Row(b, 27, 28), Row(c, 44, 45)], [Row(a, 39, 53)]),
    ]
    for decodes, prefills in steps:
        outputs, state = run_step(name, state, decodes, prefills)
        check(outputs, decodes + prefills, expected)
    state = with_prefix(name, state, a, again, 16)
    rows = [Row(again, 16, 30, reads=first), Row(b, 28, 38)]
    outputs, after = run_step(name, state, [], rows)
    check(outputs, rows, expected)
    outputs, last = run_step(name, state, [], rows, only_last=True)
    check(outputs, rows, expected)
    for seen, kept in ((after, 31), (last, 31)):
        rows = [Row(again, 30, kept)]
        check(run_step(name, seen, rows, [])[0], rows, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_rows_save_states(name: str) -> None:
    """A row that reaches a border saves its state, from which another sequence goes on."""
    a, again = sequence(0), Sequence(sequence(0).x, 3)
    expected = {3: dense(name, a.x)}
    state = run_step(name, nan_state(name), [], [Row(a, 0, 15)])[1]
    for start in range(15, 18):
        saves = ((1, SNAPSHOTS),) if start == 15 else ()
        state = run_step(name, state, [Row(a, start, start + 1, saves=saves)], [])[1]
    state = with_prefix(name, state, a, again, 16)
    rows = [Row(again, 16, 39, reads=SNAPSHOTS)]
    check(run_step(name, state, [], rows)[0], rows, expected)


def with_prefix(name: str, state: Any, source: Sequence, to: Sequence, count: int) -> Any:
    """The state in which a sequence has the pages of another one's first ``count`` tokens."""
    found = dict(state)
    for kind in config_of(name).state(jnp.dtype(jnp.float32)).paged:
        pages = count // kind.tokens_per_entry // PAGE_SIZES[name]
        for entry in kind.entries:
            own = state[entry.name][source.pages[:pages]]
            found[entry.name] = state[entry.name].at[to.pages[:pages]].set(own)
    return found


def definition(name: str, x: np.ndarray) -> np.ndarray:  # [T, D] -> float64[T, D]
    """A token and a window at a time, in float64 (DeepSeek-V4, 2026, section 2.3)."""
    c = config_of(name)
    p = {part: np.asarray(value, np.float64) for part, value in params_of(name).items()}

    def normed(values: np.ndarray, weights: Any = 1) -> np.ndarray:
        mean = np.mean(np.square(values), axis=-1, keepdims=True)
        return values / np.sqrt(mean + c.norm_eps) * weights

    def turned(values: np.ndarray, position: float) -> np.ndarray:
        out, width = values.copy(), c.rope.head_dim
        own = values[..., -width::2] + 1j * values[..., 1 - width :: 2]
        own = own * np.exp(1j * position * c.rope.theta ** (-np.arange(0, width, 2) / width))
        out[..., -width::2], out[..., 1 - width :: 2] = own.real, own.imag
        return out

    def windows(part: str, of: CompressorConfig) -> np.ndarray:  # [E, C]
        both = (x @ p[part]).reshape(len(x), 2, of.num_series, -1)
        values, gates = both[:, 0], both[:, 1]
        bias = p[f"{part}_bias"].reshape(of.ratio, of.num_series, -1)
        found = []
        for start in range(0, len(x) - of.ratio + 1, of.ratio):
            own = np.arange(start, start + of.ratio)
            v, g = values[own, -1], gates[own, -1] + bias[:, -1]
            if of.num_series == 2 and start:
                v = np.concatenate((values[own - of.ratio, 0], v))
                g = np.concatenate((gates[own - of.ratio, 0] + bias[:, 0], g))
            p_i = np.exp(g - g.max(0))
            mean = normed((p_i * v).sum(0) / p_i.sum(0), p[f"{part}_norm"])
            found.append(turned(mean, start))
        return np.array(found)

    latent, kv = np.split(x @ p["q_kv_a"], (c.query_rank,), axis=1)
    latent, kv = normed(latent, p["q_norm"]), normed(kv, p["kv_norm"])
    kv = np.array([turned(one, t) for t, one in enumerate(kv)])
    far, keys = np.zeros((0, c.head_dim)), np.zeros(0)
    if (of := c.compressor) is not None:
        far = windows("compress", of)
        keys = windows("index_compress", of) if of.indexer else keys
    outputs = []
    for t in range(len(x)):
        own = kv[max(t - c.window + 1, 0) : t + 1]
        whole = 0 if of is None else (t + 1) // of.ratio
        chosen = np.arange(whole)
        if of is not None and (index := of.indexer) is not None:
            q = turned((latent[t] @ p["index_q"]).reshape(index.num_heads, -1), t)
            scores = (p["index_weights"] @ x[t]) @ np.maximum(q @ keys[:whole].T, 0)
            chosen = np.argsort(-scores)[: index.top_k]
        entries = np.concatenate((own, far[chosen]))
        q = turned(normed((latent[t] @ p["q_b"]).reshape(c.num_heads, -1)), t)
        scores = np.concatenate((q @ entries.T * c.scale, p["sinks"][:, None]), axis=1)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out = turned(weights[:, :-1] @ entries, -t).reshape(c.num_groups, -1)
        outputs.append(np.einsum("GI,GRI->GR", out, p["o_a"]).ravel() @ p["o_b"])
    return np.array(outputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dense_form_equals_the_definition(name: str) -> None:
    x = sequence(0).x
    expected = definition(name, x)
    for count in (3, LENGTH):  # without and with whole windows
        np.testing.assert_allclose(dense(name, x[:count]), expected[:count], atol=2e-5, rtol=0)


def test_entries_of_many_blocks() -> None:
    """Tokens whose rows have up to 1,200 entries, in pieces, of which each page has one and a half;
    those behind a token's last one are NaN.
    """
    rng, tokens, heads, width, pieces, size, pages = np.random.default_rng(0), 70, 2, 8, 4, 6, 800
    table = 1 + rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    rows = np.arange(tokens) % 2
    lens = rng.integers(0, np.where(rows == 0, 200, 1200))
    pool = rng.standard_normal((1 + 2 * pages, size, width // pieces)).astype(np.float32)
    held = pool[table].reshape(2, -1, width)  # the entries of each row
    for row in range(2):
        own = pool[table[row]].reshape(-1, width)
        own[lens[rows == row].max() :] = np.nan
        pool[table[row]] = own.reshape(pages, size, -1)
    q = rng.standard_normal((tokens, heads, width)).astype(np.float32)
    sinks, near = np.array([0.5, -1.0], np.float32), np.zeros((1, 1, width), np.float32)
    int32 = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    args = CompressedAttentionArgs(
        q=jnp.asarray(q),
        pages=jnp.asarray(near),
        page_table=jnp.zeros((2, 1), jnp.int32),
        sinks=jnp.asarray(sinks),
        rows=int32(rows),
        last=jnp.full(tokens, -1, jnp.int32),
        far_pages=jnp.asarray(pool),
        far_table=int32(table),
        reads=int32(lens),
        window=1,
        scale=0.5,
    )
    found = compressed_attention(args)
    for t in range(tokens):
        entries = held[rows[t], : lens[t]]
        scores = np.concatenate((q[t] @ entries.T * 0.5, sinks[:, None]), axis=1)
        p = np.exp(scores)
        p = p[:, :-1] / p.sum(1, keepdims=True)
        np.testing.assert_allclose(found[t], p @ entries, atol=1e-5, rtol=0)


def test_every_parameter_has_a_gradient_but_those_of_choices() -> None:
    name, x = "chosen windows", jnp.asarray(sequence(0).x[:18])

    def loss(params: Any) -> jax.Array:
        return jnp.sum(jnp.square(applied(name, params, x, None, dense_context(18), None)[0]))

    for part, gradient in jax.jit(jax.grad(loss))(params_of(name)).items():
        assert np.isfinite(gradient).all() and np.any(gradient) != part.startswith("index"), part


def test_a_share_has_a_part_of_heads_and_groups() -> None:
    c = config_of("chosen windows")
    assert (c.share(2).num_heads, c.share(2).num_groups) == (2, 1)
    assert c.share(2).state(jnp.dtype(jnp.float32)) == c.state(jnp.dtype(jnp.float32))
