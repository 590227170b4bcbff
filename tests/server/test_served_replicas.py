"""``jaxinfer serve --data-parallel-size 2``: both engines answer, and one that dies comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.embedders import SMALL, golden, write_modules
from kit.server_process import SERVE, ServerProcess, server_process, wait_until
from kit.tokenizers import TINY_VOCAB_SIZE, write_tiny_tokenizer

SIZES = ("--max-num-seqs=2", "--max-model-len=4096", "--max-num-batched-tokens=32")
ADMIN = {"Authorization": "Bearer admin"}
PROMPTS = [[5 + i, 9, 3] for i in range(4)]


def write_model(folder: Path, seed: int = 0) -> Path:
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, max_position_embeddings=4096)
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32"), seed=seed))
    write_tiny_tokenizer(folder)
    return folder


def by_engine(text: str, name: str) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["engine"]: sample.value for sample in families[name].samples}


def test_two_engines_and_one_that_dies(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    command = (*SERVE, str(model), "--dtype=float32", *SIZES, "--data-parallel-size=2")
    tiers = ("--kv-offloading-size=0.01", "--kv-offloading-disk-size=0.01")
    command += (*tiers, f"--kv-offloading-disk={tmp_path / 'disk'}")
    with (
        server_process(*command, f"--cache-dir={tmp_path}", "--admin-api-key=admin") as server,
        client_of(server) as client,
    ):

        def answer(prompt: list[int], **more: object) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
            return client.post("/v1/completions", json=body)

        prompts = [[5 + i, 9, 3] for i in range(6)]
        texts = [answer(prompt).json()["choices"][0]["text"] for prompt in prompts]
        again = [answer(prompt).json()["choices"][0]["text"] for prompt in reversed(prompts)]
        assert again[::-1] == texts, "whichever engine answers"
        tokens = by_engine(client.get("/metrics").text, "vllm:generation_tokens")
        assert tokens.keys() == {"0", "1"} and min(tokens.values()) >= 12
        long = list(range(200))
        cached = []
        for _ in range(3):
            details = answer(long).json()["usage"]["prompt_tokens_details"]
            cached.append(details["cached_tokens"])
        assert cached[0] == 0 and min(cached[1:]) > 100, "a prefix goes where it is known"
        reset = client.post("/reset_prefix_cache", headers=ADMIN)
        assert reset.status_code == 200, reset.text
        assert answer(long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        engines = [pid for pid in children_of(server.pid) if "link.child" in command_of(pid)]
        assert len(engines) == 2
        options = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json={"prompt": [1], **options}) as stream:
            lines = stream.iter_lines()
            next(lines)
            (busy,) = [rank for rank in (0, 1) if running(client)[str(rank)]]
            os.kill(engines[busy], signal.SIGKILL)
            text = "".join(lines)
        assert f"replica {busy} has ended" in text
        assert client.get("/health").status_code == 200
        assert [answer(prompt).json()["choices"][0]["text"] for prompt in prompts] == texts
        end = time.monotonic() + 60
        while not {"0", "1"} <= {k for k, v in executables(client).items() if v}:
            assert time.monotonic() < end, "it is started again"
            for prompt in prompts:
                assert answer(prompt).status_code == 200
            time.sleep(0.2)


def running(client: httpx.Client) -> dict[str, float]:
    return by_engine(client.get("/metrics").text, "vllm:num_requests_running")


def executables(client: httpx.Client) -> dict[str, float]:
    """Those read from the cache or compiled; none of an engine that has ended."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    (family,) = [one for one in families if one.name == "jaxinfer:executables"]
    found: dict[str, float] = {}
    for sample in family.samples:
        engine = sample.labels["engine"]
        found[engine] = found.get(engine, 0.0) + sample.value
    return found


def children_of(pid: int) -> list[int]:
    """In the order of their starts; each thread has its own."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(child) for text in texts for child in text.split())


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


def client_of(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60)


def texts_of(client: httpx.Client) -> list[str]:
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answers = [client.post("/v1/completions", json={"prompt": one, **body}) for one in PROMPTS]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return [answer.json()["choices"][0]["text"] for answer in answers]


def wait_for_both(client: httpx.Client, server: ServerProcess, number: int) -> None:
    """Return once an engine that was killed answers again, which is the ``number``th time."""
    wait_until(lambda: sum("answers again" in line for line in server.lines) == number, "again", 60)
    assert client.get("/health").status_code == 200


def test_an_engine_that_is_started_again_is_as_the_others(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second", 1)
    command = (*SERVE, str(first), "--dtype=float32", *SIZES, "--data-parallel-size=2")
    with (
        server_process(*command, f"--cache-dir={tmp_path}", "--admin-api-key=admin") as server,
        client_of(server) as client,
    ):
        engines = [pid for pid in children_of(server.pid) if "link.child" in command_of(pid)]
        old = texts_of(client)
        client.headers.update(ADMIN)
        for folder in (first, second):
            updated = client.post("/update_weights", json={"path": str(folder)})
            assert updated.status_code == 200, updated.text
        new = texts_of(client)
        assert new != old
        assert client.post("/update_weights", json={"path": "/none"}).status_code == 400
        os.kill(engines[1], signal.SIGKILL)
        wait_for_both(client, server, 1)
        for _ in range(3):
            assert texts_of(client) == new
        body = {"token_ids": [5, 9], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
        generated = [client.post("/inference/v1/generate", json=body).json() for _ in range(4)]
        versions = [one["choices"][0]["weight_versions"] for one in generated]
        assert {span["version"] for spans in versions for span in spans} == {2}

        assert client.post("/sleep").status_code == 200
        os.kill(engines[0], signal.SIGKILL)
        wait_for_both(client, server, 2)
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post("/wake_up").status_code == 200
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert client.get("/weight_info").json() == {"weight_version": 2}
        for _ in range(3):
            assert texts_of(client) == new


def test_replicas_of_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = write_model(tmp_path / "model"), f"--cache-dir={tmp_path}"
    command = (*SERVE, str(model), "--dtype=float32", *SIZES, cache)
    with server_process(*command) as server, client_of(server) as client:
        expected = texts_of(client)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    sizes = ("--tensor-parallel-size=2", "--data-parallel-size=2")
    with server_process(*command, *sizes) as server, client_of(server) as client:
        for _ in range(3):
            assert texts_of(client) == expected
        tokens = by_engine(client.get("/metrics").text, "vllm:generation_tokens")
        assert tokens.keys() == {"0", "1"} and min(tokens.values()) >= 24


def test_embeddings_of_replicas(tmp_path: Path) -> None:
    golden_of = golden("embeddings")
    model = golden_of.write(tmp_path / "model")
    write_modules(model, "last")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = (*SERVE, str(model), *sizes, f"--cache-dir={tmp_path}", "--data-parallel-size=2")
    texts, expected = golden_of.fact("texts"), golden_of.vectors("last")
    with (
        server_process(*command) as server,
        client_of(server) as client,
    ):
        for _ in range(3):
            answer = client.post("/v1/embeddings", json={"input": texts}).json()
            found = np.array([one["embedding"] for one in answer["data"]])
            np.testing.assert_allclose(found, expected, atol=2e-3)
        tokens = by_engine(client.get("/metrics").text, "vllm:prompt_tokens")
        assert min(tokens.values()) > 0
