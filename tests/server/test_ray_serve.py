"""Two replicas on Ray Serve: answers, prefixes, and a replica that is killed (extra ``ray``)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.deploy_files import DEPLOY
from kit.server_process import gone, wait_until
from kit.tokenizers import TINY_VOCAB_SIZE, write_tiny_tokenizer

SETTINGS = {"max_num_seqs": 2, "max_model_len": 4096, "max_num_batched_tokens": 32}
REASON = "needs Ray Serve: pip install 'jaxinfer[ray]'"
START_SECONDS = 120.0
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@contextmanager
def ray_program(
    folder: Path, **deployment: object
) -> Iterator[tuple[httpx.Client, Callable[..., None]]]:
    """A client of replicas that are ready, and a function that deploys them with other settings."""
    pytest.importorskip("ray", reason=REASON)
    options = {"ray_actor_options": {"num_cpus": 1, "num_gpus": 0}, **deployment}
    arguments = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "cache_dir": str(folder / "cache"),
        "deployment": options,
        **SETTINGS,
    }
    path = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kit.ray_program", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    lines: list[str] = []
    found: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip().isdecimal():
                found.append(int(line))

    def deploy(**changes: object) -> None:
        assert process.stdin is not None
        number = len(found)
        process.stdin.write(json.dumps({**arguments, **changes}) + "\n")
        process.stdin.flush()
        wait_until(lambda: len(found) > number, "deployed", START_SECONDS)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: bool(found) or process.poll() is not None, "ready", START_SECONDS)
        assert found, lines
        with httpx.Client(base_url=f"http://127.0.0.1:{found[0]}", timeout=60) as client:
            yield client, deploy
        process.stdin.close()
        assert process.wait(60) == 0, lines[-20:]
    finally:
        process.kill()
        process.wait()
        reader.join(30)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "model").mkdir()
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, max_position_embeddings=4096)
    write_hf_folder(folder / "model", config, random_hf_tensors(build_model(config, "float32")))
    write_tiny_tokenizer(folder / "model")
    return folder


def processes(title: str) -> set[int]:
    """Those whose command begins so."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and not gone(int(entry.name)):
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if command.startswith(title.encode()):
                found.add(int(entry.name))
    return found


def replicas() -> set[int]:
    return processes("ray::ServeReplica:default:Replica")


def engine_of(replica: int) -> int:
    lists = [path.read_text() for path in Path(f"/proc/{replica}/task").glob("*/children")]
    commands = {
        int(child): Path(f"/proc/{child}/cmdline").read_bytes()
        for text in lists
        for child in text.split()
    }
    (engine,) = [pid for pid, command in commands.items() if b"link.child" in command]
    return engine


def chat(client: httpx.Client, text: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], **GREEDY, **fields}
    return client.post("/v1/chat/completions", json=body)


def cached(client: httpx.Client, text: str) -> int:
    answer = chat(client, text)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(client: httpx.Client, name: str) -> float:
    (found,) = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_answers_prefixes_and_replicas_that_are_killed(folder: Path) -> None:
    with ray_program(folder, num_replicas=2) as (client, _):
        assert len(replicas()) == 2
        assert client.get("/v1/models").json()["data"][0]["id"] == "model"
        whole = chat(client, "hello").json()["choices"][0]["message"]["content"]
        events = chat(client, "hello", stream=True).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        deltas = [json.loads(one[6:])["choices"][0]["delta"] for one in events[:-2]]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole
        messages = {
            "model": "model",
            "max_tokens": 6,
            "messages": [{"role": "user", "content": "hi"}],
        }
        assert client.post("/v1/messages", json=messages).json()["type"] == "message"
        assert client.post("/v1/completions", json={"prompt": 5.0}).status_code == 400

        # A prefix goes where it is known. Of 8 in turn, chance alone would send half elsewhere.
        first, second = "abcd efgh " * 40, "stuv wxyz " * 40
        assert [cached(client, first), cached(client, second)] == [0, 0]
        again = [cached(client, text + str(i)) for i in range(4) for text in (first, second)]
        assert min(again) > 100

        running = re.findall(
            r'^vllm:num_requests_running{replica="(\w+)"', client.get("/metrics").text, re.M
        )
        assert len({*running}) == 2, "each replica's numbers"

        # one that is killed is replaced, and its requests that had no answer yet go to the other
        lost = min(replicas())
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(chat, client, f"q{i}", max_tokens=200) for i in range(4)]
            os.kill(lost, signal.SIGKILL)
            assert {one.result().status_code for one in running} == {200}
        assert chat(client, "hello").json()["choices"][0]["message"]["content"] == whole
        wait_until(lambda: len(replicas()) == 2, "two replicas", START_SECONDS)

        # an engine that is killed takes its replica with it
        lost = min(replicas())
        os.kill(engine_of(lost), signal.SIGKILL)
        for i in range(8):
            answer = chat(client, "hello")
            assert answer.status_code == 200, (i, answer.text)
        wait_until(lambda: lost not in replicas() and len(replicas()) == 2, "two", START_SECONDS)
    assert not replicas()


def test_replicas_follow_the_load_and_open_requests_end(folder: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    quick = {"upscale_delay_s": 0.5, "metrics_interval_s": 0.2, "look_back_period_s": 1}
    with ray_program(folder, autoscaling_config={**scaling, **quick}) as (client, deploy):
        assert len(replicas()) == 1
        long = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as abandoned:
            next(abandoned.iter_lines())
        wait_until(lambda: metric(client, "num_requests_running") == 0, "it has ended")
        assert 0 < metric(client, "generation_tokens_total") < 3000
        with client.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
            with ThreadPoolExecutor(4) as pool:
                running = [pool.submit(chat, client, "q", max_tokens=2000) for _ in range(4)]
                wait_until(lambda: len(replicas()) == 2, "two replicas", START_SECONDS)
                assert {one.result().status_code for one in running} == {200}
        old = replicas()
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            deploy(served_model_name=["other"])
            assert client.get("/v1/models").json()["data"][0]["id"] == "other"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(lambda: not old & replicas(), "the old ones end", START_SECONDS)


def test_ray_accepts_the_manifest() -> None:
    pytest.importorskip("ray", reason=REASON)
    program = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from jaxinfer.ray import build_app
config = yaml.safe_load(yaml.safe_load(open(sys.argv[1]))["spec"]["serveConfigV2"])
(application,) = ServeDeploySchema.model_validate(config).applications
print(build_app(application.args))
"""
    command = [sys.executable, "-c", program, str(DEPLOY / "ray-service.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Application" in done.stdout
