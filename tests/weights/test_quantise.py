"""Quantising floats: sizes, errors, and a checkpoint whose linear layers are quantised."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.models.registry import build_model
from jaxinfer.weights.gguf.blocks import FORMS
from jaxinfer.weights.gguf.types import TensorType
from jaxinfer.weights.plan import forms_of, plan_params
from jaxinfer.weights.quantised.on_load import QuantisedOnLoad, linear_names
from jaxinfer.weights.quantised.quantise import SCHEMES, form_for, quantise, quantise_as
from jaxinfer.weights.quantised.values import CHUNK, dequantised
from kit.checkpoints import (
    random_hf_tensors,
    tiny_gpt2_config,
    tiny_llama_config,
    tiny_qwen2_config,
)
from kit.memory_checkpoint import InMemory
from pallas_kernels.lib import quantised as definition


def normal(outputs: int, inputs: int) -> np.ndarray:
    """Rows of different sizes."""
    rng = np.random.default_rng(outputs)
    size = rng.uniform(0.01, 0.1, (outputs, 1))
    return (rng.normal(size=(outputs, inputs)) * size).astype(np.float32)


def relative_error(scheme: str, matrix: np.ndarray) -> float:
    difference = dequantised(quantise(matrix, scheme)) - matrix.astype(np.float32)
    return float(np.linalg.norm(difference) / np.linalg.norm(matrix.astype(np.float32)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inputs", [32, 64, 96, 128, 384])
def test_form(scheme: str, inputs: int) -> None:
    w = quantise(normal(24, inputs), scheme)
    assert w.form == form_for(scheme, (24, inputs))
    arrays = w.form.arrays(24, inputs)
    assert {key: (a.shape, str(a.dtype)) for key, a in w.tree().items()} == arrays
    np.testing.assert_array_equal(dequantised(w), np.asarray(definition.dequantised(w)))


def test_groups() -> None:
    groups = {256: 128, 192: 64, 96: 32, 128: None, 64: None, 32: None}
    for inputs, group in groups.items():
        form = form_for("int4", (8, inputs))
        assert form is not None and form.group == group
    assert form_for("int4", (8, 48)) is None
    assert form_for("int8", (8, 6)) is None
    assert form_for("fp8", (8,)) is None


def test_error_of_each_scheme() -> None:
    """The error on normal values; int4 with 7.5 alone as the largest value would have 0.111."""
    matrix = normal(512, 1024)
    assert relative_error("fp8", matrix) == pytest.approx(0.0265, abs=0.0005)
    assert relative_error("int8", matrix) == pytest.approx(0.0078, abs=0.0005)
    assert relative_error("int4", matrix) == pytest.approx(0.1016, abs=0.0005)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_largest_values_are_kept(scheme: str) -> None:
    """Per-output schemes reach each row's extremes exactly but for the rounding of scales."""
    matrix = np.zeros((3, 128), np.float32)
    matrix[0, 5], matrix[1, 7] = 3.0, -0.25
    np.testing.assert_allclose(dequantised(quantise(matrix, scheme)), matrix, rtol=2**-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tiny_values_become_zero(scheme: str) -> None:
    """Without dividing by 0 (warnings are errors)."""
    tiny = np.full((2, 64), 1e-44, np.float32)
    values = dequantised(quantise(tiny, scheme))
    np.testing.assert_array_equal(values, 0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(scheme: str, value: float) -> None:
    matrix = normal(8, 64)
    matrix[3, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise(matrix, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_change_nothing(scheme: str) -> None:
    matrix = normal(CHUNK // 256 + 7, 256).astype(ml_dtypes.bfloat16)
    one, several = (quantise(matrix, scheme, threads) for threads in (1, 3))
    np.testing.assert_array_equal(one.values, several.values)
    np.testing.assert_array_equal(one.scales, several.scales)


# To the form of other weights

ERRORS = {  # relative RMS, of normal values
    "Q4_0": 0.088,
    "Q4_1": 0.078,
    "Q5_0": 0.0054,
    "Q5_1": 0.0046,
    "Q8_0": 0.0054,
    "Q4_K": 0.0785,
    "Q5_K": 0.01,
    "Q6_K": 0.0049,
    "MXFP4": 0.112,
    "zeros": 0.101,
    "offsets": 0.0059,
    "blocks": 0.0264,
}
# a second time, of the quantised values; of others 0 up to the rounding of float32
AGAIN = {"Q5_K": 0.005, "Q6_K": 0.003, "zeros": 0.004}
FORMS_OF = {kind.name: form for kind, form in FORMS.items()} | {
    "zeros": definition.Form("int4", 128, "float16", zeros=True),  # AWQ, GPTQ
    "offsets": definition.Form("int8", 128, "float32", offsets=True),
    "blocks": definition.Form("fp8", 128, "float32", block_outputs=128),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_form_that_a_model_may_have(name: str) -> None:
    assert FORMS_OF.keys() == ERRORS.keys()
    form, matrix = FORMS_OF[name], normal(256, 512)
    matrix[0], matrix[1, :256], matrix[2] = 0, 0, 0.25
    w = quantise_as(matrix, form)
    assert w.form == form
    arrays = form.arrays(256, 512)
    assert {key: (a.shape, str(a.dtype)) for key, a in w.tree().items()} == arrays
    found = dequantised(w)
    np.testing.assert_array_equal(found, np.asarray(definition.dequantised(w)))
    error = np.linalg.norm(found - matrix) / np.linalg.norm(matrix)
    assert error == pytest.approx(ERRORS[name], rel=0.06)
    assert not found[0].any() and not found[1, :256].any()
    again = np.linalg.norm(dequantised(quantise_as(found, form)) - found) / np.linalg.norm(matrix)
    assert again <= AGAIN.get(name, 1e-7)


def test_values_beyond_the_dtype_of_scales() -> None:
    with pytest.raises(ValueError, match="too large for scales in float16"):
        quantise_as(np.full((2, 64), 1e9, np.float32), FORMS[TensorType.Q8_0])


# A checkpoint of floats


def on_load(scheme: str, ignore: tuple[str, ...] = ()) -> tuple[InMemory, QuantisedOnLoad]:
    model = build_model(tiny_qwen2_config(), "float32")
    checkpoint = InMemory(random_hf_tensors(model))
    return checkpoint, QuantisedOnLoad(checkpoint, scheme, linear_names(model, checkpoint, ignore))


def test_only_linear_layers_are_quantised() -> None:
    checkpoint, made = on_load("int8")
    expected = {name for name in checkpoint.tensors if name.endswith("_proj.weight")}
    assert made.forms.keys() == expected and len(expected) == 14
    assert made.tensors == checkpoint.tensors
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(made.read(name), checkpoint.read(name))


def test_ignored_layers() -> None:
    _, made = on_load("int4", ("model.layers.0.self_attn.o_proj", r"re:.*layers\.1\.mlp"))
    assert "model.layers.0.self_attn.o_proj.weight" not in made.forms
    assert "model.layers.1.mlp.down_proj.weight" not in made.forms
    assert len(made.forms) == 14 - 1 - 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loads_into_a_model(scheme: str) -> None:
    checkpoint, made = on_load(scheme)
    plain = build_model(tiny_qwen2_config(), "float32")
    model = replace(plain, forms=forms_of(plain.family, made))
    plan = {planned.spec.path: planned for planned in plan_params(model, made)}
    arrays = plan["layers_0/gate_up"].whole(made)
    tree = {path.rpartition("/")[2]: array for path, array in arrays.items()}
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    expected = np.concatenate([made.read(name) for name in names])
    np.testing.assert_array_equal(definition.dequantised(definition.quantised(tree)), expected)
    stored = np.concatenate([checkpoint.read(name) for name in names])
    assert np.linalg.norm(expected - stored) < 0.12 * np.linalg.norm(stored)


def test_names_with_a_prefix() -> None:
    """Some checkpoints of a family leave out or add a prefix."""
    model = build_model(tiny_llama_config(), "float32")
    model = replace(model, family=replace(model.family, optional_prefix="language_model."))
    tensors = {f"language_model.{n}": t for n, t in random_hf_tensors(model).items()}
    names = linear_names(model, InMemory(tensors))
    assert len(names) == 14 and all(name.startswith("language_model.model.") for name in names)


def test_unknown_scheme() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be one of fp8, int8, "):
        on_load("int3")


def test_model_without_linear_layers() -> None:
    """GPT-2 stores its matrices as [inputs, outputs]."""
    model = build_model(tiny_gpt2_config(), "float32")
    checkpoint = InMemory(random_hf_tensors(model))
    with pytest.raises(ConfigError, match="no linear layer that can be quantised; use it without"):
        QuantisedOnLoad(checkpoint, "int4", linear_names(model, checkpoint))


def test_weights_that_are_not_finite() -> None:
    model = build_model(tiny_llama_config(), "float32")
    tensors = random_hf_tensors(model)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][2, 2] = np.nan
    checkpoint = InMemory(tensors)
    made = QuantisedOnLoad(checkpoint, "int4", linear_names(model, checkpoint))
    with pytest.raises(CheckpointError, match=rf"tensor {name} cannot be quantised: values are "):
        made.read(name)
