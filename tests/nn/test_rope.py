"""Frequencies equal those of transformers, and scores depend only on the distance of positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_rope import even_rotary, rope_config, ropes_by_kind
from jaxinfer.models.sources import RotaryRows
from jaxinfer.nn.rope import RopeConfig, inverse_frequencies, rope_tables
from pallas_kernels.lib.numerics import rotate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "data" / "rope.json").read_text())
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}


def rope_of(case: dict[str, Any], section: dict[str, Any]) -> RopeConfig:
    """The rope of a config with this section, for an engine with the case's context length."""
    positions = case["max_position_embeddings"]
    config = {"max_position_embeddings": positions, **section}
    return rope_config(config, case["head_dim"]).for_context(case["length"] or positions)


@pytest.mark.parametrize("name", GOLDEN)
def test_scaled_frequencies_equal_transformers(name: str) -> None:
    case = GOLDEN[name]
    if name == "longrope":  # up to the original length
        case = {**case, "length": case["rope_parameters"]["original_max_position_embeddings"]}
    rope = rope_of(case, {"rope_parameters": case["rope_parameters"]})
    np.testing.assert_allclose(inverse_frequencies(rope), case["inverse_frequencies"], rtol=2e-6)
    assert rope.attention_scale == pytest.approx(case["attention_scale"])


@pytest.mark.parametrize("name", GOLDEN)
def test_old_and_new_spelling_agree(name: str) -> None:
    case = GOLDEN[name]
    section = dict(case["rope_parameters"])
    theta, kind = section.pop("rope_theta"), section.pop("rope_type")
    old = {"rope_theta": theta, "rope_scaling": {**section, "type": kind}}
    assert rope_of(case, old) == rope_of(case, {"rope_parameters": case["rope_parameters"]})


LONGROPE = {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}


@pytest.mark.parametrize(
    ("section", "default", "longest"),
    [
        ({}, 100, 100),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 250, 250),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 100, 200),
        # Qwen's documented config: max_position_embeddings may exceed the original length, or not
        ({"rope_scaling": {"type": "yarn", "factor": 4, ORIGINAL: 80}}, 320, 320),
        ({"rope_scaling": {"type": "yarn", "factor": 4, ORIGINAL: 25}}, 100, 100),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, 400, 400),
        ({"rope_scaling": {"type": "yarn", ORIGINAL: 25}}, 100, 100),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, ORIGINAL: 50}, 200, 200),
        ({"rope_scaling": {**LLAMA3, "factor": 8, ORIGINAL: 10}}, 100, 100),
        ({"rope_scaling": {**LLAMA3, "factor": 8, ORIGINAL: 50}}, 100, 400),
        ({"rope_scaling": {**LONGROPE, ORIGINAL: 25}}, 25, 100),
        ({"rope_scaling": {**LONGROPE, "factor": 8, ORIGINAL: 25}}, 25, 200),
        ({"rope_scaling": {"type": "proportional", "factor": 2}}, 200, 200),
    ],
)
def test_lengths_follow_the_scaling(section: Any, default: int, longest: int) -> None:
    rope = rope_config({"max_position_embeddings": 100, **section}, 8)
    assert rope.lengths(100) == (default, longest)


def test_equal_factors_of_llama3_blend_nothing() -> None:
    """As in Llama 4 Scout: a component whose wavelength exceeds the original length is divided."""
    section = {**LLAMA3, "high_freq_factor": 1.0, "factor": 16, ORIGINAL: 8192}
    config = {"max_position_embeddings": 100, "rope_theta": 5e5, "rope_scaling": section}
    plain = 5e5 ** -(np.arange(64) / 64)
    factors = np.where(2 * np.pi / plain > 8192, 16, 1)
    assert {*factors} == {1, 16}
    found = inverse_frequencies(rope_config(config, 128))
    np.testing.assert_allclose(found, plain / factors, rtol=2e-6)


def test_a_context_within_the_original_length_changes_no_frequency() -> None:
    dynamic = rope_config({"max_position_embeddings": 100, "rope_scaling": DYNAMIC}, 8)
    plain = RopeConfig(8, 10000.0)
    for length in (1, 99, 100):
        assert np.array_equal(
            inverse_frequencies(dynamic.for_context(length)), inverse_frequencies(plain)
        )
    assert inverse_frequencies(dynamic.for_context(101))[-1] < inverse_frequencies(plain)[-1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "ntk"}, "rope type 'ntk' is unknown"),
        ({"type": "yarn", "factor": 4, "extrapolation_factor": 0.5}, "'extrapolation_factor'"),
        ({"type": "yarn", "factor": 4, "truncate": 1}, "'truncate' must be true or false"),
        ({"type": "yarn", "factor": float("inf")}, "'factor' must be a positive number"),
        ({"type": "dynamic", "alpha": 8}, "has no key 'alpha'"),
        ({"type": "dynamic"}, "'factor' is missing"),
        ({**LLAMA3, "factor": 8, "high_freq_factor": 0.5}, "'high_freq_factor' must not be below"),
        ({**LONGROPE, "factor": 2, "long_factor": [2] * 3}, "'long_factor' must be a list of 4"),
        ({**LONGROPE, "factor": 2, "short_factor": [2, 2, 0, 2]}, "'short_factor' must be a list"),
        ({"full_attention": DYNAMIC, "sliding_attention": {}}, "differ"),
        ({"type": "default", "mrope_sections": [1, 1, 2]}, "has no key 'mrope_sections'"),
    ],
)
def test_a_section_that_is_not_supported_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_config({"max_position_embeddings": 100, "rope_scaling": section}, 8)


def test_keys_that_transformers_ignores() -> None:
    """Equal sections for several types of layers are accepted as well."""
    expected = rope_config({"max_position_embeddings": 100, "rope_scaling": DYNAMIC}, 8)
    for section in (
        {**DYNAMIC, "finetuned": True, "attention_factor": None},
        {**DYNAMIC, ORIGINAL: 50, "beta_fast": 8},
        {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC},
    ):
        assert rope_config({"max_position_embeddings": 100, "rope_scaling": section}, 8) == expected


YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 25}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500, "rope_scaling": YARN},
        {"rope_theta": 500.0, "rope_parameters": {**YARN, "rope_theta": 500}},
        {"rope_parameters": {**YARN, "rope_theta": 500}, ORIGINAL: 25},
        {"rope_theta": 500, "rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 500}},
        {"rope_scaling": {**YARN, "type": "yarn"}, "rope_parameters": {"rope_theta": 500}},
        {
            "rope_parameters": {**YARN, "rope_theta": 500, "partial_rotary_factor": 1},
            "partial_rotary_factor": 1.0,
        },
        {"rope_theta": 500, "rope_scaling": {**YARN, "max_position_embeddings": 100}},
        {"rope_theta": 500, "rope_scaling": {"full_attention": YARN, "sliding_attention": YARN}},
    ],
)
def test_a_value_may_be_in_several_places(config: Any) -> None:
    expected = rope_config(
        {"max_position_embeddings": 100, "rope_theta": 500, **{"rope_scaling": YARN}}, 8
    )
    assert rope_config({"max_position_embeddings": 100, **config}, 8) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 500, "rope_parameters": {**YARN, "rope_theta": 600}},
            r"config key 'rope_theta' is 500, and 'rope_theta' of .*_parameters'\) is 600; make",
        ),
        (
            {"rope_scaling": DYNAMIC, "rope_parameters": {"type": "linear", "factor": 2}},
            "rope key 'rope_type' is 'dynamic' in .* 'rope_scaling' and 'linear' in 'rope_param",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2}},
            "rope key 'factor' is 4.0 in config key 'rope_scaling' and 2 in 'rope_parameters'",
        ),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "'rope_type' is 'yarn' .* and 'linear'"),
        (
            {"rope_scaling": YARN, ORIGINAL: 50},
            f"config key '{ORIGINAL}' is 50, and .* is 25; make",
        ),
        ({"rope_scaling": {**YARN, "max_position_embeddings": 99}}, "'max_position_.* is 100, and"),
        (
            {"rope_scaling": {**YARN, "partial_rotary_factor": 1}, "partial_rotary_factor": 0.5},
            "'partial_rotary_factor' is 0.5, and .* is 1;",
        ),
    ],
)
def test_places_that_differ_are_both_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_config({"max_position_embeddings": 100, **config}, 8)


@pytest.mark.parametrize(
    "section",
    [
        {**LONGROPE, "factor": 4, ORIGINAL: 1},  # divides by the logarithm of 1
        {"type": "linear", "factor": 1e-44},
        {"type": "yarn", "factor": 4, "attention_factor": 3e38, "attn_factor": 3e38},
    ],
)
def test_numbers_that_give_no_angles_are_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match="numbers of the rope section, .*, give angles that are"):
        rope_config({"max_position_embeddings": 100, "rope_scaling": section}, 8)


@pytest.mark.parametrize("value", [4096.5, 0, True, 2**40, float("nan"), "25"])
def test_an_original_length_is_a_bounded_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config key '{ORIGINAL}'"):
        rope_config({"max_position_embeddings": 100, "rope_scaling": {**YARN, ORIGINAL: value}}, 8)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "factor"), [(8, 0.5), (16, 0.75), (8, 1.0)])
def test_heads_that_rotate_in_part_have_the_scores_of_the_definition(
    width: int, factor: float, interleaved: bool
) -> None:
    """Rows in the kernels' order, rotated whole, with a scale that only rotated components have."""
    rotated = int(width * factor)
    section = {
        **LONGROPE,
        "short_factor": [1.5] * (rotated // 2),
        "attention_factor": 1.25,
        "factor": 2,
    }
    section |= {"long_factor": section["short_factor"]}
    config = {"max_position_embeddings": 100, "rope_scaling": section, PARTIAL: factor}
    rope = rope_config(config, width, partial=1.0)
    rows = RotaryRows(3, width, rotated, interleaved).order(3 * width + 5)
    np.testing.assert_array_equal(np.sort(rows), np.arange(3 * width + 5))
    np.testing.assert_array_equal(rows[3 * width :], np.arange(3 * width, 3 * width + 5))
    q, k = np.random.default_rng(0).standard_normal((2, 3, width)).astype(np.float32)

    def defined(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        angles = position * inverse_frequencies(rope)
        for i, angle in enumerate(angles):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
            cos, sin = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
            out[:, a], out[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
        return out

    def ours(x: np.ndarray, position: int) -> np.ndarray:
        x = x.reshape(-1)[rows[: x.size]].reshape(x.shape)
        tables = rope_tables(rope, jnp.asarray([position], jnp.int32))
        return np.asarray(rotate(jnp.asarray(x)[None], *tables))[0]

    expected = (defined(q, 7) * defined(k, 3)).sum(-1)
    np.testing.assert_allclose((ours(q, 7) * ours(k, 3)).sum(-1), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("factor", "shown"), [(0, "0"), (1.5, "1.5"), (0.1, "0.1"), ("all", "'all'")]
)
def test_a_part_of_a_head_is_some_of_its_components(factor: Any, shown: str) -> None:
    config = {"max_position_embeddings": 100, PARTIAL: factor}
    with pytest.raises(ConfigError, match=f"'{PARTIAL}' is {shown}; it must be .* of the 8 comp"):
        rope_config(config, 8, partial=1.0)


def test_an_odd_part_of_a_head_is_rounded_up() -> None:
    """With the frequencies of the odd number, as in transformers; not in all families."""
    rope = rope_config({"max_position_embeddings": 100, PARTIAL: 0.4}, 8, partial=1.0)
    assert rope.width == 4
    np.testing.assert_allclose(inverse_frequencies(rope), [1, 10000 ** (-2 / 3)], rtol=1e-6)
    with pytest.raises(ConfigError, match=f"'{PARTIAL}' gives 3 of the 8 components of a head"):
        even_rotary(rope)
    with pytest.raises(ConfigError, match="gives 3 of the 8 components of a head, which mu"):
        config = {"max_position_embeddings": 100, "rope_scaling": YARN, PARTIAL: 0.4}
        rope_config(config, 8, partial=1.0)


def test_next_to_sections_of_types_of_layers_only_truncate_is_read() -> None:
    """As in transformers, which writes such sections next to values of all layers."""
    full = {**YARN, "beta_slow": 0.5, "truncate": False}
    config = {"max_position_embeddings": 100}

    def ropes(section: dict[str, Any]) -> tuple[RopeConfig, RopeConfig]:
        return ropes_by_kind({**config, "rope_parameters": section}, 8, theta=10000.0)

    whole = rope_config({**config, "rope_parameters": {**YARN, "beta_slow": 0.5}}, 8)
    exact = rope_config({**config, "rope_parameters": full}, 8)
    plain = RopeConfig(8, 10000.0)
    own = {"full_attention": full, "sliding_attention": {"rope_type": "default"}}
    assert ropes(own) == (whole, plain)
    assert ropes({**own, **DYNAMIC, "rope_theta": 7}) == (whole, plain)
    assert ropes({**own, "truncate": False}) == (exact, plain)
    assert ropes({"sliding_attention": full, "truncate": False}) == (plain, exact)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope(name: str) -> None:
    section = {**LONGROPE, ORIGINAL: 25}
    one, other = (
        rope_config({"max_position_embeddings": 100, "rope_scaling": {**section, "type": kind}}, 8)
        for kind in (name, "longrope")
    )
    assert one == other


def test_scores_depend_only_on_distance() -> None:
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
