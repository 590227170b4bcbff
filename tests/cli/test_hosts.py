"""Commands on two hosts, which are two processes here: answers, refusals, and a host that ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kit.hosts import SECONDS, free_ports, two
from kit.parallel import config_of, written
from kit.server_process import wait_until

pytestmark = pytest.mark.nightly

COMMAND = [sys.executable, "-c", "from jaxinfer.cli.main import main; main()"]
SIZES = (
    *("--dtype=float32", "--max-num-seqs=3", "--max-model-len=96", "--page-size=8"),
    *("--num-pages=61", "--max-num-batched-tokens=64", "--prefill-bucket-start=64"),
    *("--mixed-bucket-start=4", "--decode-bucket-start=4"),
)
PROMPT = "hello, you there"
ENDED = "host {} (127.0.0.1) has ended; its log has the reason; start all hosts again"


def settings(folder: Path) -> list[str]:
    path = written(folder / "llama", config_of("llama"))
    return ["--model", str(path), f"--cache-dir={folder / 'cache'}", *SIZES]


def on_hosts(devices: int) -> list[list[str]]:
    """The arguments of each host."""
    given = (f"-tp={2 * devices}", "--num-hosts=2", f"--coordinator=127.0.0.1:{free_ports()}")
    return [[*given, f"--host-rank={rank}"] for rank in range(2)]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a process that ends."""
    out, error = process.communicate(timeout=SECONDS)
    return process.returncode, out, error


def token_ids(out: str) -> list[list[int]]:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return [json.loads(line)["token_ids"] for line in lines]


def test_generate(tmp_path: Path) -> None:
    """Host 0 alone has the prompts."""
    base = [*COMMAND, "generate", *settings(tmp_path), "--no-chat", "--temperature=0"]
    asked = ["--max-tokens=8", "--json", PROMPT, "what"]
    with two([[*base, *asked]], 1) as (alone,):
        code, out, error = ended(alone)
    assert code == 0, error
    hosts = on_hosts(2)
    with two([[*base, *hosts[0], *asked], [*base, *hosts[1]]], 2) as (first, second):
        (code, found, error), (other, nothing, told) = ended(first), ended(second)
    assert (code, other) == (0, 0), error + told
    assert token_ids(found) == token_ids(out) and len(token_ids(out)) == 2
    assert token_ids(nothing) == []
    assert "host 1 follows host 0 (127.0.0.1)" in told


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], int]]:
    """Two hosts and the port of the server, which has answered a request."""
    port = free_ports()
    base = [*COMMAND, "serve", *settings(folder), f"--port={port}"]
    with two([[*base, *own] for own in on_hosts(1)], 1) as (first, second):
        wait_until(lambda: status(port) == 200 or first.poll() is not None, "ready", SECONDS)
        assert len(completion(port, 4)) == 4
        yield first, second, port


def completion(port: int, tokens: int) -> list[int]:
    """The tokens of a request's answer."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice["token_ids"]


def keep_busy(port: int) -> None:
    """Send requests until the server ends."""
    with suppress(OSError):  # also an answer with an error
        while True:
            completion(port, 64)


def status(port: int) -> int:
    """The status of /health; 0 without a server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_server_that_is_stopped(tmp_path: Path) -> None:
    with served(tmp_path) as (first, second, _):
        first.send_signal(signal.SIGTERM)
        (code, _, error), (other, _, told) = ended(first), ended(second)
    assert (code, other) == (0, 0), error + told


@pytest.mark.parametrize(
    ("number", "busy"), [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, False)]
)
def test_a_follower_that_ends(tmp_path: Path, number: signal.Signals, busy: bool) -> None:
    with served(tmp_path) as (first, second, port):
        for _ in range(2 * busy):
            threading.Thread(target=keep_busy, args=(port,), daemon=True).start()
        time.sleep(0.5 * busy)
        second.send_signal(number)
        since = time.monotonic()
        wait_until(lambda: status(port) != 200, "ill", 5)
        code, _, error = ended(first)
        assert time.monotonic() - since < 5
    assert code == 1 and ENDED.format(1) in error, error


def test_a_leader_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path) as (first, second, _):
        first.kill()
        code, _, error = ended(second)
    assert code == 1 and ENDED.format(0) in error, error


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (["--max-model-len=64"], 1, "max_model_len is 64 on host 1 (127.0.0.1) and 96 on host 0; "),
        (["-tp=4"], 2, "device is cpu cpu x4 of 2 hosts with id 0 1 2048 2049 on host 1"),
        (["--num-hosts=3", "-tp=3"], 1, "its num_hosts is 3 and that of host 0 2; give one number"),
    ],
)
def test_hosts_that_differ(tmp_path: Path, changes: list[str], devices: int, message: str) -> None:
    base = [*COMMAND, "serve", *settings(tmp_path), f"--port={free_ports()}"]
    one, other = on_hosts(1)
    with two([[*base, *one], [*base, *other, *changes]], devices) as (first, second):
        for code, _, error in (ended(first), ended(second)):
            assert code == 1 and message in error, error
            assert "load weights" not in error


def test_a_host_with_fewer_devices(tmp_path: Path) -> None:
    base = [*COMMAND, "generate", *settings(tmp_path), PROMPT]
    with two([[*base, *own] for own in on_hosts(2)], 1) as both:
        for process in both:
            code, _, error = ended(process)
            assert code == 1 and "each of 2 hosts needs 2 devices, and host 0 has 1" in error, error


def test_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    base = [*COMMAND, "generate", *settings(tmp_path), "--hosts-timeout=1", PROMPT]
    with two([[*base, *on_hosts(1)[1]]], 1) as (process,):
        code, _, error = ended(process)
    assert code == 1 and "within 1 s (Connection refused); start host 0, or" in error, error
