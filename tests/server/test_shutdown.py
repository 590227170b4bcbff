"""The end of a server, planned or not: the responses that clients get, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.models import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.raw_http import RawClient, Reply, get, post
from kit.server_process import (
    SERVE,
    SIM_SERVE,
    ServerProcess,
    gone,
    server_process,
    sim_arguments,
    wait_until,
)
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

ROUTE = "/v1/completions"
SHORT = {"prompt": "hello", "max_tokens": 4}
ENDLESS = {"prompt": "hello", "max_tokens": 2000}
STEP = 0.02  # seconds: 2,000 tokens take 40 s

type Serve = Callable[..., ServerProcess]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server over a simulated device."""
    with ExitStack() as stack:

        def start(*options: str, step: float = STEP, **more: Any) -> ServerProcess:
            command = (*SIM_SERVE, *sim_arguments(step), *options)
            return stack.enter_context(server_process(*command, **more))

        yield start


def replies(clients: list[RawClient]) -> list[Reply]:
    """All responses, read at the same time."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(RawClient.reply, clients))


def open_clients(stack: ExitStack, port: int, count: int, **fields: Any) -> list[RawClient]:
    return [stack.enter_context(RawClient(port)).post(ROUTE, **fields) for _ in range(count)]


def test_sigterm_lets_32_streams_end(serve: Serve) -> None:
    server = serve()
    children = server.children
    with ExitStack() as stack:
        fields = {"prompt": "hello", "max_tokens": 100}
        streams = open_clients(stack, server.port, 32, **fields, stream=True)
        wholes = open_clients(stack, server.port, 4, **fields)
        for stream in streams:
            stream.wait()
        server.signal(signal.SIGTERM)
        wait_until(lambda: get(server.port, "/ready").status == 503, "it drains")
        refused = post(server.port, ROUTE, **SHORT)
        assert refused.status == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.error["code"] == "draining"
        assert get(server.port, "/health").status == 200
        for reply in replies(streams):
            assert reply.events[-1]["choices"][0]["finish_reason"] == "length"
        for reply in replies(wholes):
            assert reply.json["usage"]["completion_tokens"] == 100
    assert server.exit_code() == 0
    wait_until(lambda: all(map(gone, children)), "the others have ended too")
    with pytest.raises(ConnectionRefusedError):
        RawClient(server.port)


def test_sigterm_ends_requests_that_take_too_long(serve: Serve) -> None:
    server = serve("--shutdown-timeout", "0.2")
    children = server.children
    with ExitStack() as stack:
        streams = open_clients(stack, server.port, 32, **ENDLESS, stream=True)
        wholes = open_clients(stack, server.port, 4, **ENDLESS, n=2)
        for stream in streams:
            stream.wait()
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        for reply in replies(streams):
            assert reply.events[-1]["choices"][0]["finish_reason"] == "abort"
        for reply in replies(wholes):
            assert reply.status == 200
            choices = reply.json["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert time.monotonic() - start < 10
    assert server.exit_code() == 0
    wait_until(lambda: all(map(gone, children)), "the others have ended too")


def test_sigterm_of_an_idle_server_with_open_connections(serve: Serve) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert time.monotonic() - start < 4


def test_a_second_signal_is_the_end(serve: Serve) -> None:
    server = serve()
    children = server.children
    with RawClient(server.port) as client:
        client.post(ROUTE, **ENDLESS, stream=True).wait()
        server.signal(signal.SIGTERM)
        wait_until(lambda: get(server.port, "/ready").status == 503, "it drains")
        server.signal(signal.SIGTERM)
        assert server.exit_code(2) == 128 + signal.SIGTERM
    wait_until(lambda: all(map(gone, children)), "the others have ended too", 2)


@pytest.mark.nightly
def test_sigkill_and_restart_on_the_same_port(serve: Serve) -> None:
    server = serve()
    children = server.children
    with RawClient(server.port) as client:
        client.post(ROUTE, **ENDLESS, stream=True).wait()
        server.signal(signal.SIGKILL)
        wait_until(lambda: all(map(gone, children)), "the others have ended too", 2)
        assert server.exit_code() == -signal.SIGKILL
        again = serve(port=server.port)
    assert again.port == server.port
    assert post(again.port, ROUTE, **SHORT).json["usage"]["completion_tokens"] == 4


def test_sigkill_of_the_engine(serve: Serve) -> None:
    server = serve()
    with ExitStack() as stack:
        wholes = open_clients(stack, server.port, 4, **ENDLESS)
        streams = open_clients(stack, server.port, 4, **ENDLESS, stream=True)
        for stream in streams:
            stream.wait()
        os.kill(server.engine, signal.SIGKILL)
        for reply in replies(wholes):
            assert reply.status == 503 and reply.error["code"] == "engine_dead"
            assert "SIGKILL" in reply.error["message"]
        for reply in replies(streams):
            assert reply.events[-1]["error"]["code"] == "engine_dead"
    assert server.exit_code(5) == 1, "the system restarts a server that has failed"
    assert "killed by SIGKILL" in server.lines[-1]


@pytest.mark.nightly  # it compiles
def test_the_command_with_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, eos_token_id=257)
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32")))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    command = (*SERVE, str(folder), "--dtype", "float32", "--max-num-seqs", "32")
    sizes = ("--max-model-len", "256", "--num-pages", "1025")
    with server_process(*command, *sizes, "--cache-dir", str(tmp_path)) as server:
        children = server.children
        with ExitStack() as stack:
            fields = {**SHORT, "max_tokens": 200, "ignore_eos": True, "stream": True}
            streams = open_clients(stack, server.port, 32, **fields)
            for stream in streams:
                stream.wait()
            server.signal(signal.SIGTERM)
            for reply in replies(streams):
                assert reply.events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        wait_until(lambda: all(map(gone, children)), "the others have ended too")
