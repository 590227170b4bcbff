"""The native kernels for CPUs: what the sweep over their definitions cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.delta_decode import api as delta
from pallas_kernels.delta_decode import cases as delta_cases
from pallas_kernels.delta_decode.cases import DecodeCase
from pallas_kernels.delta_prefill.cases import DeltaHeads
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.native import library
from pallas_kernels.native.attention import append_decode
from pallas_kernels.native.attention import attend as native_attend
from pallas_kernels.paged_prefill.ref import PrefillArgs
from pallas_kernels.sample import native, ref
from pallas_kernels.sample.cases import HARD, MIXED, Draw, SampleCase, build
from pallas_kernels.skinny_gemm.native import matmul
from pallas_kernels.ssd_decode import api as ssd
from pallas_kernels.ssd_decode import cases as ssd_cases
from pallas_kernels.ssd_prefill.cases import SsdHeads

VARIANTS = library.variants()
pytestmark = pytest.mark.skipif(not VARIANTS, reason=library.MISSING)


@pytest.fixture(params=range(len(VARIANTS)), ids=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[int]:
    found = library.library()
    assert found is not None, library.MISSING
    found.jaxinfer_choose(request.param)
    yield request.param
    found.jaxinfer_choose(0)


def attention_case() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((5, 6, 32), np.float32)
    k, v = (rng.standard_normal((9, 16, 3, 32), np.float32) for _ in range(2))
    table = rng.permutation(8)[None].repeat(2, 0).astype(np.int32) + 1
    lens, starts = np.array([70, 33], np.int32), np.array([0, 3, 5], np.int32)
    return q, k, v, table, lens, starts


def attend(*arrays: np.ndarray, **settings: Any) -> np.ndarray:
    """The native attention of queries, pools, page table, lengths and starts."""
    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "query_start_loc")
    args = PrefillArgs(**dict(zip(names, map(jnp.asarray, arrays), strict=True)), **settings)
    return np.asarray(jax.jit(native_attend)(args))


def test_attention_of_each_variant_is_the_same(variant: int) -> None:
    library.register()
    settings = {"scale": 0.2, "window": 20, "cap": 3.0, "slopes": jnp.linspace(0.01, 0.5, 6)}
    found = attend(*attention_case(), **settings)
    assert library.library() is not None
    library.library().jaxinfer_choose(0)  # type: ignore[union-attr]
    np.testing.assert_allclose(found, attend(*attention_case(), **settings), atol=2e-6)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 16), ((5, 5), 48), ((6, 2), 64), ((8, 1), 512), ((70, 2), 32)]
)
@pytest.mark.parametrize(
    ("window", "cap"), [(None, None), (5, None), (40, None), (None, 2.0)], ids=str
)
def test_a_token_attends_alike_alone_and_among_others(
    variant: int, heads: tuple[int, int], head_dim: int, window: int | None, cap: float | None
) -> None:
    """Tokens of a prompt go through blocks of keys together: the bits are those of a decode row.

    Keys behind a token's context hold NaN. With a cap, scores have slopes, too.
    """
    (num, kv), (length, tokens) = heads, (83, 50)
    rng = np.random.default_rng(7)
    q = rng.standard_normal((tokens + 3, num, head_dim), np.float32)  # three of no row
    k, v = (rng.standard_normal((8, 16, kv, head_dim), np.float32) for _ in range(2))
    table = (1 + rng.permutation(6))[None].astype(np.int32)
    k[table[0, 5], 3:] = v[table[0, 5], 3:] = np.nan
    sinks = rng.standard_normal(num).astype(np.float32)
    slopes = rng.uniform(0.01, 0.5, num).astype(np.float32) * (cap is not None)
    scale = head_dim**-0.5
    settings = {"sinks": jnp.asarray(sinks), "window": window, "scale": scale}
    if cap is not None:
        settings |= {"cap": cap, "slopes": jnp.asarray(slopes)}
    rows = (table, np.array([length], np.int32))
    together = attend(q, k, v, *rows, np.array([0, tokens], np.int32), **settings)
    lens = np.arange(length - tokens + 1, length + 1, dtype=np.int32)
    tables, none = table.repeat(tokens, 0), np.zeros(0, np.int32)
    alone = attend(q[:tokens], k, v, tables, lens, none, **settings)
    np.testing.assert_array_equal(together[:tokens], alone)
    assert not np.any(together[tokens:])
    of_heads = np.repeat(np.arange(kv), num // kv)
    keys, values = (pool[table[0]].reshape(-1, kv, head_dim)[:, of_heads] for pool in (k, v))
    for token, end in ((0, lens[0]), (tokens - 1, length)):
        begin = 0 if window is None else max(end - window, 0)
        scores = scale * np.einsum("NH,KNH->NK", q[token], keys[begin:end])
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        scores = scores - slopes[:, None] * (end - 1 - np.arange(begin, end))
        p = jax.nn.softmax(np.concatenate((scores, sinks[:, None]), axis=1), axis=1)
        expected = np.einsum("NK,KNH->NH", p[:, :-1], values[begin:end])
        np.testing.assert_allclose(together[token], expected, atol=1e-5)


@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("size", [(1, 16), (203, 133), (517, 2100)])
def test_a_row_of_the_fixed_gemm_depends_on_no_other(
    variant: int, size: tuple[int, int], by_output: bool
) -> None:
    """Few tokens, many tokens and the last ones of a tile go through the weights in other ways."""
    rng, (inputs, outputs) = np.random.default_rng(5), size
    x = rng.standard_normal((43, inputs), np.float32)
    w = rng.standard_normal((outputs, inputs) if by_output else size, np.float32)
    multiply = jax.jit(lambda x: matmul(x, jnp.asarray(w), by_output=by_output))
    whole = np.asarray(multiply(x))
    exact = x.astype(np.float64) @ (w.T if by_output else w).astype(np.float64)
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=2e-6 * inputs)
    for first, count in ((0, 1), (42, 1), (3, 2), (1, 4), (9, 7), (5, 33)):
        some = np.asarray(multiply(x[first : first + count]))
        np.testing.assert_array_equal(some, whole[first : first + count])


def test_pools_are_changed_in_place() -> None:
    """A step donates them; a copy of all pages a layer would take longer than the step."""
    q, k, v, table, lens, _ = attention_case()
    qkv = jnp.asarray(np.concatenate([q[:2], q[:2]], axis=1))
    angles = jnp.ones((2, 16), jnp.float32)

    def step(qkv, k, v):
        rotation = {"cos": angles, "sin": angles}
        context = {"k_pages": k, "v_pages": v, "page_table": table, "seq_lens": lens}
        return append_decode(DecodeArgs(qkv=qkv, **rotation, **context, scale=0.2, eps=1e-6))

    pools = (jnp.asarray(k), jnp.asarray(v))
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(qkv, *pools).compile()
    assert " copy(" not in compiled.as_text().replace("copy(f32[2,", "")
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < k.nbytes


@pytest.mark.parametrize("spread", [3.0, 1e8])  # the noise is lost beside 1e8, so sums are equal
def test_each_variant_draws_the_tokens_of_the_definition(variant: int, spread: float) -> None:
    """Many rows of few different logits, so that an error in a threshold moves some tokens."""
    both = tuple(Draw(3.0, top_k=k, top_p=p) for k in (300, 700, 900) for p in (0.3, 0.6))
    rows = (*MIXED, *HARD, *both)
    case = SampleCase("many", 1001, rows, 200, spread, grid=spread / 12, masked=0.02)
    (args,) = jax.tree.map(jnp.asarray, build(case, 5).args)
    np.testing.assert_array_equal(jax.jit(native.sample)(args), ref.sample(args))
    rng = np.random.default_rng(6)  # the last bits are of no token
    for share in (0.5, 0.01):
        bits = rng.random((200, 1024)) < share
        masks = jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
        masked = replace(args, masks=masks)
        np.testing.assert_array_equal(jax.jit(native.sample)(masked), ref.sample(masked))


DELTA = next(impl for impl in delta.OP.impls if impl.name == "native")
DELTA_CASES = (
    *(
        case
        for case in delta_cases.CASES
        if "ci" in case.tags and case.dtype == "float32" and case.beta_scale == 1
    ),
    DecodeCase("one_tap", (0, 7), heads=DeltaHeads(1, 1, 1, 1), width=1),
    DecodeCase("whole_tiles", (3, 0), 1, kept=True, heads=DeltaHeads(1, 2, 7, 128), width=2),
    DecodeCase("wide", (3, 12), heads=DeltaHeads(3, 3, 17, 250), width=9),
)


@pytest.mark.parametrize("case", DELTA_CASES, ids=lambda case: case.name)
def test_each_variant_computes_the_delta_rule(variant: int, case: DecodeCase) -> None:
    """Sizes may be any; the inputs are NaN where nothing may be read."""
    assert mismatch(delta.OP, DELTA, case, delta_cases.build(case, 0)) is None


def test_states_are_changed_in_place() -> None:
    case = DecodeCase("kept", (5, 0), kept=True)
    (args,) = jax.tree.map(jnp.asarray, delta_cases.build(case, 0).args)

    def step(states, convs):
        _, *stored = delta.delta_decode(replace(args, states=states, convs=convs), "native")
        return stored

    pools = args.states, args.convs
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*pools).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < args.states.nbytes
    assert " copy(" not in compiled.as_text()


def test_the_delta_rule_in_another_dtype_is_refused() -> None:
    (args,) = delta_cases.build(DecodeCase("bf16", (5,), dtype="bfloat16"), 0).args
    assert DELTA.refuses("cpu", (args,), {}) == "qkv is bfloat16, not float32"


SSD = next(impl for impl in ssd.OP.impls if impl.name == "native")
SSD_CASES = (
    *(case for case in ssd_cases.CASES if "ci" in case.tags and case.dtype == "float32"),
    ssd_cases.DecodeCase("one_tap", (0, 7), width=1),
    ssd_cases.DecodeCase("many_taps", (0, 3, 12), 1, kept=True, width=8),
    ssd_cases.DecodeCase("many_channels", (3, 0), kept=True, heads=SsdHeads(34, 32, 2, 48)),
)


@pytest.mark.parametrize("case", SSD_CASES, ids=lambda case: case.name)
def test_each_variant_computes_the_state_space(variant: int, case: ssd_cases.DecodeCase) -> None:
    """The inputs are NaN where nothing may be read."""
    assert mismatch(ssd.OP, SSD, case, ssd_cases.build(case, 0)) is None


def test_states_of_the_state_space_are_changed_in_place() -> None:
    case = ssd_cases.DecodeCase("kept", (5, 0), kept=True)
    (args,) = jax.tree.map(jnp.asarray, ssd_cases.build(case, 0).args)

    def step(states, convs):
        _, *stored = ssd.ssd_decode(replace(args, states=states, convs=convs), "native")
        return stored

    pools = args.states, args.convs
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*pools).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < args.states.nbytes
