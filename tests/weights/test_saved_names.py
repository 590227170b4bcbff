"""Names and shapes of checkpoints that transformers saves otherwise than they were published."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models import build_model
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.save import ParamsCheckpoint
from kit.checkpoints import random_hf_tensors
from kit.memory_checkpoint import InMemory
from kit.tiny_models import tiny_config
from weights.test_experts import params_of

type Tensors = Mapping[str, np.ndarray]


def renamed(tensors: Tensors, old: str, new: str) -> dict[str, np.ndarray]:
    found = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert found.keys() != tensors.keys()
    return found


def in_equal_parts(tensors: Tensors) -> dict[str, np.ndarray]:
    """The convolutions of OLMo Hybrid, whose queries, keys and values have other widths."""
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    parts = np.split(np.concatenate([tensors[name] for name in names]), 3)
    assert parts[0].shape != tensors[names[0]].shape
    return {**tensors, **dict(zip(names, parts, strict=True))}


def saved_olmo_hybrid(tensors: Tensors) -> dict[str, np.ndarray]:
    named = renamed(tensors, "1.post_attention_layernorm", "1.feedforward_layer_norm")
    return in_equal_parts(named)


def saved_kimi_linear(tensors: Tensors) -> dict[str, np.ndarray]:
    return renamed(tensors, "layers.0.mlp.", "layers.0.block_sparse_moe.")


@pytest.mark.parametrize(
    ("name", "saved"),
    [("olmo_hybrid", saved_olmo_hybrid), ("kimi_linear", saved_kimi_linear)],
)
def test_both_forms_give_the_same_parameters(name: str, saved: object) -> None:
    model = build_model(tiny_config(name), "float32")
    tensors = random_hf_tensors(model)
    assert callable(saved)
    _, expected = params_of(model, InMemory(tensors))
    _, found = params_of(model, InMemory(saved(tensors)))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def test_rows_in_other_parts_have_to_be_all() -> None:
    model = build_model(tiny_config("olmo_hybrid"), "float32")
    tensors = in_equal_parts(random_hf_tensors(model))
    name = "model.layers.0.linear_attn.k_conv1d.weight"
    with pytest.raises(CheckpointError, match=r"_conv1d.weight has shape \(.*\) instead of"):
        plan_params(model, InMemory({**tensors, name: tensors[name][1:]}))


def test_tensors_without_elements_are_ignored() -> None:
    """A file without experts that all tokens use has their network with no columns."""
    config = {**tiny_config("glm4_moe"), "n_shared_experts": 0}
    model = build_model(config, "float32")
    tensors = random_hf_tensors(model)
    empty = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert empty not in tensors
    plan_params(model, InMemory({**tensors, empty: np.zeros((0, 32), np.float32)}))
    with pytest.raises(CheckpointError, match="shared_experts.up_proj.weight, which .* does not"):
        plan_params(model, InMemory({**tensors, empty: np.zeros((1, 32), np.float32)}))


def test_norms_of_heads_in_one_tensor() -> None:
    """Those of Command R+: a tensor for all queries and one for all keys, read and saved."""
    config = {**tiny_config("cohere"), "use_qk_norm": True}
    model = build_model(config, "float32")
    tensors = random_hf_tensors(model)
    model, params = params_of(model, InMemory(tensors))
    saved = ParamsCheckpoint(model, params)
    for name in ("q_norm", "k_norm"):
        name = f"model.layers.1.self_attn.{name}.weight"
        assert np.array_equal(saved.read(name), tensors[name])
        assert np.array_equal(saved.read(name, 1), tensors[name][1])
