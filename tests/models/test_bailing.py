"""Ling and Ring, which are not in transformers, next to a reference in NumPy (``kit.bailing``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import Model, build_model, forward
from jaxinfer.models.params import nested
from kit import bailing
from kit.checkpoints import built_arrays
from kit.tiny_models import tiny_config

LENGTH = 70  # over a border of lightning attention's chunks
CASES: dict[str, dict[str, Any]] = {
    "bailing": {},
    "bailing normalised": {"norm_topk_prob": True, "use_qkv_bias": False},
    "bailing_v2": {},
    "bailing_v2 rotary_dim": {"rotary_dim": 4},
    "bailing_linear": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "bailing_linear silu": {"linear_silu": True, "rope_theta": 600000.0},
    "bailing_v2_5": {},
}


def random_tensors(model: Model) -> dict[str, np.ndarray]:
    """Values so large that every part shows in the logits."""
    rng, made = np.random.default_rng(0), {}
    for source in (source for spec in model.param_specs for source in spec.sources):
        noise = rng.standard_normal(source.shape, np.float32)
        if len(source.shape) == 2:
            noise *= 1.5 / source.shape[1] ** 0.5
        else:
            noise = 1 + 0.2 * noise if "norm" in source.name else 0.5 * noise
        made[source.name] = noise
    return made


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference(case: str) -> None:
    config = tiny_config(case.split()[0]) | CASES[case]
    config.pop("rope_scaling", None)
    model = build_model(config, "float32")
    tensors = random_tensors(model)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], LENGTH)
    if "rotary_dim" in config:
        config["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    expected = bailing.logits(config, tensors, ids)
    params = nested(built_arrays(model, tensors))
    found = jax.jit(lambda ids: forward(model, params, ids))(jnp.asarray(ids))
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bailing", "norm_head", True),
        ("bailing", "use_bias", True),
        ("bailing", "partial_rotary_factor", 0.5),
        ("bailing_v2", "score_function", "softmax"),
        ("bailing_v2", "norm_topk_prob", False),
        ("bailing_linear", "num_kv_heads_for_linear_attn", 2),
        ("bailing_linear", "group_norm_size", 3),
        ("bailing_v2_5", "use_qkv_bias", True),
    ],
)
def test_what_no_published_file_has_is_refused(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'"):
        build_model({**tiny_config(name), key: value}, "float32")
