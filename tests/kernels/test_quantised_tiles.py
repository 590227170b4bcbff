"""The order of a quantised matrix's values for the Hopper kernel."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lib.arrangements import TILES
from pallas_kernels.lib.quantised import Form, Quantised, quantised
from pallas_kernels.quantised_gemm.cases import random_matrix
from pallas_kernels.quantised_gemm.tiled.arrange import arrange, restore

FORMS = (
    (Form("int4", 128, "float16"), "int4"),
    (Form("int4", 128, "float16", zeros=True), "int4_zeros"),
    (Form("int4", 32, "float16", offsets=True), "int4_offsets"),
    (Form("int4", 32, "uint8", offsets=True, super_group=256), "q4_k"),
    (Form("int8", 32, "float16"), "int8"),
    (Form("int8", 32, "float16", offsets=True), "int8_offsets"),
    (Form("int8", 32, "uint8", offsets=True, super_group=256), "q5_k"),
    (Form("int8", 16, "int8", super_group=256), "q6_k"),
    (Form("fp8", None, "float32"), "fp8"),
    (Form("fp8", 128, "float32", block_outputs=128), "fp8_blocks"),
    (Form("fp4", 32, "float16"), "fp4"),
)


def _matrix(form: Form, name: str, outer: int = 128, inner: int = 512) -> Quantised:
    return random_matrix(np.random.default_rng(0), name, outer, inner, form.group or inner)


def traced(w: Quantised) -> Quantised:
    """The same matrix of JAX arrays."""
    return jax.tree.map(jnp.asarray, w)


@pytest.mark.parametrize(("form", "name"), FORMS, ids=[name for _, name in FORMS])
def test_shapes_are_declared_and_the_matrix_is_restored(form: Form, name: str) -> None:
    w = _matrix(form, name)
    tiled = arrange(w)
    tree = tiled.tree()
    expected = TILES.arrays(form, 128, 512)
    assert {n: (x.shape, str(x.dtype)) for n, x in tree.items()} == expected
    assert len(tree) == 1 or form.super_group is None
    assert quantised(tree).form == tiled.form and tiled.form == replace(form, kind=tiled.form.kind)
    assert restore(tiled).kind == w.kind
    for part, same in zip(tiled.arrays, jax.jit(lambda: arrange(traced(w)).arrays)(), strict=True):
        np.testing.assert_array_equal(part, same)
    for back in (restore(tiled).arrays, jax.jit(lambda: restore(traced(tiled)).arrays)()):
        for before, after in zip(w.arrays, back, strict=True):
            np.testing.assert_array_equal(before, after)


def test_a_tile_is_contiguous_and_a_thread_has_its_operand() -> None:
    form, name = FORMS[0]
    w = _matrix(form, name)
    values = np.zeros((128, 512), np.uint8)
    # lane 4 * g + t of warp 1: row 16 + g + 8, input 2 * t + 9 of the fourth wgmma of a tile
    g, t = 5, 2
    values[64 + 16 + g + 8, 128 + 48 + 2 * t + 9] = 15
    low, high = values.reshape(128, -1, 2, 32).transpose(2, 0, 1, 3)
    tiled = arrange(Quantised("int4", (low | high << 4).reshape(128, -1), w.scales))
    tiles = tiled.values.reshape(2, 8, 128, 16)  # outputs, inputs, thread, bytes
    (place,) = np.argwhere(tiles)
    word = tiles[1, 2, 32 + 4 * g + t].view("<u4")[3]
    assert list(place[:3]) == [1, 2, 32 + 4 * g + t]
    assert (
        word == 15 << 16 + 4 * 3
    )  # high half: the second input; nibble 2 * (input + 8) + (row + 8)


def test_scales_of_a_tile_are_adjacent() -> None:
    form, name = FORMS[0]
    w = _matrix(form, name)
    tiled = arrange(w)
    np.testing.assert_array_equal(tiled.scales.reshape(2, 4, 64)[1, 3], w.scales[64:, 3])


@pytest.mark.parametrize("shape", [(96, 512), (128, 96)])
def test_matrices_without_whole_tiles_are_refused(shape: tuple[int, int]) -> None:
    form, name = Form("int4", 32, "float16"), "int4"
    with pytest.raises(ValueError, match="has no tiles of 64"):
        arrange(_matrix(form, name, *shape))
