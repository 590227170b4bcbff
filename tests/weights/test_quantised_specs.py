"""Specs of quantised matrices: their arrays, what is built of a checkpoint, random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.progress import NoProgress
from jaxinfer.models import quantised as specs_of_quantised
from jaxinfer.models.base import abstract_params
from jaxinfer.models.params import nested
from jaxinfer.models.quantised import arranged_on_device, sizes_by_form
from jaxinfer.models.registry import build_model
from jaxinfer.models.sources import RotaryRows, Source
from jaxinfer.nn.placement import Fused, default_placement
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.plan import plan_params
from kit.quantised_models import WIDTH, quantised_tensors
from kit.tiny_models import tiny_config
from pallas_kernels.lib.arrangements import ARRANGEMENTS, rows_of
from pallas_kernels.lib.quantised import (
    KINDS,
    Form,
    common_form,
    dequantised,
    in_form,
    is_matrix,
    quantised,
)
from pallas_kernels.native import library
from pallas_kernels.quantised_gemm.cases import random_matrix

MODEL, CHECKPOINT = quantised_tensors()
FLOAT32 = np.dtype(np.float32)


def _is_matrix(tree: object) -> bool:
    return isinstance(tree, dict) and is_matrix(tree)


@pytest.mark.parametrize("built", [True, False], ids=["native library", "without it"])
@pytest.mark.parametrize("arrangement", [None, *(one.name for one in ARRANGEMENTS)])
def test_arrays_of_a_checkpoint_are_those_of_the_specs_and_hold_its_values(
    arrangement: str | None, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not built:
        monkeypatch.setattr(library, "library", lambda: None)
    made: dict[str, np.ndarray] = {}
    model = replace(MODEL, arrangement=arrangement)
    for planned in plan_params(model, CHECKPOINT):
        made |= planned.whole(CHECKPOINT)
    params = nested(made)
    if any(planned.spec.finish for planned in plan_params(model, CHECKPOINT)):
        assert arrangement == "tiles" and library.library() is None
        params = arranged_on_device(params)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(model))
    first, second = params["layers_0"], params["layers_1"]
    layer = "model.layers.{}.{}.weight"

    def stored(index: int, *names: str) -> np.ndarray:
        return np.concatenate([CHECKPOINT.read(layer.format(index, name)) for name in names])

    def values(tree: dict[str, np.ndarray]) -> np.ndarray:
        w = quantised(tree)
        every = jnp.arange(w.num_outputs)
        by_rows = arrangement is None or (w.base, arrangement) == ("fp8", "tiles")
        assert w.kind == (w.base if by_rows else f"{w.base}_{arrangement}")
        return np.asarray(rows_of(quantised(jax.tree.map(jnp.asarray, tree)), every))

    qk = stored(0, "self_attn.q_proj", "self_attn.k_proj")
    v = stored(0, "self_attn.v_proj")
    if arrangement == "tiles":  # in a common form
        np.testing.assert_array_equal(values(first["qkv"]), np.concatenate([qk, v]))
    else:
        np.testing.assert_array_equal(values(first["qkv"]["part_0"]), qk)
        np.testing.assert_array_equal(values(first["qkv"]["part_1"]), v)
    np.testing.assert_array_equal(values(first["gate_up"]["part_1"]), stored(0, "mlp.up_proj"))
    np.testing.assert_array_equal(second["qkv"]["part_1"].T, stored(1, "self_attn.v_proj"))
    gate_up = stored(1, "mlp.gate_proj", "mlp.up_proj")
    np.testing.assert_array_equal(values(second["gate_up"]), gate_up)
    assert "int8" in params["embed"]  # in no product, as the head is not tied to it


@pytest.mark.parametrize("arrangement", [None, *(one.name for one in ARRANGEMENTS)])
def test_random_matrices_have_the_usual_deviation(arrangement: str | None) -> None:
    model = replace(MODEL, arrangement=arrangement)
    params = dummy_params(model, placement=default_placement(), seed=0, progress=NoProgress())
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(model))
    matrices = jax.tree.leaves(params, is_leaf=_is_matrix)
    kinds = set()
    for tree in filter(_is_matrix, matrices):
        matrix = quantised(tree)
        w = np.asarray(rows_of(matrix, jnp.arange(matrix.num_outputs)))
        kinds.add(matrix.base)
        # the mean of 0 to 15 is half a step, 0.0022, from the zero of int4
        assert 0.017 < w.std() < 0.023 and abs(w.mean()) < 0.003, tree.keys()
    assert kinds == {*KINDS}


def test_axes_of_blocks() -> None:
    """Gate and up are divided among devices by whole blocks of outputs."""
    arrays = MODEL.arrays
    assert arrays["layers_1/gate_up/fp8"].axes == (Fused("ffn", (WIDTH, WIDTH)), None)
    scales = arrays["layers_1/gate_up/scales"]
    assert scales.axes == (Fused("ffn", (WIDTH // 128, WIDTH // 128)), None)
    assert scales.shape == (2 * WIDTH // 128, WIDTH // 128)


@pytest.mark.parametrize("form", [Form("int8", 32, "float32"), Form("int4", None, "float16")])
def test_rows_of_quantised_matrices_are_ordered_with_their_scales(form: Form) -> None:
    rng, rows = np.random.default_rng(0), RotaryRows(3, 8, 4, interleaved=True)
    arrays = form.arrays(32, 64).items()
    made = {name: rng.integers(1, 99, shape).astype(dtype) for name, (shape, dtype) in arrays}
    source = Source("q", (32, 64), form, rows=rows)
    ordered = dequantised(source.ordered(quantised(made)))
    stored = dequantised(quantised(made))
    np.testing.assert_array_equal(ordered, stored[rows.order(32)])
    np.testing.assert_array_equal(source.unordered(np.asarray(ordered)), stored)


def test_blocks_of_outputs_whose_rows_part_get_scales_of_their_own() -> None:
    fp8 = Form("fp8", 128, "float32", block_outputs=128)
    config = {**tiny_config("glm4"), "hidden_size": 128}

    def form(**heads: int) -> Form | None:
        model = build_model({**config, **heads}, "float32")
        forms = (("model.layers.0.self_attn.q_proj.weight", fp8),)
        specs = replace(model, forms=forms).param_specs
        (found,) = (
            source.form
            for spec in specs
            for source in spec.sources
            if source.name == "model.layers.0.self_attn.q_proj.weight"
        )
        return found

    assert form(head_dim=64, num_attention_heads=2) == fp8  # a block is two heads
    assert form(head_dim=256) == replace(fp8, block_outputs=1)


def test_rows_of_blocks() -> None:
    """Scales of whole blocks move; else each row has those of its block."""
    rng = np.random.default_rng(0)
    w = random_matrix(rng, "fp8_blocks", 512, 256, 128)
    for order in (np.arange(512).reshape(4, 128)[::-1].ravel(), rng.permutation(512)):
        ordered = w.rows(order)
        assert ordered.form == w.form.ordered(order)
        np.testing.assert_array_equal(dequantised(ordered), np.asarray(dequantised(w))[order])
    assert ordered.block_outputs == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "phi3"])
def test_axes_of_parts_of_several_forms_have_their_outputs(name: str) -> None:
    """A tensor may have several parts of an axis: the queries and gates, or q, k and v."""
    model = build_model(tiny_config(name), "float32")
    kinds = ("k_proj", "v_proj", "gate_proj", "in_proj_z", "in_proj_b")
    tensors = {s.name for spec in model.declared_specs for s in spec.sources}
    chosen = [name for name in tensors if name.endswith(tuple(f"{kind}.weight" for kind in kinds))]
    forms = tuple((name, Form("int8", 16, "float16")) for name in chosen)
    for array in replace(model, forms=forms).arrays.values():
        for axis, length in zip(array.axes, array.shape, strict=True):
            assert not isinstance(axis, Fused) or sum(axis.widths) == length


Q4_K = Form("int4", 32, "uint8", offsets=True, super_group=256)
Q6_K = Form("int8", 16, "int8", super_group=256)


def test_k_forms_of_one_parameter_are_one_matrix_for_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model({**tiny_config("qwen3"), "hidden_size": 256, "head_dim": 64}, "float32")
    (spec,) = (spec for spec in model.declared_specs if spec.path == "layers_0/qkv")
    names = [source.name for source in spec.sources]
    forms = tuple(zip(names, (Q4_K, Q4_K, Q6_K), strict=True))

    def kept() -> Any:
        whole = replace(model, forms=forms, arrangement="tiles")
        (found,) = (spec for spec in whole.param_specs if spec.path == "layers_0/qkv")
        return found

    rng = np.random.default_rng(0)
    tensors = [
        random_matrix(
            rng, "q6_k" if form == Q6_K else "q4_k", source.shape[0], WIDTH, form.group or 0
        )
        for source, (_, form) in zip(spec.sources, forms, strict=True)
    ]
    made = kept().build(*tensors)
    shapes = {name: (array.shape, array.dtype) for name, array in made.items()}
    assert shapes == {name: (a.shape, a.dtype) for name, a in kept().arrays.items()}
    assert len(made) == 1  # one argument of a step
    matrix = quantised(jax.tree.map(jnp.asarray, made))
    expected = np.concatenate([dequantised(tensor) for tensor in tensors])
    found = rows_of(matrix, jnp.arange(matrix.num_outputs))
    np.testing.assert_array_equal(found, expected)
    monkeypatch.setattr(specs_of_quantised, "MAX_COMMON_BYTES", 0)
    assert kept().arrays.keys() == {"part_0", "part_1"}


def test_forms_without_a_common_one() -> None:
    assert common_form([Q4_K, Q6_K]) == Form("int8", 16, "int8", offsets=True, super_group=256)
    for other in (None, Form("int8", 32, "float16"), replace(Q6_K, super_group=128)):
        assert common_form([Q4_K, other]) is None
    large = random_matrix(np.random.default_rng(0), "q4_k", 64, 256, 32)
    large.scales[0, 0] = 200  # more than the six bits of Q4_K
    with pytest.raises(ValueError, match="do not fit int8"):
        in_form(large, Form("int8", 16, "int8", offsets=True, super_group=256))


def test_sizes_by_form() -> None:
    sizes = sizes_by_form(MODEL.param_specs, FLOAT32)
    assert sizes["fp8 128x128"] == (2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * 4 * 4)
    assert sizes["fp8 g128"] == (WIDTH * WIDTH, WIDTH * WIDTH + 4 * WIDTH * 2)
    assert sum(size.nbytes for size in sizes.values()) == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_params(MODEL))
    )
    plain = replace(MODEL, forms=())
    assert sizes_by_form(plain.param_specs, FLOAT32).keys() == {"float32"}
    count = sum(size.count for size in sizes_by_form(plain.param_specs, FLOAT32).values())
    assert count == sum(size.count for size in sizes.values())


def test_a_form_that_does_not_divide_is_refused_by_name() -> None:
    forms = (("model.layers.0.mlp.down_proj.weight", Form("int4", 96, "float16")),)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight cannot be kept as int4 g96: 256"):
        _ = replace(MODEL, forms=forms).param_specs
