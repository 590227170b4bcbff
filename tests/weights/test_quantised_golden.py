"""Each published format against the values that its own program computes (tests/data/quantised)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint
from pallas_kernels.lib.quantised import dequantised as definition

DATA = Path(__file__).parents[1] / "data" / "quantised"
NAME = "model.layers.0.mlp.down_proj.weight"
FORMS = {
    "awq": "int4 g32 zeros",
    "fp8_blocks": "fp8 12x64",
    "fp8_channel": "fp8 per row",
    "fp8_fine": "fp8 8x64",
    "fp8_fine_e8m0": "fp8 8x64",
    "fp8_tensor": "fp8 per row",
    "gptq4": "int4 g64",
    "gptq4_zeros": "int4 g32 zeros",
    "gptq8": "int8 per row",
    "gptq8_zeros": "int8 g32 offsets",
    "int8_channel": "int8 per row",
    "int8_channel_zeros": "int8 per row offsets",
    "mxfp4": "fp4 g32",
    "packed4_channel": "int4 per row",
    "packed4_g32": "int4 g32",
    "packed4_g64_zeros": "int4 g64 zeros",
    "packed8_channel_zeros": "int8 per row offsets",
    "packed8_g128": "int8 per row",
}


def opened(name: str, **changes: object) -> tuple[QuantisedCheckpoint, np.ndarray]:
    """A golden file as a checkpoint, and the matrix that is expected."""
    path = DATA / f"{name}.safetensors"
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["quantization_config"])
    scheme = quantization_scheme({"quantization_config": config | changes})
    assert scheme is not None
    checkpoint = QuantisedCheckpoint(SafetensorsCheckpoint([path]), scheme)
    return checkpoint, checkpoint.read("expected")


def test_every_file_is_tested() -> None:
    assert sorted(path.stem for path in DATA.glob("*")) == sorted(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_values(name: str) -> None:
    checkpoint, expected = opened(name)
    assert sorted(checkpoint.tensors) == ["expected", NAME]
    assert str(checkpoint.forms[NAME]) == FORMS[name]
    assert checkpoint.tensors[NAME].shape == expected.shape
    stored = checkpoint.read_quantised(NAME)
    arrays = checkpoint.forms[NAME].arrays(*expected.shape)
    assert {key: (a.shape, str(a.dtype)) for key, a in stored.tree().items()} == arrays
    assert stored.kind != "fp8" or arrays["scales"][1] == "float32"
    np.testing.assert_array_equal(np.asarray(definition(stored)), expected)
    np.testing.assert_array_equal(checkpoint.read(NAME), expected)
