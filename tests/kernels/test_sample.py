"""sample: random bits, properties that the sweep does not test, and errors for bad arguments."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from kit.interpreted_process import interpreted
from pallas_kernels.native.library import MISSING, library
from pallas_kernels.sample import launch
from pallas_kernels.sample.api import OP, SampleArgs, sample
from pallas_kernels.sample.cases import MIXED, PLAIN, SampleCase, build
from pallas_kernels.sample.xla import argmax, gumbel, threefry


def _built(case: SampleCase, seed: int) -> SampleArgs:
    (args,) = jax.tree.map(jnp.asarray, build(case, seed).args)
    return args


def test_threefry_is_jax_s() -> None:
    key = jnp.array([7, 0xDEADBEEF], jnp.uint32)
    low = jnp.arange(64, dtype=jnp.uint32)
    high = low * jnp.uint32(77)
    reference = threefry_2x32(key, jnp.concatenate([low, high]))
    ours = jnp.concatenate(threefry(key[0], key[1], low, high))
    np.testing.assert_array_equal(reference, ours)


def test_noise_is_gumbel_and_depends_on_seed_and_position_only() -> None:
    zeros = jnp.zeros(2, jnp.int32)
    seeds = jnp.array([5, 6], jnp.int32)
    noise = np.asarray(gumbel(seeds, zeros, zeros + 3, 100_001))
    # mean and variance of the standard Gumbel distribution: 0.5772, 1.6449
    np.testing.assert_allclose(noise.mean(axis=1), np.euler_gamma, atol=0.02)
    np.testing.assert_allclose(noise.var(axis=1), np.pi**2 / 6, atol=0.05)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.02
    np.testing.assert_array_equal(noise[1:], gumbel(seeds[1:], zeros[1:], zeros[1:] + 3, 100_001))
    assert (noise[0] != gumbel(seeds[:1], zeros[:1], zeros[:1] + 4, 100_001)[0]).mean() > 0.99


def test_argmax_takes_the_first_of_equals() -> None:
    logits = np.array([[1, 5, 5, 2], [-np.inf] * 4, [3, 0, 0, 3]], np.float32)
    np.testing.assert_array_equal(argmax(jnp.asarray(logits)), [1, 0, 0])


@pytest.mark.parametrize("impl", ["native", "xla", "ref"])
def test_rows_do_not_depend_on_their_neighbours(impl: str) -> None:
    if impl == "native" and library() is None:
        pytest.skip(MISSING)
    run = jax.jit(OP.ref if impl == "ref" else partial(sample, impl=impl))
    args = _built(SampleCase("rows", 320, MIXED, 8), 3)
    in_a_batch = np.asarray(run(args))
    for row in range(8):
        alone = jax.tree.map(itemgetter(slice(row, row + 1)), args)
        assert run(alone)[0] == in_a_batch[row]


@pytest.mark.parametrize("impl", ["xla", "ref"])
def test_tokens_that_a_mask_forbids_have_logits_of_minus_infinity(impl: str) -> None:
    run = jax.jit(OP.ref if impl == "ref" else partial(sample, impl=impl))
    args = _built(SampleCase("rows", 320, MIXED, 8), 3)
    bits = np.random.default_rng(0).random((8, 320)) < 0.1
    masks = jnp.asarray(np.packbits(bits, axis=1, bitorder="little").view(np.uint32))
    drawn = run(replace(args, logits=jnp.where(bits, args.logits, -jnp.inf)))
    np.testing.assert_array_equal(run(replace(args, masks=masks)), drawn)
    assert bits[np.arange(8), drawn].all()


@pytest.mark.parametrize("impl", [None, "xla"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_yield_an_id(value: float, impl: str | None) -> None:
    args = _built(SampleCase("nan", 320, MIXED, 16), 0)
    logits = args.logits.at[:8].set(value).at[8:, 5:300].set(value)
    drawn = np.asarray(jax.jit(partial(sample, impl=impl))(replace(args, logits=logits)))
    assert (drawn >= 0).all() and (drawn < 320).all()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_the_triton_kernels_find_the_thresholds() -> None:
    wrong = interpreted("kit.sample_thresholds")
    assert wrong and not any(wrong.values()), wrong


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        pytest.param("logits", (8,), np.float32, r"float32\(8,\), not float32\[B, V\]", id="rank"),
        pytest.param("logits", (8, 9), np.float16, "logits are float16", id="dtype"),
        pytest.param("top_k", (7,), np.int32, r"top_k \(7,\) does not fit", id="top_k"),
        pytest.param(
            "positions", (8, 1), np.int32, r"positions \(8, 1\) does not fit", id="positions"
        ),
    ],
)
def test_arguments_that_do_not_fit(
    name: str, shape: tuple[int, ...], dtype: Any, message: str
) -> None:
    args = _built(SampleCase("plain", 9, (PLAIN,), 8), 0)
    with pytest.raises(ValueError, match=message):
        sample(replace(args, **{name: jnp.zeros(shape, dtype)}))


@pytest.mark.parametrize(("rows", "blocks"), [(1, 4), (8, 16), (32, 64), (256, 64)])
def test_blocks_per_cta(rows: int, blocks: int) -> None:
    assert launch.blocks_per_cta(rows, 1187) == blocks


@pytest.mark.parametrize(("loads", "ctas", "candidates"), [(1, 1, 4), (149, 24, 16), (149, 4, 38)])
def test_candidates_per_thread(loads: int, ctas: int, candidates: int) -> None:
    assert launch.candidates_per_thread(loads, ctas) == candidates


def test_a_vocabulary_above_the_limit_is_refused() -> None:
    args = _built(SampleCase("plain", 9, (PLAIN,), 1), 0)
    huge: Any = jax.ShapeDtypeStruct((1, launch.MAX_VOCAB + 1), jnp.float32)
    assert "is above" in str(OP.impls[0].refuses("gpu", (replace(args, logits=huge),), {}))
