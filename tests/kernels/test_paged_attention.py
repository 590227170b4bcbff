"""Attention over pages beyond single results: the definition of a decode row, rows that do not
depend on each other, chunks that add up to the whole, checked arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_decode import attend_ref
from pallas_kernels.append_decode.api import OP as decode_op
from pallas_kernels.append_decode.attend_xla import attend
from pallas_kernels.harness.registry import KernelOp, select
from pallas_kernels.lib import shapes
from pallas_kernels.lib.page_scales import BITS, pools_of
from pallas_kernels.lib.shapes import PagedCase, paged_arrays
from pallas_kernels.lib.softmax import KEYS_PER_BLOCK
from pallas_kernels.paged_prefill import cases as prefill_cases
from pallas_kernels.paged_prefill.api import OP as prefill_op
from pallas_kernels.paged_prefill.api import PrefillArgs, paged_prefill
from pallas_kernels.paged_prefill.xla import QUERIES_PER_TILE

SMOL = shapes.SMOLLM2_135M
EDGE, TILE = KEYS_PER_BLOCK, QUERIES_PER_TILE


def _bits(x: jax.Array) -> bytes:
    return np.asarray(x).tobytes()


def _decode_arguments(case: PagedCase) -> tuple[Any, ...]:
    """Queries, pools, page table and lengths; NaN in padding rows and in slots without a token."""
    rng = np.random.default_rng(0)
    heads, lens = case.heads, np.asarray(case.seq_lens, np.int32)
    arrays = paged_arrays(case, len(lens), rng)
    q = rng.standard_normal((len(lens), heads.num_heads, heads.head_dim), np.float32)
    q[lens == 0] = np.nan
    queries = q.astype(jnp.dtype(case.dtype))
    return jax.tree.map(jnp.asarray, (queries, arrays.pools, arrays.page_table, lens))


BF16, FP8 = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": str(BITS)}


@pytest.mark.parametrize(
    "case",
    [
        PagedCase("page_edges", SMOL, (15, 16, 17, 0, 1, 33), max_pages=40),
        PagedCase("blocks", SMOL, (127, 128, 129, 255, 256, 257, 511, 513, 912)),
        PagedCase("window", SMOL, (1, 7, 8, 9, 300, 600), window=8),
        PagedCase("window_blocks", SMOL, (1, 200, 600, 1000), window=300),
        PagedCase("smollm2_bf16", SMOL, (90, 17), **BF16),
        PagedCase("llama3_8b_bf16", shapes.LLAMA3_8B, (17, 200, 0), **BF16),
        PagedCase("qwen3_4b_page64_bf16", shapes.QWEN3_4B, (64, 1), page_size=64, **BF16),
        PagedCase("llama3_8b_fp8_pages", shapes.LLAMA3_8B, (17, 70), **FP8),
        PagedCase("gpt2_f16", shapes.GPT2, (60, 17), dtype="float16"),
        PagedCase("phi3_head96", shapes.PHI3_MINI, (40, 3)),
        PagedCase("gemma3_head256_bf16", shapes.GEMMA3_4B, (40,), window=32, **BF16),
    ],
    ids=lambda case: case.name,
)
def test_a_decode_row_attends_as_defined(case: PagedCase) -> None:
    """In addition to the cases of append_decode, which appends a token and then attends."""
    arguments = _decode_arguments(case)
    static = {"scale": case.heads.head_dim**-0.5, "window": case.window}
    out, defined = (f(*arguments, **static) for f in (attend, attend_ref.attend))
    assert out.dtype == defined.dtype == jnp.dtype(case.dtype)
    bound = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[case.dtype]
    out, defined = (np.asarray(x, np.float32) for x in (out, defined))
    assert np.isfinite(defined).all()
    assert (np.abs(out - defined) / (1 + np.abs(defined))).max() <= bound
    assert (out[np.asarray(case.seq_lens) == 0] == 0).all()


@pytest.mark.parametrize("window", [None, 100])
def test_a_decode_row_has_the_same_bits_alone_and_in_any_company(window: int | None) -> None:
    lengths = (1, 0, EDGE - 1, EDGE, EDGE + 1, 3 * EDGE + 5, 16, 700)
    case = PagedCase("rows", SMOL, lengths, max_pages=64, window=window)
    q, pools, table, lens = _decode_arguments(case)
    decode = jax.jit(partial(attend, scale=0.125, window=window))
    together = decode(q, pools, table, lens)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode(q[one], pools, table[one], lens[one])
        assert _bits(alone[0]) == _bits(together[row]), f"row {row} of length {lengths[row]}"
    order = np.array([5, 3, 7, 1, 0, 2, 6, 4])
    shuffled = decode(q[order], pools, table[order], lens[order])
    assert _bits(shuffled) == _bits(together[order])


def test_work_follows_the_context_not_the_page_table() -> None:
    """A wider page table full of junk changes no bit."""
    case = PagedCase("narrow", SMOL, (40, 300), max_pages=19)
    q, pools, table, lens = _decode_arguments(case)
    wide = jnp.pad(table, ((0, 0), (0, 493)), constant_values=-1)
    narrow_out = attend(q, pools, table, lens, scale=0.125)
    wide_out = attend(q, pools, wide, lens, scale=0.125)
    assert _bits(narrow_out) == _bits(wide_out)


CHUNKINGS = (
    (200,),
    (TILE, TILE, 200 - 2 * TILE),
    (TILE - 1, TILE + 1, 1, 199 - 2 * TILE),
    (1, 1, 1, 197),
)


@pytest.mark.parametrize(
    ("window", "kv_dtype"),
    [(None, ""), (50, ""), (None, str(BITS))],
    ids=["full", "window", "fp8"],
)
def test_chunks_agree_with_decode(window: int | None, kv_dtype: str) -> None:
    """However a prompt is split into chunks, every token has the result of decoding it."""
    case = PagedCase("prompt", SMOL, (200,), (200,), window=window, kv_dtype=kv_dtype)
    (args,) = jax.tree.map(jnp.asarray, prefill_cases.build(case, 0).args)
    q, table = args.q, args.page_table
    decode = jax.jit(partial(attend, scale=args.scale, window=window))
    rows = jnp.broadcast_to(table, (200, table.shape[1]))
    lens = jnp.arange(1, 201, dtype=jnp.int32)
    expected = decode(q, pools_of(args), rows, lens)
    prefill = jax.jit(paged_prefill)
    for chunks in CHUNKINGS:
        end = 0
        for chunk in chunks:
            start, end = end, end + chunk
            padded = jnp.full_like(q, jnp.nan).at[:chunk].set(q[start:end])
            lens, starts = jnp.array([end], jnp.int32), jnp.array([0, chunk], jnp.int32)
            out = prefill(replace(args, q=padded, seq_lens=lens, query_start_loc=starts))
            np.testing.assert_allclose(
                out[:chunk], expected[start:end], rtol=1e-5, atol=1e-6, err_msg=f"{chunks}"
            )


def test_padding_queries_are_exactly_zero() -> None:
    """Also after a tile that extends into them."""
    case = PagedCase("padded", SMOL, (TILE + 3, 5), (TILE + 3, 5), padding=TILE)
    (args,) = jax.tree.map(jnp.asarray, prefill_cases.build(case, 0).args)
    out = np.asarray(paged_prefill(args))
    assert np.isfinite(out).all()
    assert (out[TILE + 8 :] == 0).all() and (out[: TILE + 8] != 0).any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"q": (2, 9, 32)}, "do not fit pages", id="head_dim"),
        pytest.param({"q": (2, 8, 64)}, "8 query heads are not a multiple of 3", id="heads"),
        pytest.param({"v_pages": (4, 8, 3, 64)}, "k_pages .* and v_pages .* differ", id="pools"),
        pytest.param({"page_table": (3, 2)}, "does not fit seq_lens", id="page_table"),
        pytest.param({"window": 0}, "window must be at least 1, got 0", id="window"),
    ],
)
def test_arguments_that_do_not_fit(change, message) -> None:
    pages = (4, 16, 3, 64)
    sizes = {"q": (2, 9, 64), "k_pages": pages, "v_pages": pages, "page_table": (2, 2)}
    arrays = {name: jnp.zeros(change.get(name, size)) for name, size in sizes.items()}
    rows = {"seq_lens": jnp.zeros(2), "query_start_loc": jnp.zeros(3, int)}
    with pytest.raises(ValueError, match=message):
        paged_prefill(PrefillArgs(**arrays, **rows, scale=1.0, window=change.get("window")))


def test_prefill_wants_one_start_more_than_rows() -> None:
    pages = jnp.zeros((4, 16, 3, 64))
    two = jnp.zeros(2, int)
    context = {"page_table": jnp.zeros((2, 2), int), "seq_lens": two, "query_start_loc": two}
    args = PrefillArgs(q=jnp.zeros((5, 9, 64)), k_pages=pages, v_pages=pages, **context, scale=1.0)
    with pytest.raises(ValueError, match="must hold one entry more than the 2 rows"):
        paged_prefill(args)


@pytest.mark.parametrize("op", [decode_op, prefill_op], ids=lambda op: op.name)
def test_scores_with_a_bias_are_for_xla_alone_on_a_gpu(op: KernelOp) -> None:
    """Each kernel says so; the engine logs the reasons (see ``harness.registry.chosen``)."""
    case = next(case for case in op.cases if case.name == "smollm2_tp3_slopes_window")
    inputs = op.build(case, 0)
    assert select(op, "gpu", inputs.args, inputs.static).name == "xla"
    for impl in [one for one in op.impls if one.name not in ("xla", "native")]:
        reason = impl.refuses(impl.platforms[0], inputs.args, inputs.static)
        assert reason is not None and "bias" in reason, impl.name
