"""``jaxinfer serve --data-parallel-size 2``: both engines answer, and one that dies comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.server_process import SERVE, server_process
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

SIZES = ("--max-num-seqs=2", "--max-model-len=4096", "--max-num-batched-tokens=32")
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config, folder = (
        tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, max_position_embeddings=4096),
        tmp_path / "model",
    )
    folder.mkdir()
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32")))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    return folder


def by_engine(text: str, name: str) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["engine"]: sample.value for sample in families[name].samples}


def test_two_engines_and_one_that_dies(model: Path, tmp_path: Path) -> None:
    command = (*SERVE, str(model), "--dtype=float32", *SIZES, "--data-parallel-size=2")
    with (
        server_process(*command, f"--cache-dir={tmp_path}", "--admin-api-key=admin") as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
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
