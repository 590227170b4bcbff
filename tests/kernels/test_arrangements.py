"""Arrangements of quantised matrices: nothing is lost, and single rows can be read."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lib.arrangements import (
    ARRANGEMENTS,
    LANES,
    TILES,
    Arrangement,
    arrangement_of,
    rows_of,
)
from pallas_kernels.lib.quantised import Form, Quantised, dequantised
from pallas_kernels.native import library
from pallas_kernels.quantised_gemm.cases import FORMS, random_matrix

GROUPS = {"q6_k": 16, "int8": 32, "int8_offsets": 32, "int4_offsets": 32}
CASES = [(one, form) for one in ARRANGEMENTS for form in FORMS]


def on_device(w: Quantised) -> Quantised:
    return jax.tree.map(jnp.asarray, w)


@pytest.mark.parametrize(("arrangement", "form"), CASES, ids=lambda one: getattr(one, "name", one))
def test_rows_of_an_arranged_matrix(arrangement: Arrangement, form: str) -> None:
    w = random_matrix(np.random.default_rng(2), form, 128, 512, GROUPS.get(form, 64))
    assert arrangement.of_stacks.fits(w.form, 128, 512)
    assert arrangement.fits(w.form, 128, 512) == (arrangement is LANES or w.kind != "fp8")
    arranged = on_device(arrangement.arrange(w))
    assert arrangement_of(arranged.kind) is arrangement and arranged.base == w.kind
    declared = {n: (a.shape, str(a.dtype)) for n, a in arranged.tree().items()}
    assert declared == arrangement.arrays(w.form, 128, 512)
    assert (arranged.num_outputs, arranged.num_inputs, arranged.group) == (128, 512, w.group)
    expected = np.asarray(dequantised(w))
    np.testing.assert_array_equal(dequantised(arrangement.restore(arranged)), expected)
    ids = jnp.asarray([5, 127, 0, 64, 200, -3])
    np.testing.assert_array_equal(rows_of(arranged, ids), expected[[5, 127, 0, 64, 127, 0]])
    np.testing.assert_array_equal(rows_of(on_device(w), ids), rows_of(arranged, ids))


def test_a_matrix_that_tiles_do_not_divide() -> None:
    form = random_matrix(np.random.default_rng(2), "int4", 24, 64, 32).form
    assert not any(arrangement.fits(form, 24, 64) for arrangement in ARRANGEMENTS)


def test_blocks_of_outputs_that_are_not_whole_tiles() -> None:
    form = Form("fp8", 128, "float32", block_outputs=32)
    assert not TILES.of_stacks.fits(form, 128, 512)
    assert TILES.of_stacks.fits(replace(form, block_outputs=64), 128, 512)
    assert LANES.fits(form, 128, 512)
    assert not LANES.fits(replace(form, block_outputs=8), 128, 512)


@pytest.mark.skipif(library.library() is None, reason=library.MISSING)
@pytest.mark.parametrize(("arrangement", "form"), CASES, ids=lambda one: getattr(one, "name", one))
def test_the_native_order_equals_the_definition(arrangement: Arrangement, form: str) -> None:
    w = random_matrix(np.random.default_rng(2), form, 128, 320, 16)
    arranged = arrangement.arrange(w)
    values = arranged.values
    if arranged.recorded is None:
        assert values.dtype == (w.values.dtype if w.kind == "fp8" else np.uint8)
    expected = replace(arrangement, pack=lambda kind, values: None).arrange(w).values
    np.testing.assert_array_equal(values.view(np.uint8), expected.view(np.uint8))
