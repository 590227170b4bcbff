"""Mixtures of experts from files: the names of published ones, stacks in every form, bad files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.compile.memory_plan import tree_bytes
from jaxinfer.models.base import Model, Params, abstract_params, forward
from jaxinfer.models.experts import experts_config, grouped_routing
from jaxinfer.models.params import nested, tensors_of
from jaxinfer.models.quantised import arranged_on_device
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import forms_of, plan_params
from jaxinfer.weights.quantised.checkpoint import QuantisedCheckpoint
from jaxinfer.weights.quantised.choose import quantised_source
from jaxinfer.weights.quantised.config import quantization_scheme
from jaxinfer.weights.quantised.on_load import QuantisedOnLoad, linear_names
from jaxinfer.weights.quantised.quantise import quantise_as
from jaxinfer.weights.quantised.values import dequantised
from kit import published_formats
from kit.checkpoints import random_hf_tensors
from kit.memory_checkpoint import Held, InMemory, Typed, source_of
from kit.tiny_models import tiny_config
from pallas_kernels.experts.stack import matrix_of
from pallas_kernels.lib.quantised import E2M1, quantised
from pallas_kernels.route.routing import Groups, Routing

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def params_of(model: Model, checkpoint: Checkpoint) -> tuple[Model, Params]:
    """The model that keeps the forms of the checkpoint, and its parameters."""
    model = replace(model, forms=forms_of(model.family, checkpoint))
    made: dict[str, np.ndarray] = {}
    for planned in plan_params(model, checkpoint):
        made |= planned.whole(checkpoint)
    return model, nested({path: jnp.asarray(array) for path, array in made.items()})


def loaded(model: Model, checkpoint: Checkpoint) -> Params:
    """The parameters on the device, as an engine loads them."""
    return load_params(
        model,
        source_of(checkpoint),
        placement=default_placement(),
        cache_dir=Path("unused"),
        seed=0,
        progress=NoProgress(),
    )


# ---- names of published files

_ATTENTION = ("input_layernorm.weight", "post_attention_layernorm.weight")
_ATTENTION += tuple(f"self_attn.{one}_proj.weight" for one in "qkvo")
_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_OF_LAYER = {  # {e} is the number of an expert
    "qwen3_moe": (
        *(*_ATTENTION, "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight"),
        *(f"mlp.experts.{{e}}.{one}_proj.weight" for one in ("gate", "up", "down")),
    ),
    "mixtral": (
        *(*_ATTENTION, "block_sparse_moe.gate.weight"),
        *(f"block_sparse_moe.experts.{{e}}.w{i}.weight" for i in (1, 2, 3)),
    ),
    "gpt_oss": (
        *(*_ATTENTION, *(f"self_attn.{one}_proj.bias" for one in "qkvo"), "self_attn.sinks"),
        *("mlp.router.weight", "mlp.router.bias"),
        *(
            f"mlp.experts.{one}_proj_{part}"
            for one in ("gate_up", "down")
            for part in ("blocks", "scales", "bias")
        ),
    ),
}
_SIZES = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
_COUNTS = {  # layers and experts as published
    "qwen3_moe": {"num_hidden_layers": 48, "num_experts": 128, "mlp_only_layers": []},
    "mixtral": {"num_hidden_layers": 32, "num_local_experts": 8},
    "gpt_oss": {"num_hidden_layers": 24, "num_local_experts": 32},
}


def published_names(family: str) -> Iterator[str]:
    """The names in the index of Qwen3-30B-A3B, Mixtral-8x7B or gpt-oss-20b."""
    counts = _COUNTS[family]
    experts = counts.get("num_experts") or counts["num_local_experts"]
    yield from _OUTSIDE
    for layer in range(counts["num_hidden_layers"]):
        for name in _OF_LAYER[family]:
            each = range(experts) if "{e}" in name else range(1)
            yield from (f"model.layers.{layer}.{name.format(e=e)}" for e in each)


@pytest.mark.parametrize(
    ("family", "count"), [("qwen3_moe", 18_867), ("mixtral", 995), ("gpt_oss", 459)]
)
def test_every_tensor_of_a_published_index_is_read_once(family: str, count: int) -> None:
    config = {**tiny_config(family), **_SIZES, **_COUNTS[family]}
    config = {key: value for key, value in config.items() if key in tiny_config(family) | _COUNTS}
    config |= {key: value for key, value in _COUNTS[family].items()}
    model = build_model(config, "float32")
    shapes = {s.name: s.shape for spec in model.param_specs for s in spec.sources}
    zeros: dict[tuple[int, ...], np.ndarray] = {}

    def tensor(name: str) -> np.ndarray:
        stem, _, part = name.rpartition("_")
        if part == "blocks":
            experts, inputs, outputs = shapes[stem]
            return np.zeros((experts, outputs, inputs // 32, 16), np.uint8)
        if part == "scales":
            experts, inputs, outputs = shapes[stem]
            return np.zeros((experts, outputs, inputs // 32), np.uint8)
        return zeros.setdefault(shapes[name], np.zeros(shapes[name], np.float32))

    names = [*published_names(family)]
    stored = Typed({name: tensor(name) for name in names})
    checkpoint: Checkpoint = stored
    if family == "gpt_oss":
        scheme = quantization_scheme({"quantization_config": MXFP4})
        assert scheme is not None
        checkpoint = QuantisedCheckpoint(stored, scheme)
    params_of(model, checkpoint)
    assert set(stored.reads.values()) == {1}
    assert {name.partition("[")[0] for name in stored.reads} == set(names)
    assert len(names) == count
    parts = Counter(name.partition("[")[0] for name in stored.reads)
    assert {parts[name] for name in names if ".experts." in name} == {
        32 if family == "gpt_oss" else 1
    }


# ---- forms


def _dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4's definition: the low half of a byte first, times 2 to the scale minus 127."""
    table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    values = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1)  # [E, O, G, 16, 2]
    values = values.reshape(*blocks.shape[:-1], 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


@pytest.fixture(scope="module")
def gpt_oss() -> tuple[Model, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A small gpt-oss, its tensors in MXFP4 as published, and the same in floats."""
    rng = np.random.default_rng(5)
    model = build_model({**tiny_config("gpt_oss"), "intermediate_size": 64}, "float32")
    floats = random_hf_tensors(model)
    stored = dict(floats)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:-1], np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = _dequantised(blocks, scales).swapaxes(1, 2)
    return model, stored, floats


def opened(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> QuantisedCheckpoint:
    scheme = quantization_scheme({"quantization_config": config})
    assert scheme is not None
    return QuantisedCheckpoint(Typed(tensors), scheme)


def test_mxfp4_stacks_are_the_floats_that_they_stand_for(gpt_oss: Any) -> None:
    model, stored, floats = gpt_oss
    kept, quantised = params_of(model, opened(stored, MXFP4))
    plain, dense = params_of(model, InMemory(floats))
    assert set(quantised["layers_0"]["gate_up"]) == {"fp4", "scales"}
    assert dense["layers_0"]["gate_up"].shape == (7, 128, 32)
    ids = jnp.arange(6)
    expected = forward(plain, dense, ids)
    np.testing.assert_allclose(forward(kept, quantised, ids), expected, atol=1e-5, rtol=1e-5)
    for spec in plain.param_specs:  # and back again
        if spec.matrix == "experts_in_out":
            array = np.asarray(dense["layers_0"][spec.path.rpartition("/")[2]])
            if spec.path.startswith("layers_0/"):
                parts = np.stack(tensors_of(spec, array))
                np.testing.assert_array_equal(parts, floats[spec.sources[0].name])


def test_a_stacked_tensor_is_read_expert_by_expert(
    gpt_oss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxinfer.weights.load.LOAD_THREADS", 1)
    model, _, floats = gpt_oss
    held = Held()

    class OfExperts(InMemory):
        def read(self, name: str, part: int | None = None) -> np.ndarray:
            return floats[name] if part is None else super().read(name, part)

    params = loaded(model, OfExperts(floats, held))
    stack = params["layers_0"]["gate_up"]
    gates_and_ups = floats["model.layers.0.mlp.experts.gate_up_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(stack[:, :64], gates_and_ups[:, ::2])
    np.testing.assert_array_equal(stack[:, 64:], gates_and_ups[:, 1::2])
    assert held.peak == stack.nbytes // 7  # of one expert: that before it is freed


@pytest.mark.parametrize("name", ["Qwen3-quantized.w4a16", "Qwen3-FP8"])
def test_experts_keep_a_published_form(name: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    model = build_model({**tiny_config("qwen3_moe"), **sizes, "head_dim": 32}, "float32")
    config, tensors, _ = published_formats.published(name, of=model)
    checkpoint = opened(tensors, config)
    kept, quantised = params_of(model, checkpoint)
    dense = InMemory({one: checkpoint.read(one) for one in checkpoint.tensors})
    plain, floats = params_of(model, dense)
    kind = "int4" if "w4a16" in name else "fp8"
    assert quantised["layers_1"]["gate_up"][kind].shape[:2] == (7, 256)
    assert quantised["layers_1"]["router"].dtype == jnp.float32
    ids = jnp.arange(6)
    expected = forward(plain, floats, ids)
    np.testing.assert_allclose(forward(kept, quantised, ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("built", [True, False], ids=["native library", "without it"])
def test_of_fp8_matrices_only_experts_are_in_tiles(
    built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged: list[int] = []

    def recorded(tree: Any) -> Any:
        arranged.append(tree_bytes(tree))
        return arranged_on_device(tree)

    monkeypatch.setattr("jaxinfer.models.quantised.arranged_on_device", recorded)
    if not built:
        monkeypatch.setattr("pallas_kernels.native.library.library", lambda: None)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128}
    model = build_model({**tiny_config("qwen3_moe"), **sizes, "head_dim": 32}, "float32")
    config, tensors, _ = published_formats.published("Qwen3-FP8", of=model)
    checkpoint = opened(tensors, config)
    _, by_rows = params_of(model, checkpoint)
    kept, tiles = params_of(replace(model, arrangement="tiles"), checkpoint)
    tiles = loaded(kept, checkpoint) if not built else tiles
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), tiles)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(kept))
    assert "fp8" in tiles["layers_1"]["o"]
    if not built:  # a stack expert by expert: never a second copy of it
        of_expert = tree_bytes(tiles["layers_1"]["gate_up"]) // 7
        assert arranged.count(of_expert) >= 7 and max(arranged) < 2 * of_expert
    blocks = {"gate_up": (7, 2, 2), "down": (7, 256, 1)}  # of 128 x 128, and of rows
    for name, scales in blocks.items():
        stored, arranged = by_rows["layers_1"][name], tiles["layers_1"][name]
        assert arranged["scales"].shape == scales
        for expert in range(7):
            expected = matrix_of(quantised(stored), jnp.int32(expert))
            found = matrix_of(quantised(arranged), jnp.int32(expert))
            np.testing.assert_array_equal(found, expected)


def test_experts_are_quantised_on_loading_and_routers_are_not() -> None:
    model = build_model({**tiny_config("qwen3_moe"), "moe_intermediate_size": 64}, "float32")
    checkpoint = InMemory(random_hf_tensors(model))
    quantised = QuantisedOnLoad(checkpoint, "int4", linear_names(model, checkpoint))
    kept, params = params_of(model, quantised)
    assert "int4" in params["layers_1"]["gate_up"] and "int4" in params["layers_1"]["down"]
    assert params["layers_1"]["router"].shape == (7, 32)
    assert not any(".gate.weight" in name for name, _ in kept.forms)


# ---- bad files and configs


def changed(change: str) -> dict[str, np.ndarray]:
    tensors = random_hf_tensors(build_model(tiny_config("qwen3_moe"), "float32"))
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "misshaped":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name.replace(".5.", ".7.")] = tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "has no tensor model.layers.1.mlp.experts.5.up_proj.weight"),
        ("misshaped", "tensor model.layers.1.mlp.experts.5.up_proj.weight has shape (23, 32) inst"),
        ("surplus", "holds tensor model.layers.1.mlp.experts.7.up_proj.weight, which Qwen3Moe"),
    ],
)
def test_a_wrong_tensor_is_named_with_layer_and_expert(change: str, message: str) -> None:
    model = build_model(tiny_config("qwen3_moe"), "float32")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        plan_params(model, InMemory(changed(change)))


def test_a_stack_with_too_few_experts_is_refused(gpt_oss: Any) -> None:
    model, stored, floats = gpt_oss
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(6, 64, 32\) instead of \(7"):
        plan_params(model, InMemory(floats | {name: floats[name][:6]}))
    few = {f"{name}_{part}": stored[f"{name}_{part}"][:6] for part in ("blocks", "scales")}
    checkpoint = opened(stored | few, MXFP4)
    kept = replace(model, forms=forms_of(model.family, checkpoint))
    with pytest.raises(CheckpointError, match=r"down_proj has shape \(6, 64, 32\) instead of \(7"):
        plan_params(kept, checkpoint)
    with pytest.raises(CheckpointError, match=rf"no tensor {name}_scales, which the quantised"):
        opened({n: t for n, t in stored.items() if n != f"{name}_scales"}, MXFP4)


# 128: blocks of fp8
_WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 32}


@pytest.mark.parametrize("expert", [0, 5])
@pytest.mark.parametrize("name", [*published_formats.PUBLISHED, "on load"])
def test_a_missing_expert_of_a_quantised_file_is_named(name: str, expert: int) -> None:
    """It has no form, like a tensor of floats; but it is absent."""
    model = build_model({**tiny_config("qwen3_moe"), **_WIDE}, "float32")
    gone = f"model.layers.1.mlp.experts.{expert}.up_proj"
    checkpoint: Checkpoint
    if name == "on load":
        floats = random_hf_tensors(model)
        del floats[f"{gone}.weight"]
        stored = InMemory(floats)
        checkpoint = QuantisedOnLoad(stored, "int4", linear_names(model, stored))
    else:
        config, tensors, _ = published_formats.published(name, of=model)
        left = {one: t for one, t in tensors.items() if not one.startswith(gone)}
        checkpoint = opened(left, config)
    kept = replace(model, forms=forms_of(model.family, checkpoint))
    assert kept.forms
    with pytest.raises(CheckpointError, match=f"has no tensor {gone}.weight, which Qwen3Moe"):
        plan_params(kept, checkpoint)


def test_a_missing_stack_is_named_once(gpt_oss: Any) -> None:
    model, stored, _ = gpt_oss
    name = "model.layers.1.mlp.experts.down_proj"
    left = {one: t for one, t in stored.items() if one not in (f"{name}_blocks", f"{name}_scales")}
    checkpoint = opened(left, MXFP4)
    kept = replace(model, forms=forms_of(model.family, checkpoint))
    with pytest.raises(CheckpointError, match=f"has no tensor {name}, which GptOss"):
        plan_params(kept, checkpoint)


def test_experts_of_a_layer_are_quantised_alike() -> None:
    model = build_model({**tiny_config("qwen3_moe"), "moe_intermediate_size": 64}, "float32")
    checkpoint = InMemory(random_hf_tensors(model))
    names = [name for name in linear_names(model, checkpoint) if ".experts.3." not in name]
    with pytest.raises(CheckpointError, match=r"experts.0.gate_proj.weight is int4 .*3.gate_proj"):
        params_of(model, QuantisedOnLoad(checkpoint, "int4", names))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 6},
            "is 6, and a token can choose among the 5 of 'num_local_experts'; correct these num",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "'num_experts_per_tok' must be a positive"),
        ("qwen3_moe", {"num_experts": None}, "'num_experts' is missing"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "'mlp_only_layers' must be a list of layers below"),
        (
            "mixtral",
            {"hidden_act": "softplus"},
            "'hidden_act' is 'softplus'; known activations are",
        ),
        ("gpt_oss", {"experts_per_token": 4}, "'experts_per_token' is 4 and 'num_experts_per_tok'"),
        ("gpt_oss", {"swiglu_limit": -1}, "'swiglu_limit' must be a positive number"),
        ("mixtral", {"scoring_func": "tanh"}, "'scoring_func' is 'tanh', which MixtralForCausalLM"),
        ("mixtral", {"topk_method": "noaux_tc"}, "'topk_method' is 'noaux_tc', which Mixtral"),
    ],
)
def test_a_wrong_config_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model({**tiny_config(family), **change}, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "tanh"}, "'scoring_func' is 'tanh'; known scoring functions are softmax"),
        (
            {"topk_method": "best"},
            "'topk_method' is 'best'; known methods are greedy, group_limited",
        ),
        (
            {"n_group": 3},
            "'n_group' is 3, and 32 experts cannot be divided into so many equal "
            "groups of two or more; correct these numbers in config.json",
        ),
        (
            {"topk_group": 9},
            "'topk_group' is 9, and there are 8 groups ('n_group'); correct these numb",
        ),
        (
            {"topk_group": 1},
            "is 6, and a token can choose among 4 experts: 'topk_group' 1 of "
            "the 32 of 'n_routed_experts' in groups; correct these numbers",
        ),
    ],
)
def test_a_wrong_choice_by_groups_is_refused(change: dict[str, Any], message: str) -> None:
    keys = {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 4, "n_routed_experts": 32}
    keys |= {"topk_method": "noaux_tc", "moe_intermediate_size": 8, **change}
    with pytest.raises(ConfigError, match=re.escape(message)):
        experts_config(
            keys,
            count="n_routed_experts",
            width="moe_intermediate_size",
            routing=grouped_routing(keys, "sigmoid"),
        )


def test_the_choice_by_groups_of_published_configs() -> None:
    """DeepSeek-V2-Lite, DeepSeek-V3 and Kimi-K2."""
    groups = {"n_group": 8, "topk_group": 4}
    assert grouped_routing(
        {"num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        "softmax",
    ) == Routing(6)
    v3 = {"num_experts_per_tok": 8, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
    v3 |= {"topk_method": "noaux_tc", "norm_topk_prob": True}
    expected = Routing(8, "sigmoid", True, 2.5)
    assert grouped_routing(v3 | {"n_group": 1, "topk_group": 1}, "softmax") == expected
    assert grouped_routing(v3 | groups, "softmax") == expected._replace(
        groups=Groups(8, 4, "best_two")
    )


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_stacks_of_floats_are_quantised_while_they_load(scheme: str) -> None:
    """Granite's experts, each as a matrix of its own would be; also with random weights."""
    config = {**tiny_config("granite_moe"), "hidden_size": 64, "intermediate_size": 32}
    tensors = random_hf_tensors(model := build_model(config, "float32"))
    source = source_of(InMemory(tensors))
    (made, forms), (_, random) = (
        quantised_source(one, model, scheme) for one in (source, replace(source, checkpoint=None))
    )
    stack = "model.layers.{}.block_sparse_moe.{}_linear.weight"
    stacks = {stack.format(i, n) for i in (0, 1) for n in ("input", "output")}
    assert (
        made.checkpoint is not None and stacks <= dict(forms).keys() and set(random) >= set(forms)
    )
    kept, params = params_of(model, made.checkpoint)
    for name, form in forms:
        matrices = tensors[name].reshape(-1, *tensors[name].shape[-2:])
        rounded = [dequantised(quantise_as(matrix, form)) for matrix in matrices]
        tensors[name] = np.stack(rounded).reshape(tensors[name].shape)
    _, expected = params_of(model, InMemory(tensors))
    ids = jnp.arange(9)
    logits = forward(kept, params, ids)
    np.testing.assert_allclose(logits, forward(model, expected, ids), atol=1e-3, rtol=1e-3)
