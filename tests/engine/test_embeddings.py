"""``LLM.embed``, ``encode`` and ``score``: vectors and scores are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxinfer import LLM, AsyncLLM, EngineConfig, PoolingParams, SamplingParams
from jaxinfer.core.errors import ConfigError, RequestError, SourceError, TaskError
from jaxinfer.core.pooling import Pooling
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.scoring import first_tokens, score_prompt
from jaxinfer.engine.start.task import with_task
from jaxinfer.models import abstract_params, build_model
from jaxinfer.weights.sentence_transformers import pooling_of_folder
from jaxinfer.weights.sources import resolve_source
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf, write_hf_folder
from kit.embedders import DATA, SMALL, golden, write_modules
from kit.engines import tiny_engine, tiny_limits
from kit.tiny_models import tiny_config

EMBEDDINGS, RERANKER = golden("embeddings"), golden("reranker")
TEXTS = EMBEDDINGS.fact("texts")
HIDDEN_DATA = DATA / "hidden"
HIDDEN = sorted(path.stem for path in HIDDEN_DATA.glob("*.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models for embeddings by kind of pooling, a reranker, and a cache of executables."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("last", "mean", "cls"):
        write_modules(EMBEDDINGS.write(root / kind), kind)
    RERANKER.write(root / "reranker")
    return root


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / "last", cache_dir=folder / "cache", **SMALL)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> LLM:
    chunks = {"max_num_batched_tokens": 128, "prefill_bucket_start": 128}
    one = {"max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 22}
    return LLM(folder / "reranker", task="score", cache_dir=folder / "cache", **chunks, **one)


def vectors(llm: LLM, prompts: object, *options: object) -> np.ndarray:
    return np.array([one.outputs.data for one in llm.encode(prompts, *options)])


def test_vectors_of_the_last_token_are_those_of_transformers(llm: LLM) -> None:
    """In chunks of 32 tokens; the second time prefixes are reused."""
    expected = EMBEDDINGS.vectors("last")
    found = llm.embed(TEXTS)
    assert [one.prompt_token_ids for one in found] == EMBEDDINGS.fact("token_ids")
    assert found[0].outputs.hidden_size == 32 and found[0].finished
    got = np.array([one.outputs.embedding for one in found])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    again = llm.encode(EMBEDDINGS.fact("token_ids"))
    assert sum(one.num_cached_tokens for one in again) > 0
    np.testing.assert_allclose([one.outputs.data for one in again], expected, atol=1e-5)
    stats = llm.stats()
    assert stats.num_generated_tokens == 0 and stats.num_live_pages == 0
    assert stats.num_executables == 2, "no head, no decode steps"


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_other_kinds_of_pooling(folder: Path, kind: str) -> None:
    llm = LLM(folder / kind, cache_dir=folder / "cache", **SMALL)
    for _ in range(2):  # nothing is reused: a cached prefix has no hidden states
        found = llm.encode(TEXTS, PoolingParams(normalize=False))
        got = [one.outputs.data for one in found]
        np.testing.assert_allclose(got, EMBEDDINGS.vectors(kind, normalize=False), atol=1e-4)
        assert not any(one.num_cached_tokens for one in found)


def test_a_batch_is_as_each_prompt_alone(llm: LLM) -> None:
    prompts = [tuple((7 * i * i + n) % 250 for i in range(5 + 9 * n)) for n in range(7)]
    together = vectors(llm, prompts)
    llm.reset_prefix_cache()
    alone = np.concatenate([vectors(llm, [prompt]) for prompt in prompts])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_preempted_and_restarted_prompts(pooling: str) -> None:
    """Prompts that are computed again from their start have the same vectors."""
    prompts = [tuple((3 * i + n) % 300 for i in range(60)) for n in range(3)]
    found = []
    for interrupts in (False, True):
        limits = tiny_limits(max_num_batched_tokens=16, pooling=pooling)
        engine = tiny_engine(limits)
        for number, prompt in enumerate(prompts):
            engine.add_request(
                str(number), RequestSpec(prompt, SamplingParams(max_tokens=1), pools=True)
            )
        pooled: dict[str, bytes] = {}
        for step in range(1000):
            if interrupts and step == 3:
                engine.drain()
                engine.reset_prefix_cache()  # preempts all
            pooled |= {one.request_id: one.pooled for one in engine.step().deltas}
            if not engine.has_work:
                break
        found.append([np.frombuffer(pooled[str(n)], np.float32) for n in range(len(prompts))])
        assert engine.stats().num_live_pages == 0
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_dimensions_are_normalised_again(llm: LLM) -> None:
    whole = EMBEDDINGS.vectors("last", normalize=False)[:, :5]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    short = vectors(llm, TEXTS, PoolingParams(dimensions=5))
    np.testing.assert_allclose(short, expected, atol=1e-5)
    raw = PoolingParams(dimensions=5, normalize=False)
    np.testing.assert_allclose(vectors(llm, TEXTS, raw), whole, atol=1e-4)


def test_truncated_texts_keep_the_last_special_token(llm: LLM) -> None:
    text, ids = TEXTS[0], EMBEDDINGS.fact("token_ids")[0]
    (found,) = llm.embed(text, truncate_prompt_tokens=6)
    assert found.prompt_token_ids == [*ids[:5], ids[-1]]
    (found,) = llm.embed([list(range(9))], truncate_prompt_tokens=6)
    assert found.prompt_token_ids == list(range(6))
    longest = llm.config.max_model_len or 1024
    (found,) = llm.embed("a" * 2000, truncate_prompt_tokens=-1)
    assert len(found.prompt_token_ids) == longest


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"dimensions": 33}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"normalize": "yes"}, "normalize"),
    ],
)
def test_wrong_parameters(llm: LLM, params: dict[str, object], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        llm.encode("a", PoolingParams(**params))  # type: ignore[arg-type]


def test_prompts_that_cannot_be_embedded(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: .* at most 1024 tokens"):
        llm.embed(["a", "a" * 1024])  # and the special token
    assert len(llm.embed("a" * 1023)[0].prompt_token_ids) == 1024, "no room for an output is needed"
    with pytest.raises(RequestError, match="empty"):
        llm.embed([[]])
    assert llm.embed([]) == []


def test_a_model_has_one_task(llm: LLM, reranker: LLM) -> None:
    with pytest.raises(TaskError, match="--task generate"):
        llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(TaskError, match="--task embed"):
        reranker.embed("a")
    assert reranker.generate("a", SamplingParams(max_tokens=1))[0].finished


def test_any_decoder_embeds_by_its_last_token(folder: Path) -> None:
    """Without a description of the pooling, and with a head, which is not loaded."""
    root = EMBEDDINGS.write(folder / "plain", matryoshka_dimensions=[4, 8])
    llm = LLM(root, task="embed", cache_dir=folder / "cache", **SMALL)
    np.testing.assert_allclose(vectors(llm, TEXTS), EMBEDDINGS.vectors("last"), atol=1e-5)
    assert vectors(llm, TEXTS, PoolingParams(dimensions=8)).shape == (4, 8)
    llm.update_weights(root)
    np.testing.assert_allclose(vectors(llm, TEXTS), EMBEDDINGS.vectors("last"), atol=1e-5)
    with pytest.raises(RequestError, match="may have 4, 8 or 32"):
        llm.encode("a", PoolingParams(dimensions=5))


@pytest.mark.nightly
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("name", HIDDEN)
def test_every_family_embeds(folder: Path, name: str, pooling: str) -> None:
    """The vectors are made of transformers' last hidden states, in two chunks, without a head.

    Models with a scan compute 64 tokens at once, so that their prompts are one chunk.
    """
    check_vectors(folder, name, pooling)


def test_a_head_of_its_own_is_not_loaded(folder: Path) -> None:
    check_vectors(folder, "olmo2", "last")


@pytest.mark.parametrize("name", ["dbrx", "kimi_linear", "bailing_hybrid", "nemotron_h"])
def test_a_family_without_tied_embeddings_has_no_head_either(tmp_path: Path, name: str) -> None:
    config = tiny_config(name)
    write_hf_folder(tmp_path, config, random_hf_tensors(build_model(config, jnp.float32)))
    source = resolve_source(str(tmp_path), cache_dir=tmp_path, progress=NO_PROGRESS)
    _, embeds = with_task(EngineConfig(model=str(tmp_path), task="embed"), source)
    models = [build_model(one.hf_config, jnp.float32) for one in (source, embeds)]
    assert ["lm_head" in abstract_params(model) for model in models] == [True, False]


def check_vectors(folder: Path, name: str, pooling: str) -> None:
    checkpoint = golden(name)
    with safe_open(HIDDEN_DATA / f"{name}.safetensors", "np") as file:
        hidden = file.get_tensor("hidden")[-1]
    expected = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]
    path = checkpoint.write(folder / name)
    source = resolve_source(str(path), cache_dir=folder, progress=NO_PROGRESS)
    align = build_model(source.hf_config, jnp.float32).state.align
    llm = LLM(
        path,
        task="embed",
        pooling=pooling,
        skip_tokenizer_init=True,
        cache_dir=folder / "cache",
        **SMALL | {"max_num_batched_tokens": 16 if align == 1 else 2 * align},
    )
    prompt = checkpoint.tensors["token_ids"][0].tolist()
    assert len(prompt) > 16
    found = vectors(llm, [prompt], PoolingParams(normalize=False))
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert "lm_head" not in llm.model.params


async def encoded(engine: Engine, prompts: Sequence[object]) -> list[np.ndarray]:
    llm = AsyncLLM(engine)

    async def one(prompt: object) -> np.ndarray:
        outputs = [output async for output in llm.encode(prompt, PoolingParams(dimensions=4))]
        (output,) = outputs
        return output.outputs.data

    try:
        return list(await asyncio.gather(*map(one, prompts)))
    finally:
        await llm.shutdown()


def test_async_llm_encodes_many_prompts_at_once(folder: Path) -> None:
    engine = LLM(folder / "last", cache_dir=folder / "cache", **SMALL)._engine
    short = EMBEDDINGS.vectors("last")[:, :4]
    expected = short / np.linalg.norm(short, axis=1, keepdims=True)
    found = asyncio.run(encoded(engine, TEXTS))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_of_a_gguf_file(tmp_path: Path, number: int, kind: str) -> None:
    """llama.cpp's numbers; a file of a model that generates has 0 or none."""
    config = tiny_llama_config()
    tensors = random_hf_tensors(build_model(config, "float32"))
    metadata = {"llama.pooling_type": number}
    path = write_gguf(tmp_path / "model.gguf", config, tensors, metadata=metadata)
    source = resolve_source(str(path), cache_dir=tmp_path, progress=NO_PROGRESS)
    assert source.pooling == Pooling(kind)
    planned, embedder = with_task(EngineConfig(model=str(path)), source)
    assert (planned.task, planned.pooling) == ("embed", kind)
    assert embedder.hf_config["tie_word_embeddings"]
    plain = write_gguf(tmp_path / "plain.gguf", config, tensors)
    assert resolve_source(str(plain), cache_dir=tmp_path, progress=NO_PROGRESS).pooling is None


def test_scores_are_those_of_transformers(reranker: LLM) -> None:
    query, documents = RERANKER.fact("query"), RERANKER.fact("documents")
    found = reranker.score(query, documents)
    expected = RERANKER.tensors["scores"]
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-5)
    tokenizer = reranker.get_tokenizer()
    for document, prompt in zip(documents, RERANKER.fact("prompts"), strict=True):
        assert score_prompt(tokenizer, query, document).text == prompt
    pairs = reranker.score([query, query], documents[:2])
    np.testing.assert_allclose([one.outputs.score for one in pairs], expected[:2], atol=1e-5)


def test_a_template_of_scores(reranker: LLM) -> None:
    template = "{{ messages[1].content }}|{{ messages[0].content }}|{{ instruction }}"
    prompt = score_prompt(
        reranker.get_tokenizer(), "q", "d", template=template, variables={"instruction": "i"}
    )
    assert prompt.text == "d|q|i"
    (one,) = reranker.score(
        "q", "d", chat_template=template, chat_template_kwargs={"instruction": "i"}
    )
    assert one.prompt_token_ids == list(prompt.token_ids)


def test_long_documents_are_cut_and_the_rest_of_the_prompt_stays(reranker: LLM) -> None:
    tokenizer = reranker.get_tokenizer()
    whole = score_prompt(tokenizer, "q", "d" * 2000)
    cut = score_prompt(tokenizer, "q", "d" * 2000, keep=600)
    assert len(cut.token_ids) == 600 and cut.token_ids[-9:] == whole.token_ids[-9:]
    assert "d" * 30 in (cut.text or "")
    assert first_tokens(tokenizer, "d" * 2000, 3) == "ddd"
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 50"):
        score_prompt(tokenizer, "q", "d", keep=50)
    (one,) = reranker.score("q", "d" * 2000, truncate_prompt_tokens=-1)
    assert len(one.prompt_token_ids) == 1023


def test_scores_of_embeddings_are_cosines(llm: LLM) -> None:
    expected = EMBEDDINGS.vectors("last")
    found = llm.score(TEXTS[0], TEXTS[1:])
    scores = [one.outputs.score for one in found]
    np.testing.assert_allclose(scores, expected[1:] @ expected[0], atol=1e-5)
    with pytest.raises(RequestError, match="2 queries came with 3 documents"):
        llm.score(TEXTS[:2], TEXTS[:3])


def test_settings_that_do_not_go_with_the_task(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pooling has no meaning for task 'generate'"):
        LLM(folder / "reranker", pooling="mean")
    with pytest.raises(ConfigError, match="tap_points has no meaning"):
        LLM(folder / "last", tap_points=["layers.0.resid_post"])
    with pytest.raises(ConfigError, match="'maybe', which is 5 tokens"):
        LLM(folder / "reranker", task="score", score_tokens="yes,maybe", max_num_seqs=1)
    with pytest.raises(ConfigError, match="task 'classify' is unknown"):
        LLM(folder / "last", task="classify")


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    assert pooling_of_folder(tmp_path) is None
    write_modules(tmp_path, "mean", ("Transformer", "Pooling"))
    assert pooling_of_folder(tmp_path) == Pooling("mean", normalize=False)
    write_modules(tmp_path, "", pooling_mode="lasttoken", embedding_dimension=32)
    assert pooling_of_folder(tmp_path) == Pooling("last", normalize=True)
    write_modules(tmp_path, "", pooling_mode_max_tokens=True, pooling_mode_mean_tokens=True)
    with pytest.raises(ConfigError, match="max_tokens and mean_tokens"):
        pooling_of_folder(tmp_path)
    write_modules(tmp_path, "mean", ("Transformer", "Pooling", "Dense", "Normalize"))
    with pytest.raises(ConfigError, match="'Dense'"):
        pooling_of_folder(tmp_path)
    write_modules(tmp_path, "mean")
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match="do_lower_case"):
        pooling_of_folder(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text("[")
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(SourceError, match=r"1_Pooling/config.json cannot be read"):
        pooling_of_folder(tmp_path)
    write_modules(tmp_path, "", ("Transformer", "LogitScore"))
    assert pooling_of_folder(tmp_path) is None
