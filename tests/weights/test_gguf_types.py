"""The types of GGUF files against those of the ``gguf`` package."""

from __future__ import annotations

import subprocess
import sys

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxinfer.weights.gguf.types import BLOCK_SIZES, TensorType, ValueType


def test_they_equal_those_of_the_package() -> None:
    assert {one.name: one.value for one in ValueType} == {
        one.name: one.value for one in GGUFValueType
    }
    assert {one.name: one.value for one in TensorType} == {
        one.name: one.value for one in GGMLQuantizationType
    }
    sizes = {GGMLQuantizationType(one): size for one, size in BLOCK_SIZES.items()}
    assert sizes == dict(GGML_QUANT_SIZES)


def test_reading_a_file_does_not_import_the_package() -> None:
    program = "import sys, jaxinfer.weights.gguf.checkpoint; sys.exit('gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
