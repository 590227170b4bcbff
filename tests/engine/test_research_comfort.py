"""Texts, losses, views and edited generation of a loaded model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LLM, LanguageModel, SamplingParams
from jaxinfer.core.errors import (
    ArgumentError,
    ConfigError,
    EngineError,
    RequestError,
    TokenizerError,
)
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.api import own_engine
from jaxinfer.engine.api.own_engine import _places
from jaxinfer.engine.requests.facts import facts_of_configs
from kit.served_weights import GREEDY, PROMPT, check_served, with_larger_down

POINT = "layers.0.resid_post"


@pytest.fixture(scope="module")
def m(folder: Path, settings: dict[str, Any]) -> LanguageModel:
    return jaxinfer.load(str(folder), **settings)


def test_a_short_repr(m: LanguageModel, folder: Path) -> None:
    lines = repr(m).splitlines()
    assert lines[0] == f"LanguageModel of {folder}" and len(lines) == 3
    assert lines[1] == (
        "  LlamaForCausalLM: 2 layers of width 64, 4 query heads and 2 kv heads of 16, "
        "feed-forward 128, vocabulary 261"
    )
    count = sum(array.size for array in jax.tree.leaves(m.params))
    assert lines[2] == f"  {count:,} parameters: {count:,} float32; activations float32"
    assert repr(m.model) == "Model(LlamaForCausalLM, 2 layers, float32)"
    assert repr(m.W_Q) == "W_Q: float32[2, 4, 64, 16], a view by layer"


def test_names_of_other_libraries_get_the_equivalent(m: LanguageModel) -> None:
    for name, here in (("run_with_cache", r"m\.forward\(tokens, taps="), ("cfg", r"m\.config")):
        with pytest.raises(
            AttributeError, match=f"LanguageModel has no '{name}'; here it is .*{here}"
        ):
            getattr(m, name)
    assert not hasattr(m, "nothing") and dataclasses.replace(m).reference == m.reference
    with pytest.raises(ArgumentError, match="generate has no argument 'max_new_tokens'; sampling"):
        m.generate(PROMPT, max_new_tokens=4)


def test_a_text_is_encoded_as_the_tokenizer_does(m: LanguageModel) -> None:
    texts = ["Hello there, you", "Yes"]
    ids = [m.tokenizer.encode(text) for text in texts]
    np.testing.assert_array_equal(m.forward(texts[1]), m.forward(ids[1]))
    assert m._encoded(texts) == ids  # of a batch
    assert m.loss(texts[1]) == m.loss(ids[1])


def test_the_loss_is_the_mean_negative_logprob_of_next_tokens(m: LanguageModel) -> None:
    rows = [PROMPT[:9], PROMPT[20:24]]
    expected = []
    for row, logits in zip(rows, m.forward(rows), strict=True):
        logprobs = jax.nn.log_softmax(logits)
        expected.append([-float(logprobs[i, row[i + 1]]) for i in range(len(row) - 1)])
    np.testing.assert_allclose(m.loss(rows[1], per_token=True), expected[1], rtol=1e-5)
    assert float(m.loss(rows[1])) == pytest.approx(np.mean(expected[1]), rel=1e-5)
    found = m.loss(rows, per_token=True)
    assert found.shape == (2, 8) and not found[1, 3:].any()
    np.testing.assert_allclose(found[1, :3], expected[1], rtol=1e-5)
    mean = np.mean([*expected[0], *expected[1]])
    assert float(m.loss(rows)) == pytest.approx(mean, rel=1e-5)
    padded = np.zeros((2, 9), np.int32)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    compiled = jax.jit(jax.value_and_grad(lambda p, t, n: m.loss(t, lengths=n, params=p)))
    given = (padded, np.array([9, 4]))
    value, gradient = compiled(m.params, *given)
    assert float(value) == pytest.approx(mean, rel=1e-5)
    step = jax.tree.map(lambda p, g: p - 0.01 * g, m.params, gradient)
    assert compiled(step, *given)[0] < value
    with pytest.raises(ArgumentError, match="loss takes at least two tokens"):
        m.loss([3])


def test_a_folder_without_a_tokenizer(
    folder: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    for file in folder.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    m = jaxinfer.load(str(tmp_path), **settings)
    with pytest.raises(EngineError, match=r"has no tokenizer: .* holds no tokenizer.json; add it"):
        _ = m.tokenizer
    with pytest.raises(EngineError, match="has no tokenizer"):
        m.forward("a text")
    model, params, tokenizer = m
    assert model is m.model and params is m.params and tokenizer is None
    m.save(tmp_path / "saved", progress=NO_PROGRESS)
    np.testing.assert_array_equal(
        jaxinfer.load(str(tmp_path / "saved")).forward([3, 4]), m.forward([3, 4])
    )
    with pytest.raises(RequestError, match="no tokenizer; give prompt_token_ids"):
        m.generate("a text")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError):  # one that is there must be right
        jaxinfer.load(str(tmp_path), **settings)
    with pytest.raises(TokenizerError, match="neither a known name"):
        jaxinfer.load(str(folder), tokenizer=str(tmp_path / "none"), **settings)
    with pytest.raises(EngineError, match="load it without skip_tokenizer_init"):
        _ = jaxinfer.load(str(folder), skip_tokenizer_init=True, **settings).tokenizer


def test_a_saved_temperature_of_0_is_greedy_for_every_reader(
    folder: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    m = jaxinfer.load(str(folder), **settings)
    given = {"temperature": 0.0, "top_p": 0.9, "eos_token_id": 2}
    jaxinfer.save(m, m.params, tmp_path / "new", generation_config=given, progress=NO_PROGRESS)
    saved = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert saved == {"eos_token_id": 2, "do_sample": True, "top_k": 1}
    facts = facts_of_configs("m", 300, {}, saved, use_generation_config=True)
    assert facts.default_sampling == SamplingParams(top_k=1)


# generation: engines of its own


def held_by(m: LanguageModel) -> dict[bool, Any]:
    return m._generate.func.__self__._held  # type: ignore[union-attr]


def test_engines_are_planned_for_what_is_given(
    m: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``jaxinfer generate`` plans one prompt; an engine is built again if a call needs more."""
    plan = dataclasses.replace(m._generate.func.__self__._plan, loaded=m.params)  # type: ignore
    built = list[Any]()

    class Engine:
        generate = staticmethod(lambda *_, **__: [])

    monkeypatch.setattr(own_engine, "build_engine", lambda *_: built.append(planned[-1]))
    monkeypatch.setattr(own_engine.LLM, "of_engine", lambda *_: Engine())
    planned: list[Any] = [{}]
    engines = own_engine.OwnEngines(plan, {"dtype": "float32"}, lambda s: planned.append(s) or plan)
    calls: list[tuple[Any, SamplingParams]] = [
        (PROMPT, GREEDY),
        ([PROMPT], GREEDY),
        (PROMPT, SamplingParams(max_tokens=5000)),
        (PROMPT, GREEDY),
        ([PROMPT, PROMPT], GREEDY),
        (PROMPT, SamplingParams(n=2)),
    ]
    counts = []
    for prompts, params in calls:
        engines.generate(NO_PROGRESS, m.params, prompts, params)
        counts.append(len(built))
    assert counts == [1, 1, 2, 2, 3, 3]

    def other(x: jax.Array) -> jax.Array:
        return x

    edits: list[tuple[Any, Any, int]] = [  # an engine for the very functions, and their positions
        (jnp.sin, None, 4),
        (jnp.sin, None, 4),
        (other, None, 5),
        (other, 3, 6),
        (other, [3], 6),
    ]
    for function, positions, count in edits:
        given = {"edit": {POINT: function}, "positions": positions}
        engines.generate(NO_PROGRESS, m.params, PROMPT, GREEDY, **given)
        assert len(built) == count
    engines.generate(NO_PROGRESS, m.params, PROMPT, GREEDY)
    assert len(built) == 6  # the one without edits is kept
    del planned[3:]
    one = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "dtype": "float32"}
    assert planned[1:] == [one | {"num_pages": 257}, one]  # the third has the settings of load


@pytest.mark.nightly
def test_one_prompt_is_served_by_few_executables(folder: Path, settings: dict[str, Any]) -> None:
    plain = {key: settings[key] for key in ("max_model_len", "cache_dir")}
    m = jaxinfer.load(str(folder), **plain)
    check_served(m.generate([PROMPT], GREEDY, use_tqdm=False), m)
    assert held_by(m)[False].llm.stats().num_executables <= 6
    m.generate([PROMPT, PROMPT[:5]], GREEDY, use_tqdm=False)
    assert held_by(m)[False].llm.config.max_num_seqs > 1
    check_served(m.generate([PROMPT], GREEDY, use_tqdm=False), m, cached=32)


def edited_greedy(m: LanguageModel, prompt: list[int], edit: Any, count: int = 6) -> list[int]:
    """The greedy continuation by ``forward`` with the edit."""
    ids, forward = list(prompt), jax.jit(lambda p, ids: m.forward(ids, params=p, edit=edit))
    for _ in range(count):
        padded = np.asarray(ids + [0] * (len(prompt) + count - len(ids)), np.int32)
        ids.append(int(forward(m.params, padded)[len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def drawn(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.nightly
def test_edits_while_sampling_are_those_of_forward(m: LanguageModel, tmp_path: Path) -> None:
    vector = 4 * jax.random.normal(jax.random.key(5), (64,))

    def head(z: jax.Array) -> jax.Array:
        return z.at[:, 1].multiply(-3)

    def moved(x: jax.Array) -> jax.Array:
        return x + vector

    plain = drawn(m.generate([PROMPT], GREEDY, use_tqdm=False))
    cached = sorted((Path(m._generate.func.__self__._plan.cache_dir)).rglob("*"))  # type: ignore
    edit = {"blocks.*.attn.hook_z": head, POINT: moved}
    both = m.generate([PROMPT, PROMPT[5:9]], GREEDY, edit=edit, use_tqdm=False)
    for prompt, found in zip((PROMPT, PROMPT[5:9]), drawn(both), strict=True):
        assert found == edited_greedy(m, prompt, {"layers.*.z": head, POINT: moved})
    assert drawn(both)[:1] != plain
    engine = held_by(m)[True].llm
    assert drawn(m.generate([PROMPT], GREEDY, edit=dict(edit), use_tqdm=False)) == drawn(both)[:1]
    assert held_by(m)[True].llm is engine and engine.stats().num_late_compiles == 0
    assert drawn(m.generate([PROMPT], GREEDY, use_tqdm=False)) == plain
    assert sorted((Path(m._generate.func.__self__._plan.cache_dir)).rglob("*")) == cached  # type: ignore
    changed = m.with_params(with_larger_down(m.params))
    found = drawn(changed.generate([PROMPT], GREEDY, edit=edit, use_tqdm=False))
    assert found == [edited_greedy(changed, PROMPT, {"layers.*.z": head, POINT: moved})]


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        ([2, 38], [2, 38]),  # of the prompt, and a drawn token
        pytest.param(-1, [36], marks=pytest.mark.nightly),
        pytest.param(slice(30, None), range(30, 99), marks=pytest.mark.nightly),
    ],
)
def test_positions_of_edits(m: LanguageModel, positions: Any, chosen: Any) -> None:
    vector = 6 * jax.random.normal(jax.random.key(7), (64,))
    places = jnp.asarray(list(chosen))

    def at(x: jax.Array) -> jax.Array:
        is_chosen = jnp.isin(jnp.arange(len(x)), places)
        return jnp.where(is_chosen[:, None], x + vector, x)

    found = m.generate(PROMPT, GREEDY, edit={POINT: vector}, positions=positions, use_tqdm=False)
    assert drawn(found) == [edited_greedy(m, PROMPT, {POINT: at})]


def test_positions_as_steps_have_them() -> None:
    assert _places(None, 9) == (None, None)
    assert _places(4, None) == ((4,), None) and _places([1, -1], 9) == ((1, 8), None)
    assert _places(np.arange(3), None) == ((0, 1, 2), None)
    assert _places(slice(2, 5), None) == (None, (2, 5))
    assert _places(slice(-3, None), 9) == (None, (6, 2**31 - 1))
    with pytest.raises(ArgumentError, match="a slice without a step"):
        _places(slice(0, 9, 2), None)


def test_wrong_edits_of_generation(m: LanguageModel, folder: Path, settings: Any) -> None:
    def same(x: jax.Array) -> jax.Array:
        return x

    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (
            {"layers.0.pattern": same},
            None,
            ConfigError,
            "edit has .*, which steps that serve do not",
        ),
        (
            {"layers.7.z": same},
            None,
            ConfigError,
            "edit has 'layers.7.z', which is no point; the ne",
        ),
        (
            {POINT: np.zeros(3)},
            None,
            ArgumentError,
            r"adds \[3\], and an activation there is \[64\]",
        ),
        ({POINT: same}, [-99], ArgumentError, "position -99 is before the first token"),
        ({POINT: same}, ["x"], ArgumentError, "positions must be an int, several, or a slice"),
        ({}, 3, ArgumentError, "positions are those of an edit"),
    ]
    for edit, positions, error, message in wrong:
        with pytest.raises(error, match=message):
            m.generate(PROMPT, GREEDY, edit=edit, positions=positions)
    with pytest.raises(ArgumentError, match="before the first token; count from 0"):
        m.generate([PROMPT, PROMPT], GREEDY, edit={POINT: same}, positions=-1)
    served = LLM(str(folder), **settings).model
    with pytest.raises(
        EngineError, match=r"compiled without edits; call generate of jaxinfer.load"
    ):
        served.generate(PROMPT, GREEDY, edit={POINT: same})
