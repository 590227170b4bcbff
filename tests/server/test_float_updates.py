"""A server of quantised weights gets a folder of floats, as from fine-tuning, while it serves."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.engine.start.start import start_engine
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.server import Serving, serving

ADMIN = {"Authorization": "Bearer admin-secret"}
PROMPT = list(range(3, 40))
LONG = 1000  # tokens of a stream that runs during an update; it is closed soon after that
CONTINUED = 12
MODEL = tiny_llama_config(
    hidden_size=128, intermediate_size=512, num_hidden_layers=8, max_position_embeddings=2048
)


def write(folder: Path, seed: int) -> Path:
    return write_hf_folder(folder, MODEL, random_hf_tensors(build_model(MODEL, "float32"), seed))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    parent = tmp_path_factory.mktemp("models")
    return write(parent / "first", 1), write(parent / "second", 2)


@pytest.fixture(scope="module")
def config(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(folders[0]),
        quantization="int4",
        cpu_weights="quantised",
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_model_len=1200,
        max_num_batched_tokens=64,
        page_size=8,
        num_pages=400,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )


@pytest.fixture
def server(config: EngineConfig) -> Iterator[Serving]:
    with serving(start_engine(config), admin_api_key=("admin-secret",)) as made:
        yield made


@pytest.fixture(scope="module")
def fresh(config: EngineConfig, folders: tuple[Path, Path]) -> Iterator[Serving]:
    """A server that was started with the second folder."""
    with serving(start_engine(replace(config, model=str(folders[1])))) as made:
        yield made


def update(server: Serving, folder: Path, **query: str) -> httpx.Response:
    with server.client(headers=ADMIN) as client:
        return client.post("/update_weights", params=query, json={"path": str(folder)})


def body(prompt: list[int], count: int) -> dict[str, Any]:
    options = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    return {"prompt": prompt, "max_tokens": count} | options


def complete(server: Serving, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The tokens of the answer, and their logprobs."""
    answer = server.post("/v1/completions", **body(prompt, count))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_the_answers_are_those_of_a_fresh_server(
    server: Serving, fresh: Serving, folders: tuple[Path, Path]
) -> None:
    assert server.engine.stats().num_late_compiles == 0
    before, expected = complete(server, PROMPT, 12), complete(fresh, PROMPT, 12)
    assert before[0] != expected[0]
    done = update(server, folders[1])
    assert (done.status_code, done.json()) == (200, {"status": "updated"})
    assert complete(server, PROMPT, 12) == expected  # equal logprobs: the same weights, bit for bit
    update(server, folders[0])
    assert complete(server, PROMPT, 12) == before
    assert server.engine.stats().num_late_compiles == 0


def test_a_stream_goes_on_with_the_new_weights(
    server: Serving, fresh: Serving, folders: tuple[Path, Path]
) -> None:
    """Its first token is that of the old weights; the last ones continue it by the new weights."""
    ids: list[int] = []
    until = 0
    old = complete(server, PROMPT, 4)[0]
    earlier = server.engine.stats().num_generated_tokens
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body(PROMPT, LONG) | {"stream": True}) as got,
    ):
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                ids += choice["token_ids"] or []
            if ids and not until:
                assert update(server, folders[1], mode="keep").status_code == 200
                until = server.engine.stats().num_generated_tokens - earlier
            if until and len(ids) >= until + CONTINUED:
                break
    assert until < LONG - CONTINUED, "the stream ended before the new weights were there"
    assert ids[0] == old[0]
    kept, continued = ids[:until], ids[until : until + CONTINUED]
    assert continued == complete(fresh, PROMPT + kept, CONTINUED)[0]
    server.wait_until_idle()


def test_an_update_holds_no_second_copy_of_the_floats(
    server: Serving, folders: tuple[Path, Path]
) -> None:
    """Host memory has the new quantised weights, and of the floats one matrix at a time."""
    update(server, folders[1])  # imports and caches
    floats = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
    tracemalloc.start()
    try:
        assert update(server, folders[0]).status_code == 200
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < floats / 2  # measured: 2.0 of 7.1 MB, of which the new weights are 1.1
