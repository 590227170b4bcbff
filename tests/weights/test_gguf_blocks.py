"""Every quantised GGUF type: the internal form holds exactly the values of the ``gguf`` package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.weights.gguf.blocks import FORMS, from_blocks
from kit.gguf_blocks import random_rows
from pallas_kernels.lib.quantised import dequantised
from pallas_kernels.native import library

# MXFP4 is converted by numpy alone: only nibbles change their places.
NATIVE = [kind for kind in FORMS if kind.name != "MXFP4"]


@pytest.mark.parametrize("inputs", [256, 512])
@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_values_are_exact(kind: GGMLQuantizationType, inputs: int) -> None:
    rows = random_rows(kind, 6, inputs)
    w = from_blocks(kind, rows)
    assert w.form == FORMS[kind]
    shapes = {name: (part.shape, str(part.dtype)) for name, part in w.tree().items()}
    assert shapes == FORMS[kind].arrays(6, inputs)
    np.testing.assert_array_equal(dequantised(w), dequantize(rows, kind))


def test_a_row_that_64_does_not_divide() -> None:
    kind = GGMLQuantizationType.Q4_0
    rows = random_rows(kind, 3, 96)
    np.testing.assert_array_equal(dequantised(from_blocks(kind, rows)), dequantize(rows, kind))


@pytest.mark.skipif(library.library() is None, reason=library.MISSING)
@pytest.mark.parametrize("inputs", [96, 256, 768])
@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_the_native_conversion_equals_numpy(kind: GGMLQuantizationType, inputs: int) -> None:
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    if inputs % per_block:
        pytest.skip("blocks are longer")
    rows = random_rows(kind, 6, inputs)
    made = {name: np.empty(*array) for name, array in FORMS[kind].arrays(6, inputs).items()}
    assert library.from_blocks(kind.value, rows, rows.size // nbytes, made)
    for name, expected in from_blocks(kind, rows).tree().items():
        np.testing.assert_array_equal(made[name].view(np.uint8), expected.view(np.uint8))


def test_a_type_that_the_library_does_not_know() -> None:
    assert not library.from_blocks(99, np.zeros((1, 1), np.uint8), 1, {"int8": np.zeros((1, 1))})
