"""Every quantised GGUF type: the internal form holds exactly the values of the ``gguf`` package."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.weights.gguf.blocks import FORMS, from_blocks
from pallas_kernels.native import library
from pallas_kernels.quantised import dequantised

# MXFP4 is converted by numpy alone: only nibbles change their places.
NATIVE = [kind for kind in FORMS if kind.name != "MXFP4"]


def random_rows(kind: GGMLQuantizationType, outputs: int, inputs: int) -> np.ndarray:
    """Random bytes whose float16 factors are finite and not tiny: uint8[O, bytes of a row]."""
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    blocks = rng.integers(0, 256, (outputs, inputs // per_block, nbytes), np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:2])
        return blocks.reshape(outputs, -1)
    halves = {"Q6_K": (208,)}.get(kind.name, (0, 2) if kind.name[-2:] in ("_1", "_K") else (0,))
    for at in halves:
        factors = rng.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


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
