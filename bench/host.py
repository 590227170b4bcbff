"""Compares an engine loop on a thread of the server's process with one in a process of its own.

Run from the repository root:

    .venv/bin/python -m bench.host [--repeats N] [--output FILE]

The device is simulated (``kit.sim_executor``): a step takes a given time and uses no core. The
server is the real one: it streams every sequence to a client, and five times a second a request
asks it to tokenise a text of 100,000 characters. Every run is a process of its own, and the clients
are one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.step.file import run_child
from jaxinfer.bench.circumstances import host_circumstances, write_report

# the simulated device is part of the tests
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.process import EngineProcess
from jaxinfer.engine.link.spawn import spawn
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.http.run import Server, bound_sockets, uvicorn_config
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.routes.app import create_app
from jaxinfer.server.service.service import Service
from jaxinfer.text.tokenizer import load_tokenizer
from kit.sim_executor import (
    SIM_PROGRAM,
    SimExecutor,
    SimStep,
    read_trace,
    sim_config,
    sim_facts,
    sim_limits,
)
from kit.tokenizers import real_spec

PLACES = ("thread", "process")
STEPS_MS = (5.0, 13.0)
NUM_SEQS = (64, 256, 512)
SECONDS = 4.0  # of simulated steps
GATHER_SECONDS = 0.006  # for each request to arrive, before the first step ends
PROMPT_TOKENS = 32
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 2222  # 100,000 characters
LONG_TEXT_EVERY = 0.2  # seconds
# reads all connections at long intervals, so that it takes little of the cores itself
CLIENTS = """
import http.client, json, selectors, socket, sys, threading, time
port, num_seqs, body, long_body, every = json.loads(sys.argv[1])
head = "POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
head += "Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
open_streams, long_ms = threading.Event(), []
def ask_long():
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while not open_streams.wait(every):
        start = time.monotonic()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/tokenize", long_body, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        long_ms.append(1e3 * (time.monotonic() - start))
selector, buffer, tails = selectors.DefaultSelector(), bytearray(1 << 20), {}
for number in range(num_seqs):
    stream = socket.create_connection(("127.0.0.1", port))
    stream.sendall((head + body).encode())
    selector.register(stream, selectors.EVENT_READ, number)
asking = threading.Thread(target=ask_long)
asking.start()
while selector.get_map():
    time.sleep(0.05)
    for key, _ in selector.select():
        if count := key.fileobj.recv_into(buffer):
            tails[key.data] = bytes(buffer[max(count - 30, 0) : count])
        else:
            selector.unregister(key.fileobj)
assert all(b"[DONE]" in tail for tail in tails.values()), tails
open_streams.set()
asking.join()
print(json.dumps(long_ms))
"""


def measure(place: str, num_seqs: int, step_ms: float) -> dict[str, Any]:
    """One run in this process; the engine's thread is here or in another process."""
    num_tokens = round(1e3 * SECONDS / step_ms)
    executor = SimExecutor(step_ms / 1e3, first_seconds=GATHER_SECONDS * num_seqs)
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace.json"
        tokenizer = load_tokenizer(real_spec("smollm2"))
        limits, facts = sim_limits(num_seqs), sim_facts(tokenizer)
        if place == "process":
            config = sim_config(num_seqs, executor, str(trace_file))
            link = EngineProcess(config, spawn(SIM_PROGRAM))
            link.ready()
        else:
            link = EngineThread(Engine(executor, limits, facts, tokenizer))
        config = ServerConfig(host="127.0.0.1", port=0)
        service = Service(config, EventLog())
        server = Server(uvicorn_config(config, create_app(service)))

        async def main() -> tuple[list[float], float, float]:
            metrics = Metrics(facts.name, limits)
            client = EngineClient(link, metrics.observe)
            service.attach(client, metrics)
            with bound_sockets(config) as sockets:
                serving = asyncio.create_task(server.serve(sockets))
                own_cpu = time.process_time()
                long_ms = await asyncio.to_thread(
                    ask, sockets[0].getsockname()[1], num_seqs, num_tokens
                )
                own_cpu = time.process_time() - own_cpu
                end = time.monotonic()
                server.should_exit = True
                await serving
            await client.shutdown()
            return long_ms, own_cpu, end

        long_ms, own_cpu, end = asyncio.run(main(), loop_factory=server.config.get_loop_factory())
        trace = read_trace(trace_file) if place == "process" else executor.trace
    return summary(place, num_seqs, step_ms, trace, end, own_cpu, long_ms)


def ask(port: int, num_seqs: int, num_tokens: int) -> list[float]:
    """Run the clients in a process; returns the ms that each long text took."""
    body = {
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    long_body = {"prompt": LONG_TEXT}
    work = (port, num_seqs, json.dumps(body), json.dumps(long_body), LONG_TEXT_EVERY)
    command = [sys.executable, "-c", CLIENTS, json.dumps(work)]
    return json.loads(subprocess.check_output(command, text=True))


def summary(
    place: str,
    num_seqs: int,
    step_ms: float,
    trace: list[SimStep],
    end: float,
    own_cpu: float,
    long_text_ms: list[float],
) -> dict[str, Any]:
    """Figures of the steps in which every sequence decodes, without the first tenth.

    Times are ms. CPU is of the whole run after the first step: of the engine's thread, of the
    engine's process if it has one, and of the rest of the server's process (front).
    """
    full = [step for step in trace if step.num_rows == num_seqs]
    full = full[len(full) // 10 :]
    first, last = full[0], full[-1]
    intervals = [1e3 * (b.collected - a.collected) for a, b in zip(full, full[1:], strict=False)]
    seconds, tokens = last.done - first.done, num_seqs * (len(full) - 1)
    num_tokens = num_seqs * round(1e3 * SECONDS / step_ms)
    engine_cpu = last.engine_cpu - first.engine_cpu
    process_cpu = last.process_cpu - first.process_cpu
    in_process = place == "process"
    return {
        "place": place,
        "num_seqs": num_seqs,
        "step_ms": step_ms,
        "tokens_per_s": tokens / seconds,
        "ideal_tokens_per_s": 1e3 * num_seqs / step_ms,
        "interval_p50_ms": statistics.median(intervals),
        "interval_p99_ms": statistics.quantiles(intervals, n=100)[98],
        # until the server had sent the last token
        "client_tokens_per_s": num_tokens / (end - trace[0].done),
        "engine_us_per_token": 1e6 * engine_cpu / tokens,
        "engine_process_us_per_token": 1e6 * process_cpu / tokens if in_process else None,
        "front_us_per_token": 1e6
        * (own_cpu / num_tokens - (0 if in_process else engine_cpu / tokens)),
        "long_text_ms": statistics.median(long_text_ms),
        "load_1min": os.getloadavg()[0],
    }


def run_in_process(place: str, num_seqs: int, step_ms: float) -> dict[str, Any]:
    """``measure`` in a new process."""
    return run_child("bench.host", "--one", place, str(num_seqs), str(step_ms))


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number, and the samples of the numbers that vary most."""
    row = {
        name: statistics.median(run[name] for run in runs) if isinstance(value, float) else value
        for name, value in runs[0].items()
    }
    samples = ("tokens_per_s", "interval_p50_ms", "interval_p99_ms", "load_1min")
    return row | {"samples": {name: [run[name] for run in runs] for name in samples}}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/host.json"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        place, num_seqs, step_ms = arguments.one
        print(json.dumps(measure(place, int(num_seqs), float(step_ms))))
        return
    cases = [(n, ms) for ms in STEPS_MS for n in NUM_SEQS]
    runs: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        for num_seqs, step_ms in cases:
            for place in PLACES:
                run = run_in_process(place, num_seqs, step_ms)
                runs.setdefault((place, num_seqs, step_ms), []).append(run)
                print(
                    f"{place:8}{num_seqs:4} x {step_ms:4} ms {run['tokens_per_s']:9.0f} tok/s of "
                    f"{run['ideal_tokens_per_s']:6.0f}; interval p50 {run['interval_p50_ms']:.1f} "
                    f"p99 {run['interval_p99_ms']:.1f} ms; CPU us/token engine "
                    f"{run['engine_us_per_token']:.1f} front {run['front_us_per_token']:.1f}; "
                    f"load {run['load_1min']:.1f}",
                    flush=True,
                )
    report = {**host_circumstances(), "rows": [medians(some) for some in runs.values()]}
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
