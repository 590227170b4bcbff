"""``jaxinfer.load`` and ``llm.model``: the weights and functions that serve, for research."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LLM, LanguageModel
from jaxinfer.core.errors import ArgumentError, EngineError, JaxinferError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import RequestSpec
from jaxinfer.models import forward
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from jaxinfer.weights.quantised.convert import convert_folder
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.served_weights import (
    GREEDY,
    PROMPT,
    check_served,
    greedy,
    with_larger_down,
)
from kit.tokenizers import TINY_VOCAB_SIZE


@pytest.fixture(scope="module")
def m(folder: Path, settings: dict[str, Any]) -> LanguageModel:
    return jaxinfer.load(str(folder), **settings)


@pytest.fixture
def llm(folder: Path, settings: dict[str, Any]) -> LLM:
    return LLM(str(folder), **settings)


def differ(one: LanguageModel, other: LanguageModel) -> bool:
    """True if the logprobs of the two differ by more than the tests allow for serving."""
    return float(np.abs(np.subtract(greedy(one)[1], greedy(other)[1])).max()) > 1e-2


def test_a_loaded_model_still_unpacks(m: LanguageModel) -> None:
    model, params, tokenizer = m
    assert model is m.model and params is m.params and tokenizer is m.tokenizer
    assert m.config is model.config and model.hf_config["hidden_size"] == 64
    assert m.generation_config == {"temperature": 0.6}
    ids = jnp.asarray(PROMPT, jnp.int32)
    np.testing.assert_array_equal(m.forward(PROMPT), forward(model, params, ids))
    assert "Array" not in repr(m)


def test_a_batch_is_its_sequences_with_zeros_behind_them(m: LanguageModel) -> None:
    rows = [PROMPT, PROMPT[5:9], PROMPT[2:20]]
    logits, taps = m.forward(rows, taps=("layers.1.resid_post",))
    assert logits.shape == (3, len(PROMPT), TINY_VOCAB_SIZE)
    padded = np.zeros((3, len(PROMPT)), np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
        alone, tap = m.forward(row, taps=("layers.1.resid_post",))
        np.testing.assert_allclose(logits[number, : len(row)], alone, atol=1e-5)
        own = taps["layers.1.resid_post"][number]
        np.testing.assert_allclose(own[: len(row)], tap["layers.1.resid_post"], atol=1e-5)
        assert not logits[number, len(row) :].any() and not own[len(row) :].any()
    without_taps = m.forward(padded, lengths=[37, 4, 18])  # compiled in another way
    np.testing.assert_allclose(without_taps, logits, atol=1e-5)
    whole = m.forward(padded)
    assert whole[1, -1].any()


def test_points_of_a_batch(m: LanguageModel) -> None:
    """Edits see one sequence each, and attention patterns are masked by their queries."""
    rows, point = [PROMPT[:6], PROMPT[5:9]], "blocks.1.attn.hook_pattern"
    edit = {"layers.0.z": lambda z: z.at[-1].set(0)}
    _, found = m.forward(rows, taps=(point,), edit=edit)
    assert found[point].shape[2:] == (6, 6) and not found[point][1, :, 4:].any()
    _, alone = m.forward(rows[1], taps=(point,))  # the edited token of its row is padding
    np.testing.assert_allclose(found[point][1, :, :4, :4], alone[point], atol=1e-5)
    _, other = m.forward(rows[0], taps=(point,))
    assert np.abs(np.asarray(found[point][0] - other[point])).max() > 1e-6


def test_parameters_are_an_argument_for_gradients_and_jit(m: LanguageModel) -> None:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(m.forward(tokens, params=params))[-1, 5]

    tokens = jnp.asarray(PROMPT, jnp.int32)
    value, gradient = jax.jit(jax.value_and_grad(loss))(m.params, tokens)
    assert by_path(gradient).keys() == by_path(m.params).keys()
    step = jax.tree.map(lambda p, g: p - 0.01 * g, m.params, gradient)
    assert loss(step, tokens) < value
    batch = jax.jit(lambda p, t, n: m.forward(t, lengths=n, params=p))
    found = batch(m.params, tokens[None], jnp.asarray([9], jnp.int32))
    np.testing.assert_allclose(found[0, :9], m.forward(PROMPT)[:9], atol=1e-5)


def test_logits_of_hidden_states(m: LanguageModel) -> None:
    logits, taps = m.forward(PROMPT, taps=("final_norm", "layers.1.resid_post"))
    np.testing.assert_array_equal(m.logits(taps["final_norm"]), logits)
    lens = m.logits(taps["layers.1.resid_post"], final_norm=True)
    np.testing.assert_allclose(lens, logits, atol=1e-5)
    with pytest.raises(ArgumentError, match=r"hidden states \[..., 64\], and got an array \[3\]"):
        m.logits(jnp.zeros(3))


def test_parameters_of_another_model_are_refused(m: LanguageModel) -> None:
    with pytest.raises(ArgumentError, match="params have no final_norm"):
        m.forward(PROMPT, params={"embed": m.params["embed"]})
    with pytest.raises(ArgumentError, match="params have no embed"):
        m.with_params({})


def test_a_loaded_model_generates_also_with_changed_weights(
    folder: Path, settings: dict[str, Any]
) -> None:
    m = jaxinfer.load(str(folder), **settings)
    assert isinstance(m.generate(PROMPT, GREEDY)[0].outputs[0].text, str)
    changed = m.with_params(with_larger_down(m.params))
    assert differ(changed, m)
    for model in (m, changed, changed, m):
        engine = model.generate(PROMPT, GREEDY)
        check_served(engine, model, cached=engine[0].num_cached_tokens or 0)


def test_the_model_of_an_engine_has_its_very_weights(llm: LLM) -> None:
    m = llm.model
    held = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(m.params)}
    own = llm._engine._loop._executor._arrays.weights  # type: ignore[attr-defined]
    assert {array.unsafe_buffer_pointer() for array in own} == held
    check_served(m.generate(PROMPT, GREEDY, use_tqdm=False), m)
    assert m.tokenizer is llm.get_tokenizer()
    assert m.W_Q[0, 1].shape == (64, 16)


def test_the_model_of_an_engine_does_not_change_what_it_serves(llm: LLM) -> None:
    m = llm.model
    changed = m.with_params(with_larger_down(m.params))
    with pytest.raises(EngineError, match=r"call llm.update_weights\(m.params\)"):
        changed.generate(PROMPT, GREEDY)
    llm.update_weights(changed.params)
    with pytest.raises(EngineError, match=r"call llm.update_weights\(m.params\)"):
        m.generate(PROMPT, GREEDY)
    check_served(llm.model.generate(PROMPT, GREEDY), changed)


# new weights in a running engine


def test_changed_weights_answer_as_forward_says_without_stale_pages(llm: LLM) -> None:
    m = llm.model
    check_served(llm.generate([PROMPT], GREEDY), m)
    check_served(llm.generate([PROMPT], GREEDY), m, cached=32)  # the prefix is reused
    changed = m.with_params(with_larger_down(m.params))
    assert differ(changed, m)
    llm.update_weights(changed.params)
    assert llm.stats().num_cached_pages == 0
    check_served(llm.generate([PROMPT], GREEDY), changed)
    check_served(llm.generate([PROMPT], GREEDY), changed, cached=32)
    assert llm.stats().num_late_compiles == 0


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    for _ in range(2):
        llm.generate([PROMPT], GREEDY)
    before = llm.stats()
    assert before.num_cached_tokens == 32 and before.num_cached_pages > 0
    assert llm.reset_prefix_cache() is True
    after = llm.stats()
    assert after.num_cached_pages == 0
    assert after.num_fresh_pages == before.num_fresh_pages + before.num_cached_pages
    check_served(llm.generate([PROMPT], GREEDY), llm.model)


def test_numpy_weights_are_copied(llm: LLM) -> None:
    params = jax.tree.map(np.array, llm.model.params)
    llm.update_weights(params)
    before = greedy(llm.model)
    for array in jax.tree.leaves(params):
        array[...] = 0
    assert greedy(llm.model) == before


def test_weights_of_a_folder(llm: LLM, folder: Path, tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    other = random_hf_tensors(build_model(config, "float32"), seed=5)
    write_hf_folder(tmp_path / "other", config, other)
    first = llm.model
    llm.update_weights(tmp_path / "other")
    expected = np.concatenate(
        [other[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    )
    np.testing.assert_array_equal(llm.model.params["layers_1"]["gate_up"], expected.T)
    check_served(llm.generate([PROMPT], GREEDY), llm.model)
    llm.update_weights(str(folder))
    check_served(llm.generate([PROMPT], GREEDY), first)


def test_wrong_weights_leave_the_old_ones(llm: LLM, tmp_path: Path) -> None:
    before = llm.model.params
    layer = before["layers_1"]
    down = layer["down"]

    def changed(name: str, value: Any) -> dict[str, Any]:
        return {**before, "layers_1": {**layer, name: value}}

    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    tensors = random_hf_tensors(build_model(config, "float32"))
    wider = config | {"intermediate_size": 256}
    write_hf_folder(tmp_path / "wider", wider, random_hf_tensors(build_model(wider, "float32")))
    lacking = {name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}
    write_hf_folder(tmp_path / "lacking", config, lacking)
    write_hf_folder(tmp_path / "int8", config, tensors)
    convert_folder(str(tmp_path / "int8"), tmp_path / "quantised", "int8", progress=NO_PROGRESS)
    nan = tensors | {"model.norm.weight": np.full(64, np.nan, np.float32)}
    write_hf_folder(tmp_path / "nan", config, nan)
    write_hf_folder(tmp_path / "huge", config | {"num_hidden_layers": 10**9}, tensors)
    outside = write_hf_folder(tmp_path / "outside", config, tensors, shards=2)
    (outside / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../nan/x"}}')
    nested = write_hf_folder(tmp_path / "nested", config, tensors)
    (nested / "config.json").write_text("[" * 100_000)
    deleted = jnp.copy(down)
    deleted.delete()
    wrong: list[tuple[Any, str]] = [
        (changed("down", down.T), r"layers_1/down has shape \(64, 128\) instead of \(128, 64\)"),
        (changed("down", down.astype(jnp.bfloat16)), "layers_1/down is bfloat16 instead of float"),
        (changed("down", down.at[3, 4].set(jnp.nan)), "layers_1/down holds NaN or infinity"),
        (changed("down", down.at[3, 4].set(-jnp.inf)), "layers_1/down holds NaN or infinity"),
        (changed("down", deleted), "layers_1/down has been deleted"),
        (changed("extra", down), "params hold layers_1/extra"),
        ({"embed": before["embed"]}, "params have no final_norm and"),
        (None, "are a NoneType"),
        (tmp_path / "none", "is neither a known name"),
        (tmp_path / "wider", "differs from the engine's model in layers"),
        (tmp_path / "quantised", "keep different matrices quantised"),
        (tmp_path / "lacking", "has no tensor model.layers.1.mlp.up_proj.weight"),
        (tmp_path / "nan", "final_norm holds NaN"),
        (tmp_path / "huge", "'num_hidden_layers' is 1000000000, and at most 10000 is supported"),
        (outside, "names '../nan/x', which is outside its folder"),
        (nested, r"config\.json is not JSON \(its values are nested too deep\)"),
    ]
    llm.generate([PROMPT], GREEDY)
    for weights, message in wrong:
        with pytest.raises(JaxinferError, match=message):
            llm.update_weights(weights)
        assert llm.model.params is before
    with pytest.raises(ArgumentError, match="is traced"):
        jax.jit(lambda p: llm.update_weights(p))(before)
    check_served(llm.generate([PROMPT], GREEDY), llm.model, cached=32)


def test_an_open_stream_is_not_given_other_weights(llm: LLM) -> None:

    stream = llm.stream([RequestSpec(PROMPT, GREEDY)])
    next(stream)
    before = llm.model.params
    for change in (lambda: llm.update_weights(before), llm.reset_prefix_cache, llm.sleep):
        with pytest.raises(EngineError, match="requests are open; finish or close the stream"):
            change()
    stream.close()
    llm.update_weights(with_larger_down(before))
    check_served(llm.generate([PROMPT], GREEDY), llm.model)
