"""Views of weights by head, and the arguments of ``forward``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ArgumentError
from jaxinfer.models import Model, Params, forward, normalised_stream, unembed
from jaxinfer.models.arguments import checked_batch, checked_params
from jaxinfer.models.params import by_path
from jaxinfer.models.views import LayerView, WeightViews
from jaxinfer.nn.decoder_config import AttentionConfig, FeedForwardConfig
from jaxinfer.nn.mixers.side_by_side_spec import SideBySideConfig
from kit.tiny_models import CONFIGS, NAMES, tiny_model


class Views(WeightViews):
    def __init__(self, model: Model, params: Params) -> None:
        self.model, self.params = model, params


def views_of(name: str) -> Views:
    return Views(*tiny_model(name))


LATENT = tuple(name for name in NAMES if "kv_lora_rank" in CONFIGS[name])


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_has_heads_of_outputs_only(name: str) -> None:
    m = views_of(name)
    assert m.W_O[1].shape == (4, 10, 32)
    with pytest.raises(AttributeError, match="layer 0 makes its queries, keys and values of lat"):
        _ = m.W_K[0]


# grouped-query attention
WITHOUT = ("mamba2", "falcon_mamba", "diffllama", "gemma3n", "jetmoe", "doge", "rwkv", "xlstm")
WITHOUT += ("zaya",)  # after convolutions
WITHOUT += ("deepseek_v4",)  # whose key is the value, too
WITHOUT += ("zamba", "zamba2")  # whose attention is in blocks that several layers use
WITHOUT += ("step3",)  # whose queries have a latent
WITHOUT += ("openpangu_pro", "k2_horizon")  # whose mixer is around attention


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*LATENT, *WITHOUT)])
def test_the_views_are_the_columns_that_attention_uses(name: str) -> None:
    m = views_of(name)
    layers, d = m.model.config.layers, m.model.config.hidden_size
    mixers = [
        layer.mixer.attention if isinstance(layer.mixer, SideBySideConfig) else layer.mixer
        for layer in layers
    ]
    last = max(i for i, one in enumerate(mixers) if isinstance(one, AttentionConfig))
    mixer = mixers[last]
    assert isinstance(mixer, AttentionConfig)
    n, k, h = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    x = jax.random.normal(jax.random.key(0), (3, d))
    layer = m.params[f"layers_{last}"]
    columns = x @ layer["qkv"]
    q, key, v = jnp.split(columns[:, n * h * mixer.gate :], (n * h, (n + k) * h), axis=1)
    v = key if mixer.values == "keys" else v
    of_values = mixer.value_dim
    for view, whole, heads, w in (
        (m.W_Q, q, n, h),
        (m.W_K, key, k, h),
        (m.W_V, v, k, of_values),
    ):
        assert len(view) == len(mixers) and view[last].shape == (heads, d, w)
        for head in range(heads):
            own = whole[:, head * w : (head + 1) * w]
            np.testing.assert_allclose(x @ view[last, head], own, rtol=1e-5, atol=1e-5)
    z = jax.random.normal(jax.random.key(1), (3, n, of_values))
    by_head = jnp.einsum("TNH,NHD->TD", z, m.W_O[last])
    np.testing.assert_allclose(by_head, z.reshape(3, -1) @ layer["o"], rtol=1e-4, atol=1e-5)
    if all(isinstance(one.ffn, FeedForwardConfig) for one in m.model.config.layers):
        np.testing.assert_array_equal(m.W_down[last], layer["down"])
    else:
        with pytest.raises(AttributeError, match="not all feed-forward networks are dense"):
            _ = m.W_down
    assert m.W_E.shape == m.W_U.T.shape == (m.model.config.vocab_size, d)


def test_gate_and_up_are_the_halves_of_the_fused_matrix() -> None:
    m = views_of("llama")
    both = jnp.concatenate([m.W_gate[0], m.W_up[0]], axis=1)
    np.testing.assert_array_equal(both, m.params["layers_0"]["gate_up"])
    assert views_of("gpt2").W_up[0].shape == (32, 128)
    with pytest.raises(AttributeError, match="GPT2LMHeadModel has no gates"):
        _ = views_of("gpt2").W_gate


def test_layers_are_stacked_and_counted_from_the_end() -> None:
    view = views_of("llama").W_Q
    np.testing.assert_array_equal(view[:], jnp.stack(list(view)))
    np.testing.assert_array_equal(view[:, 2], jnp.stack([view[0, 2], view[1, 2]]))
    np.testing.assert_array_equal(view[-1, -1], view[1, 3])
    np.testing.assert_array_equal(view[0, ..., 3], view[0][..., 3])


def test_a_view_is_an_array_of_all_layers() -> None:
    m = views_of("llama")
    view, whole = m.W_Q, m.W_Q[:]
    assert view.shape == whole.shape == (2, 4, 32, 8) and view.ndim == 4
    assert view.dtype == np.float32 and repr(view) == "W_Q: float32[2, 4, 32, 8], a view by layer"
    for found in (np.asarray(view), jnp.asarray(view), view + 0, view * 1, view - 0):
        np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(view.T, whole.T)
    np.testing.assert_array_equal(view.mean(axis=0), whole.mean(axis=0))
    np.testing.assert_array_equal(m.W_V[:, 0] @ m.W_O[:, 0], jnp.matmul(m.W_V[:, 0], m.W_O[:, 0]))
    np.testing.assert_array_equal(m.W_up @ m.W_down, m.W_up[:] @ m.W_down[:])
    norms = jnp.einsum("lndh,lndh->ln", view, view)
    np.testing.assert_array_equal(norms, jnp.einsum("lndh,lndh->ln", whole, whole))
    np.testing.assert_array_equal(m.W_in[1], m.W_up[1])
    np.testing.assert_array_equal(m.W_out[1], m.W_down[1])
    with pytest.raises(AttributeError, match="has no attribute 'shap'"):
        _ = view.shap
    with pytest.raises(AttributeError, match="layer 0 makes its queries, keys and values of lat"):
        _ = views_of("deepseek_v2").W_K.shape


def test_layers_that_differ_are_no_array() -> None:
    sizes = (3, 5)
    view = LayerView("W_x", 2, lambda layer: jnp.zeros((2, sizes[layer])))
    assert view[1].shape == (2, 5) and repr(view) == "W_x: 2 arrays, a view by layer"
    for use in (lambda: view.shape, lambda: view[:], lambda: jnp.asarray(view)):
        with pytest.raises(ValueError, match=r"is \[2, 3\] in one layer .* index one, as W_x\[0\]"):
            use()


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama", "gpt_oss"])
def test_biases_are_those_that_the_family_has(name: str) -> None:
    m = views_of(name)
    layer, config = m.params["layers_1"], m.model.config
    mixer = config.layers[1].mixer
    n, k, h = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim  # type: ignore[attr-defined]
    assert (m.b_Q.shape, m.b_K.shape) == ((len(config.layers), n, h), (len(config.layers), k, h))
    whole = jnp.concatenate([one[1].ravel() for one in (m.b_Q, m.b_K, m.b_V)])
    np.testing.assert_array_equal(whole, layer.get("qkv_bias", jnp.zeros(whole.size)))
    np.testing.assert_array_equal(m.b_O[1], layer.get("o_bias", jnp.zeros(config.hidden_size)))
    assert bool(whole.any()) == (name != "llama")
    if name == "gpt_oss":
        with pytest.raises(AttributeError, match="not all feed-forward networks are dense"):
            _ = m.b_in
        return
    width = config.layers[1].ffn.width  # type: ignore[attr-defined]
    np.testing.assert_array_equal(m.b_in[1], layer.get("up_bias", jnp.zeros(width)))
    down = layer.get("down_bias", jnp.zeros(config.hidden_size))
    np.testing.assert_array_equal(m.b_out[1], down)


@pytest.mark.parametrize("index", [2, -3, (0, 4), (0, 0, 32), (0, -5), "a"])
def test_an_index_out_of_range_is_an_error_and_not_clamped(index: Any) -> None:
    with pytest.raises(IndexError, match="W_Q"):
        _ = views_of("llama").W_Q[index]


def test_views_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        views_of("llama").W_Q[0, 0] = 1  # type: ignore[index]


def test_views_of_traced_parameters_have_gradients() -> None:
    model, params = tiny_model("llama")
    gradient = jax.grad(lambda p: Views(model, p).W_K[1, 1].sum())(params)
    qkv = gradient["layers_1"]["qkv"]
    assert qkv.sum() == 32 * 8 and qkv[:, 40:48].min() == 1  # 4 query heads, then the second key


WRONG_TOKENS: dict[str, tuple[Any, str]] = {
    "a batch": (np.zeros((2, 5), np.int32), r"got int32\[2, 5\]; for a batch: jax.vmap"),
    "a text": ("hello", "got a text; make ids of it"),
    "floats": (np.zeros(3, np.float32), r"must be integers, and are float32\[3\]"),
    "bools": ([True, False], r"must be integers, and are bool\[2\]"),
    "none": ([], "at least one token"),
    "a number": (3, r"got int64\[\]|got int32\[\]"),
    "a ragged list": ([[1, 2], [3]], "are no array"),
    "beyond the vocabulary": ([1, 320], "from 0 to 319"),
    "negative": ([-1], "from 0 to 319"),
    "beyond int32": ([2**40], "beyond int32"),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_wrong_tokens_get_a_sentence_of_forward(case: str) -> None:
    tokens, message = WRONG_TOKENS[case]
    with pytest.raises(ArgumentError, match=message):
        forward(*tiny_model("llama"), tokens)


def test_a_list_is_a_sequence() -> None:
    model, params = tiny_model("llama")
    expected = forward(model, params, jnp.asarray([3, 4, 5], jnp.int32))
    np.testing.assert_array_equal(forward(model, params, [3, 4, 5]), expected)  # type: ignore[arg-type]


def test_no_positions_beyond_the_table() -> None:
    with pytest.raises(ArgumentError, match="has 512 positions, and the sequence has 513"):
        forward(*tiny_model("gpt2"), [1] * 513)  # type: ignore[arg-type]


WRONG_LENGTHS: dict[str, tuple[Any, Any, str]] = {
    "of one sequence": ([1, 2], [2], "lengths belong to a batch"),
    "of lists": ([[1, 2], [3]], [2, 1], "lists of token ids have lengths of their own"),
    "too many": ([[1, 2], [3, 4]], [2, 2, 2], r"must be int32\[2\] from 1 to 2"),
    "too long": ([[1, 2], [3, 4]], [2, 3], r"must be int32\[2\] from 1 to 2"),
    "zero": ([[1, 2], [3, 4]], [2, 0], r"must be int32\[2\] from 1 to 2"),
    "three dimensions": ([[[1]]], None, r"got int\d+\[1, 1, 1\]; use jax.vmap"),
}


@pytest.mark.parametrize("case", WRONG_LENGTHS)
def test_wrong_lengths(case: str) -> None:
    tokens, lengths, message = WRONG_LENGTHS[case]
    with pytest.raises(ArgumentError, match=message):
        checked_batch(tokens, lengths, tiny_model("llama")[0].config)


def test_the_lens_of_the_last_stream_gives_the_logits() -> None:
    model, params = tiny_model("gemma3")
    ids = jnp.asarray([5, 6, 7], jnp.int32)
    logits, taps = forward(model, params, ids, taps=("layers.4.resid_post",))
    lens = unembed(model, params, normalised_stream(model, params, taps["layers.4.resid_post"]))
    np.testing.assert_allclose(lens, logits, rtol=1e-5, atol=1e-5)


def test_wrong_parameters_are_named() -> None:
    model, params = tiny_model("llama")
    layer = params["layers_1"]
    trees: dict[str, Any] = {
        "params have no embed and 6 more": {"layers_1": layer, "layers_0": {}},
        "params hold head, which": {**params, "head": layer["o"]},
        r"layers_1/o has shape \(3,\) instead of \(32, 32\)": {
            **params,
            "layers_1": {**layer, "o": np.zeros(3, np.float32)},
        },
        "layers_1/o is bfloat16 instead of float32": {
            **params,
            "layers_1": {**layer, "o": layer["o"].astype(jnp.bfloat16)},
        },
        "layers_1/o is a str; give": {**params, "layers_1": {**layer, "o": "weights"}},
        "are a list": list(params),
    }
    for message, tree in trees.items():
        with pytest.raises(ArgumentError, match=message):
            checked_params(tree, model.arrays)
    assert list(checked_params(params, model.arrays)) == list(model.arrays)
    assert set(by_path(params)) == set(model.arrays)


def test_a_later_pass_has_the_weights_of_the_first() -> None:
    m = views_of("iquest_loop")
    for view in (m.W_Q, m.W_K, m.W_V, m.W_O, m.W_gate, m.W_in, m.W_out):
        assert len(view) == 4
        np.testing.assert_array_equal(view[3], view[1])
