"""Our client next to vLLM's and guidellm's: TTFT and ITL of one server with known delays.

Run from the repository root; a client whose interpreter is not named is left out:

    .venv/bin/python -m bench.clients --python-vllm PATH --python-guidellm PATH --tokenizer FOLDER

The server streams each answer by a clock, and notes when it read the request and wrote each chunk:
those times are what a client should report. Clients take turns; exits with 1 if the medians of ours
differ by more than 2 % from another's. Before, 64 streams show how many tokens a second our client
reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Client
from jaxinfer.bench.offer import in_loop, offer, wait_until_ready
from jaxinfer.bench.server_process import CommandProcess, free_port

STREAMS, STREAM_TOKENS = 64, 800  # at once, for tokens a second
STREAM_ITL = STREAMS / 40_000  # seconds: the server is to be faster than 20,000 tokens a second
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LIMIT = 0.02  # between our medians and another client's


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python-vllm", help="vLLM's interpreter, or a script that runs it")
    parser.add_argument("--python-guidellm")
    parser.add_argument("--tokenizer", default="", help="a folder; vLLM and guidellm need one")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server")
    parser.add_argument("--ttft", type=float, default=0.2, help="of the server, s")
    parser.add_argument("--itl", type=float, default=0.02, help="of the server, s")
    return parser


class PacedServer:
    """Answers of ``max_tokens`` chunks: the first after ``ttft`` seconds, then one each ``itl``."""

    def __init__(self, ttft: float = 0.2, itl: float = 0.02) -> None:
        self._ttft, self._itl = ttft, itl
        self.ttfts: list[float] = []  # seconds, as they were
        self.itls: list[float] = []

    async def serve(self, port: int) -> None:
        """Serve until the process ends."""
        async with await asyncio.start_server(self._connection, "127.0.0.1", port) as server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [
                    line[15:] for line in head.splitlines() if line[:15] == "content-length:"
                ]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                if head.startswith("get"):
                    self._listing(head.split(" ", 2)[1], writer)
                else:
                    await self._stream(json.loads(body), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _listing(self, path: str, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {"data": [{"id": "paced", "object": "model"}], "object": "list"}
        if path == "/measured":  # and forget
            answer = {"ttft_ms": 1e3 * median(self.ttfts), "itl_ms": 1e3 * median(self.itls)}
            self.ttfts, self.itls = [], []
        body = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body)

    async def _stream(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begun, last, count = time.perf_counter(), 0.0, asked["max_tokens"]
        writer.write(STREAM)
        for index in range(count):
            await asyncio.sleep(begun + self._ttft + index * self._itl - time.perf_counter())
            choice = {"index": 0, "text": f" w{index}", "finish_reason": None}
            data = _event({"id": "x", "object": "text_completion", "choices": [choice]})
            now = time.perf_counter()
            writer.write(data)
            (self.itls if index else self.ttfts).append(now - (last or begun))
            last = now
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}
        end = {"id": "x", "object": "text_completion", "choices": [], "usage": usage}
        writer.write(_event(end) + _chunk(b"data: [DONE]\n\n") + _chunk(b""))


def _event(data: dict[str, Any]) -> bytes:
    return _chunk(f"data: {json.dumps(data)}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def paced(ttft: float, itl: float) -> Generator[str]:
    """The URL of a server with these delays, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "bench.clients", f"--serve={port}", f"--ttft={ttft}"]
    with tempfile.TemporaryFile() as log, CommandProcess([*command, f"--itl={itl}"], log):
        yield f"http://127.0.0.1:{port}"


async def streamed() -> dict[str, float]:
    """Tokens a second that our client reads of many streams, and its CPU time for each."""
    asked = {"model": "paced", "prompt": [1, 2, 3], "max_tokens": STREAM_TOKENS, "stream": True}
    path, body = "/v1/completions", json.dumps(asked).encode()
    with paced(0.0, STREAM_ITL) as url, closing(Client(url)) as client:
        await wait_until_ready(client, path, json.dumps({**asked, "max_tokens": 1}).encode(), 60)
        outcome = await offer(client, path, [body] * STREAMS, [0.0] * STREAMS)
    tokens = sum(answer.output_tokens for answer in outcome.answers)
    return {
        "load": os.getloadavg()[0],
        "tokens": tokens,
        "tokens_per_second": tokens / outcome.seconds,
        "client_cpu_us_per_token": outcome.cpu_us_per_chunk,
    }


def ours(given: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    """Medians of ``jaxinfer bench serve``, in ms."""
    command = [sys.executable, "-m", "jaxinfer", "bench", "serve", "--base-url", url]
    command += ["--random-input-len=64", f"--random-output-len={given.output_len}", "--ignore-eos"]
    command += [f"--num-prompts={given.num_prompts}", f"--max-concurrency={given.max_concurrency}"]
    run(command + ["--vocab-size=1000", "--disable-tqdm", f"--output={folder / 'run'}"])
    (figures,) = json.loads((folder / "run" / "result.json").read_text())["series"].values()
    return {name: figures[f"p50_{name}_ms"] for name in ("ttft", "itl", "tpot")}


def vllm(given: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    """Medians of ``vllm bench serve``, in ms."""
    command = [given.python_vllm, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--backend=openai", f"--base-url={url}", "--endpoint=/v1/completions"]
    command += ["--model=paced", f"--tokenizer={given.tokenizer}", "--dataset-name=random"]
    command += ["--random-input-len=64", f"--random-output-len={given.output_len}", "--ignore-eos"]
    command += [f"--num-prompts={given.num_prompts}", f"--max-concurrency={given.max_concurrency}"]
    command += ["--percentile-metrics=ttft,tpot,itl", "--save-result", f"--result-dir={folder}"]
    run(command + ["--result-filename=vllm.json", "--disable-tqdm"])
    figures = json.loads((folder / "vllm.json").read_text())
    return {name: figures[f"median_{name}_ms"] for name in ("ttft", "itl", "tpot")}


def guidellm(given: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    """Medians of ``guidellm run``, in ms; its ITL is a mean over each answer, as our TPOT."""
    command = [given.python_guidellm, "-m", "guidellm", "run", "--disable-console-interactive"]
    route = "request_format=/v1/completions"
    command += ["--backend", f"kind=openai_http,target={url},model=paced,{route}"]
    command += ["--profile", f"kind=concurrent,streams={given.max_concurrency}"]
    command += ["--constraint", f"kind=max_requests,count={given.num_prompts}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={given.output_len}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={given.tokenizer}"]
    run(command + ["--output", f"kind=json,path={folder / 'guidellm.json'}"])
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    names = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    return {own: metrics[name]["successful"]["median"] for own, name in names.items()}


def run(command: list[str]) -> None:
    """Run a client; raises ``SystemExit`` with the end of its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{command[:5]} failed: {(done.stdout + done.stderr)[-2000:]}")


def main() -> None:
    """Measure in turns, print, write; exits with 1 if a median of ours is off."""
    given = arguments().parse_args()
    if given.serve:
        in_loop(PacedServer(given.ttft, given.itl).serve(given.serve))
    clients = {"jaxinfer": ours}
    clients |= {"vllm": vllm} if given.python_vllm else {}
    clients |= {"guidellm": guidellm} if given.python_guidellm else {}
    rounds: list[dict[str, Any]] = []
    streams = in_loop(streamed())
    print(json.dumps(streams), flush=True)
    with paced(given.ttft, given.itl) as url:
        for number in range(given.rounds):
            row: dict[str, Any] = {"load": os.getloadavg()[0]}
            for name, client in clients.items():
                with tempfile.TemporaryDirectory() as folder:
                    found = client(given, url, Path(folder))
                with urllib.request.urlopen(f"{url}/measured") as answer:
                    row[name] = {"client": found, "server": json.load(answer)}
                print(number, name, json.dumps(row[name]), flush=True)
            rounds.append(row)
    differences = differences_of(rounds, list(clients))
    print(json.dumps(differences, indent=1))
    if given.output:
        numbers = {k: v for k, v in vars(given).items() if isinstance(v, int | float)}
        report = {**host_circumstances("bench", "jaxinfer"), "settings": numbers}
        report |= {"streams": streams, "differences": differences, "rounds": rounds}
        write_report(given.output, report)
    others = [one for name, one in differences.items() if name != "server"]
    if any(abs(value) > LIMIT for one in others for value in one.values()):
        raise SystemExit(1)


def differences_of(rounds: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float]]:
    """Our excess over the server's own clock and over each client, as shares of the medians over
    rounds.
    """

    def middle(name: str, side: str, figure: str) -> float:
        return median(row[name][side][figure] for row in rounds)

    own = {figure: middle("jaxinfer", "client", figure) for figure in ("ttft", "itl", "tpot")}
    found = {
        "server": {
            "ttft": own["ttft"] / middle("jaxinfer", "server", "ttft_ms") - 1,
            "itl": own["itl"] / middle("jaxinfer", "server", "itl_ms") - 1,
        }
    }
    for name in names[1:]:
        figures = rounds[0][name]["client"]
        found[name] = {one: own[one] / middle(name, "client", one) - 1 for one in figures}
    return found


if __name__ == "__main__":
    main()
