"""Embeddings, scores and reranking over HTTP, with the official ``openai`` client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest
from openai import BadRequestError, OpenAI

from jaxinfer import LLM
from kit.embedders import SMALL, golden, write_modules
from kit.server import Serving, serving

EMBEDDINGS, RERANKER = golden("embeddings"), golden("reranker")
TEXTS = EMBEDDINGS.fact("texts")
EXPECTED = EMBEDDINGS.vectors("last")
QUERY, DOCUMENTS = RERANKER.fact("query"), RERANKER.fact("documents")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def embedder(root: Path) -> Iterator[Serving]:
    folder = EMBEDDINGS.write(root / "embedder")
    write_modules(folder, "last")
    llm = LLM(folder, cache_dir=root / "cache", **SMALL)
    with serving(llm._engine, served_model_name=["embedder"]) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def reranker(root: Path) -> Iterator[Serving]:
    folder = RERANKER.write(root / "reranker")
    chunks = {"max_num_batched_tokens": 128, "prefill_bucket_start": 128}
    one = {"max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 22}
    llm = LLM(folder, task="score", cache_dir=root / "cache", **chunks, **one)
    with serving(llm._engine) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(embedder: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    "encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]
)
@pytest.mark.parametrize("given", [TEXTS, EMBEDDINGS.fact("token_ids")], ids=["texts", "ids"])
def test_the_openai_client(client: OpenAI, given: Any, encoding: Any) -> None:
    """Without an encoding it asks for base64, and reads it."""
    answer = client.embeddings.create(model="embedder", input=given, **encoding)
    vectors = [one.embedding for one in answer.data]
    if encoding.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(str(one)), "<f4") for one in vectors]
    np.testing.assert_allclose(np.array(vectors), EXPECTED, atol=1e-5)
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == sum(map(len, EMBEDDINGS.fact("token_ids")))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens and answer.model == "embedder"


def test_the_ollama_client(embedder: Serving) -> None:
    with ollama.Client(host=embedder.url) as client:
        (card,) = client.list().models
        info = client.show("embedder")
        assert info.capabilities == ["embedding"] and info.modelinfo is not None
        assert card.details is not None and card.details.family == "qwen3"
        assert info.modelinfo["general.architecture"] == card.details.family
        assert info.modelinfo["general.parameter_count"] > 0 < (card.size or 0)
        answer = client.embed("embedder", TEXTS)
        np.testing.assert_allclose(np.array(answer.embeddings), EXPECTED, atol=1e-5)
        assert answer.prompt_eval_count == sum(map(len, EMBEDDINGS.fact("token_ids")))
        older = client.embeddings("embedder:latest", TEXTS[0]).embedding
        np.testing.assert_allclose(np.array(older), EXPECTED[0], atol=1e-5)
        assert len(client.embed("embedder", TEXTS[0], dimensions=6).embeddings[0]) == 6
        long = TEXTS[0] * embedder.engine.limits.max_model_len
        assert len(client.embed("embedder", long).embeddings) == 1
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            client.embed("embedder", long, truncate=False)
        with pytest.raises(ollama.ResponseError, match="embeddings"):
            client.chat("embedder", [{"role": "user", "content": "a"}])


def test_one_input_and_dimensions(client: OpenAI) -> None:
    answer = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=6)
    short = EXPECTED[0, :6]
    expected = short / np.linalg.norm(short)
    np.testing.assert_allclose(answer.data[0].embedding, expected, atol=1e-5)
    ids = EMBEDDINGS.fact("token_ids")[0]
    again = client.embeddings.create(model="embedder", input=ids, dimensions=6)
    np.testing.assert_allclose(again.data[0].embedding, expected, atol=1e-5)
    cached = (again.usage.model_extra or {})["prompt_tokens_details"]["cached_tokens"]
    assert cached == 16, "whole pages of an equal prompt"


def test_fields_of_vllm(embedder: Serving) -> None:
    raw = EMBEDDINGS.vectors("last", normalize=False)[0]
    for name in ("normalize", "use_activation"):
        answer = embedder.post("/v1/embeddings", input=TEXTS[0], **{name: False}).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], raw, atol=1e-4)
    answer = embedder.post("/v1/embeddings", input="a" * 3000, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == 1024
    answer = embedder.post("/v1/embeddings", input="ab", add_special_tokens=False).json()
    assert answer["usage"]["prompt_tokens"] == 2
    answer = embedder.post("/pooling", input=TEXTS[:1], encoding_format="base64").json()
    assert answer["data"][0]["object"] == "pooling"
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(vector, EXPECTED[0], atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_those_of_transformers(reranker: Serving, path: str) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents")):
        fields = dict(zip(names, (QUERY, DOCUMENTS), strict=True))
        answer = reranker.post(path, **fields).json()
        scores = [one["score"] for one in answer["data"]]
        np.testing.assert_allclose(scores, RERANKER.tensors["scores"], atol=1e-5)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_reranking(reranker: Serving, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    answer = reranker.post(path, query=QUERY, documents=documents, top_n=2).json()
    order = np.argsort(-RERANKER.tensors["scores"])
    assert [one["index"] for one in answer["results"]] == order[:2].tolist()
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    scores = [one["relevance_score"] for one in answer["results"]]
    np.testing.assert_allclose(scores, RERANKER.tensors["scores"][order[:2]], atol=1e-5)


def test_fields_of_reranking(reranker: Serving) -> None:
    given = {"query": QUERY, "documents": DOCUMENTS}
    plain = reranker.post("/rerank", **given, return_documents=False).json()
    assert len(plain["results"]) == 3 and "document" not in plain["results"][0]
    for fields in ({"instruction": "i"}, {"chat_template_kwargs": {"instruction": "i"}}):
        other = reranker.post("/rerank", **given, **fields).json()
        assert other["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"]
    cut = reranker.post("/rerank", **given, max_tokens_per_doc=1).json()
    assert cut["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"]


def test_embeddings_rerank_by_cosines(embedder: Serving) -> None:
    answer = embedder.post("/v1/rerank", query=TEXTS[0], documents=TEXTS).json()
    cosines = EXPECTED @ EXPECTED[0]
    assert answer["results"][0]["index"] == 0
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(cosines[one["index"]], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input[1]"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "input"),
        ("/v1/embeddings", {"input": [999]}, "input"),
        ("/v1/embeddings", {"input": "a" * 1024}, "input"),
        ("/v1/embeddings", {"input": ["a", "a" * 1024]}, "input[1]"),
        ("/v1/embeddings", {"input": "a" * 100_000}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {}, "input"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"queries": "a", "text_2": "b"}, "queries"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c" * 1024]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a" * 1024, "text_2": ["b", "c"]}, "text_1"),
        ("/v1/rerank", {"query": "a" * 1024, "documents": ["b", "c"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents[1].text"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
        ("/inference/v1/generate", {"token_ids": [1]}, "model"),
    ],
)
def test_bad_input_names_its_field(
    embedder: Serving, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = embedder.post(path, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_model_of_text_makes_no_embeddings(reranker: Serving, path: str) -> None:
    answer = reranker.post(path, input="a")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
    assert reranker.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_the_openai_client_sees_the_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="choose at most as many") as caught:
        client.embeddings.create(model="embedder", input="a", dimensions=64)
    assert caught.value.param == "dimensions"


def test_metrics_count_embeddings(embedder: Serving) -> None:
    with embedder.client() as client:
        before = client.get("/stats").json()
        client.post("/v1/embeddings", json={"input": ["count", "these"]})
        after = client.get("/stats").json()
    assert after["requests"]["received"] == before["requests"]["received"] + 2
    assert after["requests"]["active"] == 0
    assert after["requests"]["finished"]["stop"] == before["requests"]["finished"]["stop"] + 2
    assert after["tokens"]["prompt"] == before["tokens"]["prompt"] + 12
    assert after["tokens"]["generated"] == 0


def test_the_size_of_all_vectors_is_bounded(
    embedder: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, width = embedder.service, len(EXPECTED[0])
    most = replace(service.config, max_answer_bytes=2 * 21 * width)
    monkeypatch.setattr(service, "config", most)
    for path in ("/v1/embeddings", "/pooling"):
        assert embedder.post(path, input=["a"] * 2).status_code == 200
        refused = embedder.post(path, input=["a"] * 3)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "input"
        assert "--max-answer-bytes" in error["message"]
        shorter = (
            {"dimensions": width // 2} if path == "/pooling" else {"encoding_format": "base64"}
        )
        assert embedder.post(path, input=["a"] * 3, **shorter).status_code == 200
