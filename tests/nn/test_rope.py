"""Frequencies equal those of transformers; the rotation is a rotation that depends on distance."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.hf_config import rope_config
from jaxinfer.nn.rope import RopeConfig, inverse_frequencies, rope_tables
from pallas_kernels.numerics import rotate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data" / "rope.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_scaled_frequencies_equal_transformers(name: str) -> None:
    case = GOLDEN[name]
    rope = rope_config({"rope_parameters": case["rope_parameters"]}, case["head_dim"])
    np.testing.assert_allclose(inverse_frequencies(rope), case["inverse_frequencies"], rtol=2e-6)
    assert rope.attention_scale == pytest.approx(case["attention_scale"])


@pytest.mark.parametrize("name", GOLDEN)
def test_old_and_new_spelling_agree(name: str) -> None:
    case = GOLDEN[name]
    section = dict(case["rope_parameters"])
    theta, kind = section.pop("rope_theta"), section.pop("rope_type")
    old = {"rope_theta": theta, "rope_scaling": {**section, "type": kind}}
    assert rope_config(old, 128) == rope_config({"rope_parameters": case["rope_parameters"]}, 128)


def test_scores_depend_on_distance_alone() -> None:
    rope = RopeConfig(head_dim=16, theta=10000.0)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        rotated = [
            rotate(x, *rope_tables(rope, jnp.asarray([position], jnp.int32)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.vdot(*rotated))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2
    assert score(0, 0) == pytest.approx(float(jnp.vdot(q, k)), abs=1e-6)


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    rope = RopeConfig(head_dim=64, theta=10000.0)
    tables = rope_tables(rope, jnp.asarray([7000], jnp.int32))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 64)), jnp.bfloat16)
    exact = rotate(x.astype(jnp.float32), *tables)
    rotated = rotate(x, *tables)
    assert rotated.dtype == jnp.bfloat16
    assert np.array_equal(rotated, exact.astype(jnp.bfloat16))
