"""Named points of ``forward``: every activation can be read and replaced, for every family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.exec.step.points import points_named
from jaxinfer.models import forward
from jaxinfer.models.base import Model, forward_batch, unembed
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    MixerSpec,
)
from jaxinfer.nn.ffn.beside_spec import DenseAndExpertsConfig
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig
from kit import tiny_models
from kit.mixed_family import mixed_model

T = 9
# points that steps do not have
DENSE_ONLY = {
    *("q", "k", "v", "scores", "pattern", "mlp_pre", "mlp_linear"),
    *("experts", "expert_weights"),
}
IDS = jnp.asarray(np.random.default_rng(3).integers(0, 300, T), jnp.int32)
every_family = pytest.mark.parametrize("name", tiny_models.OF_EACH_KIND)


def mixer_shapes(mixer: MixerSpec) -> dict[str, tuple[int, ...]]:
    """The points of a mixer with their shapes; a recurrent one has no keys and no pattern."""
    if isinstance(mixer, DeltaConfig):
        return {"z": (T, mixer.num_v_heads, mixer.v_dim)}
    if isinstance(mixer, SharedAttentionConfig):
        own = mixer_shapes(mixer.attention)
        return {point: own[point] for point in ("q", "z", "scores", "pattern")}
    assert isinstance(mixer, AttentionConfig | LatentAttentionConfig)
    queries, square = (T, mixer.num_heads, mixer.head_dim), (mixer.num_heads, T, T)
    keys = values = heads = queries
    if isinstance(mixer, LatentAttentionConfig):
        values = heads = (T, mixer.num_heads, mixer.value_dim)
    else:
        keys = values = (T, mixer.num_kv_heads, mixer.head_dim)
    shapes = {"q": queries, "k": keys, "v": values, "z": heads}
    return shapes | {"scores": square, "pattern": square}


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Every point of a model with its shape."""
    config = model.config
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("embed", "final_norm"), (T, config.hidden_size)
    )
    for i, layer in enumerate(config.layers):
        own = dict.fromkeys(
            ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"), (T, config.hidden_size)
        )
        own |= mixer_shapes(layer.mixer)
        ffn = layer.ffn
        if ffn.experts is not None:
            own |= dict.fromkeys(("experts", "expert_weights"), (T, ffn.experts.routing.chosen))
        if isinstance(ffn, DenseAndExpertsConfig):
            ffn = ffn.dense
        if not isinstance(ffn, ExpertsConfig):
            assert isinstance(ffn, FeedForwardConfig)
            own |= dict.fromkeys(("mlp_pre", "mlp_post"), (T, ffn.width))
            own |= {"mlp_linear": (T, ffn.width)} if ffn.gated else {}
        shapes |= {f"layers.{i}.{point}": shape for point, shape in own.items()}
    return shapes


@every_family
def test_all_points_are_read_at_once_and_change_nothing(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    shapes = shapes_of(model)
    logits, found = jax.jit(lambda ids: forward(model, params, ids, taps=tuple(shapes)))(IDS)
    assert {point: value.shape for point, value in found.items()} == shapes
    np.testing.assert_allclose(logits, forward(model, params, IDS), atol=1e-5, rtol=1e-5)
    last = unembed(model, params, found["final_norm"])
    np.testing.assert_allclose(last, logits, atol=1e-5, rtol=1e-5)
    for i, layer in enumerate(model.config.layers):
        of = {point: found[f"layers.{i}.{point}"] for point in ("resid_pre", "resid_mid")}
        middle = of["resid_pre"] + found[f"layers.{i}.attn_out"]
        np.testing.assert_allclose(middle, of["resid_mid"], atol=1e-5, rtol=1e-5)
        if layer.end is None:  # which changes the sum
            after = of["resid_mid"] + found[f"layers.{i}.mlp_out"]
            np.testing.assert_allclose(after, found[f"layers.{i}.resid_post"], atol=1e-5, rtol=1e-5)
        if isinstance(layer.mixer, DeltaConfig):
            continue
        pattern = np.asarray(found[f"layers.{i}.pattern"])
        if getattr(layer.mixer, "sinks", False):  # they have the rest
            assert (pattern.sum(-1) < 1 - 1e-5).all()
        else:
            np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)
        assert not np.triu(pattern, 1).any()


@pytest.mark.parametrize("name", [*tiny_models.OF_EACH_KIND, "mixed"])
def test_points_of_steps_are_those_of_the_dense_form_with_its_shapes(name: str) -> None:
    """Mixers and networks declare them; those from outside the library declare none. Within a
    mixture of experts steps have no point.
    """
    if name == "mixed":
        model, params = mixed_model("full", "latent", "recurrent")
    else:
        model, params = tiny_models.tiny_model(name)
    _, found = jax.eval_shape(lambda ids: forward(model, params, ids, taps="all"), IDS)
    of_steps = {point.name: point for point in points_named(["all"], model.config)}
    experts = model.config.experts.items()
    shared = {f"layers.{i}.mlp_post" for i, ffn in experts if ffn.shared is not None}
    others = {point for point in found if point.rpartition(".")[2] in DENSE_ONLY}
    assert set(found) - set(of_steps) == others | shared
    for point in of_steps.values():
        assert found[point.name].shape == (T, *point.shape), point.name
    assert ("layers.1.z" in of_steps) == (name != "mixed")


def check_no_bit_changes(name: str, choices: list[tuple[str, ...]]) -> None:
    """An edit of nothing, or a tap, at these points leaves the logits that they are."""
    model, params = tiny_models.tiny_model(name)
    plain = np.asarray(forward(model, params, IDS))
    for chosen in choices:
        edited = forward(model, params, IDS, edit=dict.fromkeys(chosen, same_value))
        np.testing.assert_array_equal(edited, plain, str(chosen[:2]))
        tapped, _ = forward(model, params, IDS, taps=chosen)
        np.testing.assert_array_equal(tapped, plain, str(chosen[:2]))
    edits = dict.fromkeys(choices[0], same_value)
    compiled = jax.jit(lambda p, ids: forward(model, p, ids, edit=edits))
    np.testing.assert_array_equal(compiled(params, IDS), plain)


@pytest.mark.parametrize(
    ("name", "point"), [("qwen3", "mlp_pre"), ("gpt2", "mlp_post"), ("deepseek_v3", "scores")]
)
def test_an_edit_of_nothing_and_a_tap_change_no_bit(name: str, point: str) -> None:
    """With ``jax.jit`` and without; the first of these points is within SwiGLU's kernel."""
    check_no_bit_changes(name, [("embed", f"layers.1.{point}", "final_norm")])


@pytest.mark.nightly
@every_family
def test_no_point_changes_a_bit(name: str) -> None:
    """All points at once, and each kind of point alone."""
    model, params = tiny_models.tiny_model(name)
    points = (*shapes_of(model),)
    alone = [(point,) for point in points if not point.startswith("layers.0.")]
    check_no_bit_changes(name, [points, *alone])
    plainly = jax.jit(lambda p, ids: forward(model, p, ids))
    np.testing.assert_array_equal(plainly(params, IDS), forward(model, params, IDS))


def test_a_batch_with_an_edit_of_nothing_changes_no_bit() -> None:
    model, params = tiny_models.tiny_model("llama")
    rows, lengths = jnp.stack([IDS, IDS[::-1]]), jnp.asarray([T, 4], jnp.int32)
    plain = forward_batch(model, params, rows, lengths)
    edited = forward_batch(model, params, rows, lengths, edit={"layers.0.z": same_value})
    np.testing.assert_array_equal(edited, plain)


def same_value(x: jax.Array) -> jax.Array:
    return x


def test_edits_see_values_that_numpy_can_read() -> None:
    """Without ``jax.jit`` an edit is a function of arrays, in the order of the pass."""
    model, params = tiny_models.tiny_model("llama")
    seen: list[str] = []

    def edit(point: str) -> Any:
        def same(x: jax.Array) -> jax.Array:
            assert np.asarray(x).any()
            seen.append(point)
            return x

        return same

    points = ("embed", "layers.0.z", "layers.1.z", "final_norm")
    forward(model, params, IDS, edit={point: edit(point) for point in reversed(points)})
    assert seen == [*points]


@every_family
def test_every_point_has_an_effect(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    points = list(shapes_of(model))

    @jax.jit
    def logits(factors: jax.Array) -> jax.Array:  # [points] -> [T, V]
        edits = {
            p: lambda x, i=i: (x.astype(jnp.float32) * factors[i]).astype(x.dtype)
            for i, p in enumerate(points)
        }
        return forward(model, params, IDS, edit=edits)

    ones = jnp.ones(len(points))
    plain = np.asarray(logits(ones))
    np.testing.assert_allclose(plain, forward(model, params, IDS), atol=1e-5, rtol=1e-5)
    for i, point in enumerate(points):
        assert not np.array_equal(logits(ones.at[i].set(-3)), plain), point


# Layers of gemma4_all also read the tokens, and the keys and values of layer 0.
@pytest.mark.parametrize("name", [n for n in tiny_models.OF_EACH_KIND if n != "gemma4_all"])
def test_a_run_patched_with_another_ones_stream_continues_like_it(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    other = IDS[::-1]
    point = "layers.1.resid_pre"
    expected, found = jax.jit(lambda ids: forward(model, params, ids, taps=(point,)))(other)
    patched = jax.jit(
        lambda ids, value: forward(model, params, ids, edit={point: lambda x: value})
    )(IDS, found[point])
    np.testing.assert_allclose(patched, expected, atol=1e-5, rtol=1e-5)


@every_family
def test_the_gradient_by_an_edit_equals_finite_differences(name: str) -> None:
    """Attribution patching: how the loss follows a change of one head's output."""
    model, params = tiny_models.tiny_model(name)
    shape = shapes_of(model)["layers.0.z"]
    direction = jax.random.normal(jax.random.key(1), shape) / np.sqrt(np.prod(shape))

    @jax.jit
    def loss(added: jax.Array) -> jax.Array:
        logits = forward(model, params, IDS, edit={"layers.0.z": lambda z: z + added})
        return jax.nn.logsumexp(logits[-1]) - logits[-1, 7]

    slope = jnp.vdot(jax.grad(loss)(jnp.zeros(shape)), direction)
    step = 1e-1
    difference = (loss(step * direction) - loss(-step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=3e-2, abs=1e-4)


def test_points_by_the_names_of_transformer_lens() -> None:
    model, params = tiny_models.tiny_model("qwen3")
    names = {
        "blocks.1.hook_resid_post": "layers.1.resid_post",
        "blocks.0.attn.hook_pattern": "layers.0.pattern",
        "blocks.0.mlp.hook_pre_linear": "layers.0.mlp_linear",
        "hook_embed": "embed",
        "ln_final.hook_normalized": "final_norm",
    }
    _, found = forward(model, params, IDS, taps=(*names, *names.values()))
    for alias, point in names.items():
        np.testing.assert_array_equal(found[alias], found[point])


def test_points_under_vmap() -> None:
    model, params = tiny_models.tiny_model("llama")
    both = jnp.stack([IDS, IDS[::-1]])

    @jax.jit
    def of_one(ids: jax.Array) -> jax.Array:
        return forward(model, params, ids, taps=("layers.1.z",))[1]["layers.1.z"]

    together = jax.vmap(of_one)(both)
    for ids, value in zip(both, together, strict=True):
        np.testing.assert_allclose(of_one(ids), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_all_points_by_one_word(name: str) -> None:
    model, params = tiny_models.tiny_model(name)
    _, found = jax.jit(lambda ids: forward(model, params, ids, taps="all"))(IDS)
    assert {point: value.shape for point, value in found.items()} == shapes_of(model)


def test_patterns() -> None:
    model, params = tiny_models.tiny_model("llama")
    names = ("layers.0.resid_post", "layers.1.resid_post")
    logits, found = forward(model, params, IDS, taps="layers.*.resid_post")
    _, named = forward(model, params, IDS, taps=names)
    assert tuple(found) == names
    for name in names:
        np.testing.assert_array_equal(found[name], named[name])
    _, theirs = forward(model, params, IDS, taps=("blocks.*.hook_resid_post", "hook_embed"))
    assert list(theirs) == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "hook_embed"]
    np.testing.assert_array_equal(theirs["blocks.1.hook_resid_post"], found[names[1]])
    np.testing.assert_array_equal(forward(model, params, IDS, taps="embed")[0], logits)
    edited = forward(model, params, IDS, edit={"layers.*.z": jnp.zeros_like})
    one_by_one = {f"layers.{i}.z": jnp.zeros_like for i in range(2)}
    np.testing.assert_array_equal(edited, forward(model, params, IDS, edit=one_by_one))
    batch = jnp.stack([IDS, IDS[::-1]]), jnp.asarray([T, 4], jnp.int32)
    _, rows = forward_batch(model, params, *batch, taps="*.pattern")
    assert list(rows) == ["layers.0.pattern", "layers.1.pattern"]
    assert not rows["layers.0.pattern"][1, :, 4:].any() and rows["layers.0.pattern"][0, :, 4:].any()
    for taps in ("layers.*.resid", ("embed", "blocks.*.hook_resid")):
        with pytest.raises(KeyError, match=r"no point that matches '.*resid'; the nearest are lay"):
            forward(model, params, IDS, taps=taps)
    with pytest.raises(KeyError, match=r"no point 'layers.1.resid'; the nearest are layers.1.resi"):
        forward(model, params, IDS, taps="layers.1.resid")


def test_wrong_points_and_edits() -> None:
    model, params = tiny_models.tiny_model("llama")
    with pytest.raises(KeyError, match=r"no point 'layers.1.resid'; the nearest are layers.1.resi"):
        forward(model, params, IDS, taps=("layers.1.resid",))
    with pytest.raises(KeyError, match=r"no point 'layers.9.z'"):
        forward(model, params, IDS, edit={"layers.9.z": lambda z: z})
    with pytest.raises(ValueError, match=r"the edit of layers.0.z must return \(9, 4, 8\), not \("):
        forward(model, params, IDS, edit={"layers.0.z": lambda z: z[:1]})
    with pytest.raises(ValueError, match=r"must return \(9, 32\), not NoneType"):
        forward(model, params, IDS, edit={"embed": lambda x: None})  # type: ignore[arg-type,return-value]
    wrong: list[tuple[Any, str]] = [
        ("blocks.1.attn.hook_q", r"no point 'blocks.1.attn.hook_q'; the nearest are .*layers.1.q"),
        (("pattern", 0), "a point is named by a text, such as 'layers.0.pattern', got 0"),
    ]
    for taps, message in wrong:
        with pytest.raises((KeyError, ValueError), match=message):
            forward(model, params, IDS, taps=taps)
