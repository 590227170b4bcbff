"""Tests of every family in the registry; a new family adds a config, no test."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from jaxinfer.models import (
    Model,
    Params,
    abstract_params,
    build_model,
    forward,
    known_architectures,
)
from jaxinfer.models.base import hidden_states, unembed
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import wrapping_architectures
from jaxinfer.nn.context import Pages, Rows, StepContext, dense_context
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.state import State
from kit import tiny_models
from kit.checkpoints import built_arrays, random_hf_tensors
from pallas_kernels.harness.pins import ALL_XLA

PAGE_SIZE = 4
NUM_PAGES = 24
MAX_PAGES = 7
LENGTH = 18
CHUNK = 6  # alternately ends within a page and at its end
TOLERANCE = 1e-4  # float32 logits of order 10, sums in another order

LAYER_TAPS = ("resid_pre", "attn_out", "mlp_out", "resid_post")

# Golden values are compared for those like others, too.
every_family = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in tiny_models.LIKE_OTHERS))
        for name in tiny_models.NAMES
    ],
)
each_kind = pytest.mark.parametrize("name", tiny_models.OF_EACH_KIND)


# names of wrappers are those of tests/weights/test_wrappers.py
@pytest.mark.parametrize(
    "architecture", sorted({*known_architectures()} - {*wrapping_architectures()})
)
def test_every_architecture_has_a_tiny_model(architecture: str) -> None:
    covered = {a for config in tiny_models.CONFIGS.values() for a in config["architectures"]}
    assert architecture in covered, (
        f"{architecture} has no tiny model: add its config.json, with small sizes, to CONFIGS in "
        "tests/kit/tiny_models.py; every test of this file then runs for it"
    )


def tokens_of(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCAB_SIZE, length, np.int32)


class Sequence:
    """Tokens, slot and pages of one sequence of a hand-made step."""

    def __init__(self, token_ids: np.ndarray, first_page: int) -> None:
        self.token_ids = token_ids
        self.slot = first_page  # which no other sequence has
        self.pages = np.arange(first_page, first_page + -(-len(token_ids) // PAGE_SIZE))

    def slots(self, start: int, stop: int, each: int = 1) -> np.ndarray:
        """The slots of the entries, of ``each`` so many tokens, that tokens complete; none: 0."""
        positions = np.arange(start, stop)
        entries = positions // each
        slots = self.pages[entries // PAGE_SIZE] * PAGE_SIZE + entries % PAGE_SIZE
        return np.where((positions + 1) % each == 0, slots, 0)


def run_step(
    model: Model,
    params: Params,
    kv: State,
    decodes: list[tuple[Sequence, int]],
    prefills: list[tuple[Sequence, int, int]],
    *,
    pad_tokens: int = 0,
    pad_rows: int = 0,
    only_last: bool = False,
) -> tuple[np.ndarray, State]:
    """Logits of every real token, or with ``only_last`` of each row's last; decodes come first.

    A decode is (sequence, position), a prefill is (sequence, start, stop). Padding is as the
    executor makes it: rows of length 0 with invalid page ids, and tokens that map to page 0.
    ``pad_rows`` rows are added to both the decodes and the prefills.
    """
    spans = [(seq, at, at + 1) for seq, at in decodes] + prefills
    d = len(decodes) + pad_rows
    table = np.full((d + len(prefills) + pad_rows, MAX_PAGES), 10**6, np.int32)
    lens, begins = np.zeros(len(table), np.int32), np.zeros(len(table), np.int32)
    owners = np.full(len(table), NUM_PAGES, np.int32)  # the last state row is that of padding
    sizes = [group.tokens_per_entry for group in model.state.groups]
    ids, positions, is_token = [], [], []
    slots: list[list[int]] = [[] for _ in sizes]

    def add(row: int, seq: Sequence, start: int, stop: int) -> None:
        table[row, : len(seq.pages)] = seq.pages
        owners[row], begins[row], lens[row] = seq.slot, start, stop
        ids.extend(seq.token_ids[start:stop])
        positions.extend(range(start, stop))
        is_token.extend([True] * (stop - start))
        for own, size in zip(slots, sizes, strict=True):
            own.extend(seq.slots(start, stop, size))

    def pad(count: int) -> None:
        ids.extend([7] * count)
        positions.extend([0] * count)
        is_token.extend([False] * count)
        for own in slots:
            own.extend([0] * count)

    for row, span in enumerate(spans[: len(decodes)]):
        add(row, *span)
    pad(pad_rows)
    for row, span in enumerate(prefills, start=d):
        add(row, *span)
    starts = np.cumsum([0, *(stop - start for _, start, stop in prefills), *[0] * pad_rows])
    pad(pad_tokens)
    # each group of layers has its own pages for a sequence, at an offset of NUM_PAGES per group
    held, pages = table < 10**6, list[Pages]()
    for g, (each, size) in enumerate(zip(slots, sizes, strict=True)):
        own = np.array(each)
        moved = own + (own > 0) * g * NUM_PAGES * PAGE_SIZE, table + held * g * NUM_PAGES
        pages.append(Pages(*(jnp.asarray(x, jnp.int32) for x in (*moved, lens // size))))
    last = jnp.asarray(np.where(lens > 0, np.r_[0:d, d + starts[1:] - 1], 0))
    of_prompts = np.searchsorted(starts[1:], np.arange(len(ids) - d), side="right")
    of_token = np.r_[0:d, d + np.minimum(of_prompts, len(starts) - 2)].astype(np.int32)
    ctx = StepContext(
        jnp.asarray(positions),
        Rows(
            of_token=jnp.asarray(of_token),
            is_token=jnp.asarray(np.array(is_token, bool)),
            slots=jnp.asarray(owners),
            begins=jnp.asarray(begins),
            last_tokens=last,
            query_start_loc=jnp.asarray(starts, jnp.int32),
        ),
        tuple(pages),
        num_decodes=d,
        pins=ALL_XLA,
    )
    logits, kv = _jit_step(model, params, kv, jnp.asarray(ids), ctx, last if only_last else None)
    if only_last:
        return np.asarray(logits)[lens > 0], kv
    prefill_tokens = sum(stop - start for _, start, stop in prefills)
    real = np.r_[0 : len(decodes), d : d + prefill_tokens]
    return np.asarray(logits)[real], kv


def _step(model, params, kv, ids, ctx, last):
    hidden, kv = hidden_states(model, params, ids, ctx, kv, last)
    return unembed(model, params, hidden), kv


# Most of the time of these tests is compilation, which takes a third less without LLVM's optimiser.
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_jit_step = _jit(_step, static_argnums=0)
_jit_forward = _jit(forward, static_argnums=0)


def nan_pool(model: Model) -> State:
    """A pool in which every value is NaN until it is written."""
    pools, pages = len(model.state.bytes_per_entry), NUM_PAGES * len(model.state.groups)
    kv = model.state.abstract((pages,) * pools, PAGE_SIZE, NUM_PAGES + 1)
    return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), kv)


def prefilled(model: Model, params: Params, kv: State, seq: Sequence) -> State:
    """The pool after the first two chunks of a sequence."""
    for start in (0, CHUNK):
        _, kv = run_step(model, params, kv, [], [(seq, start, start + CHUNK)])
    return kv


def dense(model: Model, params: Params, token_ids: np.ndarray) -> np.ndarray:
    return np.asarray(_jit_forward(model, params, token_ids))


@every_family
def test_prefill_equals_the_dense_forward(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    seq = Sequence(tokens_of(1), 3)
    paged, _ = run_step(model, params, nan_pool(model), [], [(seq, 0, LENGTH)])
    np.testing.assert_allclose(
        paged, dense(model, params, seq.token_ids), atol=TOLERANCE, rtol=TOLERANCE
    )


@every_family
def test_decode_equals_prefill(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    seq, kv, rows = Sequence(tokens_of(2), 5), nan_pool(model), []
    for position in range(LENGTH):
        logits, kv = run_step(model, params, kv, [(seq, position)], [])
        rows.append(logits[0])
    whole, _ = run_step(model, params, nan_pool(model), [], [(seq, 0, LENGTH)])
    np.testing.assert_allclose(np.stack(rows), whole, atol=TOLERANCE, rtol=TOLERANCE)


@every_family
def test_chunked_equals_whole(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    seq, kv, parts = Sequence(tokens_of(3), 2), nan_pool(model), []
    for start in range(0, LENGTH, CHUNK):
        logits, kv = run_step(model, params, kv, [], [(seq, start, start + CHUNK)])
        parts.append(logits)
    whole, _ = run_step(model, params, nan_pool(model), [], [(seq, 0, LENGTH)])
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=TOLERANCE, rtol=TOLERANCE)


@each_kind
def test_padded_equals_exact(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    old, new = Sequence(tokens_of(4), 1), Sequence(tokens_of(5, 9), 7)
    kv = prefilled(model, params, nan_pool(model), old)
    step = ([(old, 2 * CHUNK)], [(new, 0, 9)])
    exact, _ = run_step(model, params, kv, *step)
    padded, _ = run_step(model, params, kv, *step, pad_tokens=6, pad_rows=2)
    np.testing.assert_allclose(padded, exact, atol=TOLERANCE, rtol=TOLERANCE)


@each_kind
def test_only_last_tokens_equal_those_of_all(name: str) -> None:
    """The pages also get the keys and values of the other tokens, which the next step reads."""
    model, params = tiny_models.tiny_model(name)
    old, new, chunked = (Sequence(tokens_of(20 + i), 1 + 6 * i) for i in range(3))
    kv = nan_pool(model)
    for seq in (old, chunked):
        kv = prefilled(model, params, kv, seq)
    step = ([(old, 2 * CHUNK)], [(new, 0, 9), (chunked, 2 * CHUNK, 2 * CHUNK + 2)])
    every, kv_of_all = run_step(model, params, kv, *step, pad_tokens=6, pad_rows=2)
    last, kv_of_last = run_step(model, params, kv, *step, pad_tokens=6, pad_rows=2, only_last=True)
    np.testing.assert_allclose(last, every[[0, 9, 11]], atol=TOLERANCE, rtol=TOLERANCE)
    following = [(old, 2 * CHUNK + 1), (new, 9), (chunked, 2 * CHUNK + 2)]
    after = [run_step(model, params, pool, following, [])[0] for pool in (kv_of_all, kv_of_last)]
    np.testing.assert_allclose(*after, atol=TOLERANCE, rtol=TOLERANCE)


@each_kind
def test_dense_only_last_token_equals_that_of_all(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    ids, ctx = jnp.asarray(tokens_of(23)), dense_context(LENGTH)
    whole, alone = (
        hidden_states(model, params, ids, ctx, only=only)[0]
        for only in (None, jnp.array([LENGTH - 1]))
    )
    np.testing.assert_allclose(alone, whole[-1:], atol=TOLERANCE, rtol=TOLERANCE)


@every_family
def test_batched_equals_alone(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    seqs = [Sequence(tokens_of(6 + i), 1 + 6 * i) for i in range(3)]
    kv = nan_pool(model)
    for seq in seqs:
        kv = prefilled(model, params, kv, seq)
    decodes, chunk = [(seq, 2 * CHUNK) for seq in seqs[:2]], (seqs[2], 2 * CHUNK, 3 * CHUNK)
    together, _ = run_step(model, params, kv, decodes, [chunk])
    alone = [run_step(model, params, kv, [one], [])[0] for one in decodes]
    alone.append(run_step(model, params, kv, [], [chunk])[0])
    np.testing.assert_allclose(together, np.concatenate(alone), atol=TOLERANCE, rtol=TOLERANCE)


@each_kind
def test_forward_vmaps(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    batch = np.stack([tokens_of(9), tokens_of(10)])
    mapped = _jit(jax.vmap(lambda ids: forward(model, params, ids)))(batch)
    one_by_one = np.stack([dense(model, params, ids) for ids in batch])
    np.testing.assert_allclose(mapped, one_by_one, atol=TOLERANCE, rtol=TOLERANCE)


@each_kind
def test_forward_differentiates(name: str) -> None:
    """Every weight has a finite gradient, and in one direction it equals a finite difference."""
    model, params = tiny_models.tiny_model(name)
    ids = tokens_of(11, 8)

    def loss(params: Params) -> jax.Array:
        logprobs = jax.nn.log_softmax(forward(model, params, ids[:-1]))
        return -jnp.mean(jnp.take_along_axis(logprobs, ids[1:, None], axis=-1))

    loss_and_gradient = _jit(jax.value_and_grad(loss))
    _, gradient = loss_and_gradient(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        chooses = path[-1].key == "choice_bias"  # of experts, whose weights do not depend on it
        assert np.isfinite(leaf).all() and np.any(leaf) != chooses, jax.tree_util.keystr(path)
    direction = tiny_models.random_params(model, seed=1)["layers_0"]["o"]
    direction = direction / jnp.linalg.norm(direction)

    def moved(step: float) -> float:
        layer = {**params["layers_0"], "o": params["layers_0"]["o"] + step * direction}
        return float(loss_and_gradient({**params, "layers_0": layer})[0])

    step = 3e-2
    difference = (moved(step) - moved(-step)) / (2 * step)
    along = float(jnp.vdot(gradient["layers_0"]["o"], direction))
    assert difference == pytest.approx(along, rel=2e-2, abs=1e-4)


@each_kind
def test_taps_hold_the_activations_of_each_layer(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    ids = jnp.asarray(tokens_of(12))
    names = [f"layers.{i}.{tap}" for i in range(2) for tap in LAYER_TAPS]
    logits, taps = forward(model, params, ids, taps=(*names, "final_norm"))
    np.testing.assert_allclose(logits, forward(model, params, ids), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(unembed(model, params, taps["final_norm"]), logits)
    before, mixed, fed, after = (
        np.stack([taps[f"layers.{i}.{w}"] for i in (0, 1)]) for w in LAYER_TAPS
    )
    if model.config.layers[0].end is None:  # which changes the sum
        np.testing.assert_allclose(before + mixed + fed, after, atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(after[0], before[1], atol=1e-5, rtol=1e-5)


@every_family
def test_bfloat16_traces_under_strict_promotion(name: str) -> None:
    model = build_model(tiny_models.tiny_config(name), "bfloat16")
    params = abstract_params(model)
    stated = {path: array.dtype for path, array in model.arrays.items()}
    assert {name: leaf.dtype for name, leaf in by_path(params).items()} == stated
    ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        logits = jax.eval_shape(lambda p, x: forward(model, p, x), params, ids)
    assert logits.dtype == jnp.float32


@every_family
def test_the_module_reads_every_parameter_of_the_specs(name: str) -> None:
    """And no other one: a missing parameter is an error."""
    model = build_model(tiny_models.tiny_config(name), "bfloat16")
    params = abstract_params(model)
    ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    traced = jax.make_jaxpr(lambda p, x: forward(model, p, x))(params, ids)
    _, used = dce_jaxpr(traced.jaxpr, [True])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert [path for path, is_used in zip(paths, used, strict=False) if not is_used] == []


@every_family
def test_specs_fill_each_parameter_from_tensors_used_once(name: str) -> None:
    model, _ = tiny_models.tiny_model(name)
    sources = Counter(s[::3] for spec in model.param_specs for s in spec.sources)  # name and part
    assert set(sources.values()) == {1}
    assert len({spec.path for spec in model.param_specs}) == len(model.param_specs)
    built = {path: a.shape for path, a in built_arrays(model, random_hf_tensors(model)).items()}
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    expected = {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}
    assert built == expected


@every_family
def test_fused_axes_are_as_wide_as_their_dimension(name: str) -> None:
    model, _ = tiny_models.tiny_model(name)
    fused = [
        (array.shape[i], axis)
        for array in model.arrays.values()
        for i, axis in enumerate(array.axes)
        if isinstance(axis, Fused)
    ]
    assert fused or name == "rwkv", "no matrices are joined"
    assert all(sum(axis.widths) == size for size, axis in fused)
