"""Engines of two hosts, each ``python -m kit.hosts RANK DEVICES FOLDER FAMILY ROWS PORT``.

Host 0 prints its answers as a line of JSON, and host 1 follows it. ``DEVICES`` are those of a host,
``ROWS`` the sequences that run at once.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.parallel import GREEDY, PROMPTS, SIZES, config_of, logprobs_of, tokens_of, written

SECONDS = 100.0  # for all of two processes
LINE = "answers: "


def settings_of(folder: Path, rows: int, rank: int = 0) -> dict[str, Any]:
    """Sizes with a pool in which three sequences of 49 tokens do not fit; a cache of each host."""
    sizes = {"num_pages": 11, "max_model_len": 64, "max_num_seqs": rows}
    return {**SIZES, **sizes, "cache_dir": str(folder / f"cache{rank}")}


def answers(folder: Path, name: str, rows: int, **settings: Any) -> dict[str, Any]:
    """Tokens of requests of all kinds, with prefix hits and preemption, and logprobs."""
    from jaxinfer import LLM, SamplingParams

    path = written(folder / name, config_of(name))
    llm = LLM(str(path), **settings_of(folder, rows), **settings)
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    found: dict[str, Any] = {}

    def add(key: str, prompts: Any, sampling: Any) -> list[Any]:
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling)
        found[key] = tokens_of(outputs)
        return outputs

    add("greedy", PROMPTS, GREEDY)
    found["cached"] = [one.num_cached_tokens for one in add("again", PROMPTS, GREEDY)]
    if rows > 1:
        add("long", [[7 + i] * 9 for i in range(3)], SamplingParams(temperature=0, max_tokens=40))
    drawn = SamplingParams(temperature=1.0, seed=3, top_k=50, **common)
    extras: dict[str, Any] = {"presence_penalty": 0.5, "logit_bias": {7: 2.0}, "logprobs": 2}
    masked = SamplingParams(temperature=0, allowed_token_ids=[3, 5, 9], **common)
    changed = SamplingParams(temperature=1.0, seed=4, prompt_logprobs=1, **extras, **common)
    outputs = add("extras", PROMPTS, [drawn, masked, changed])
    found["logprobs"] = logprobs_of(outputs[2])
    found["preemptions"] = llm.stats().num_preemptions
    if llm.config.num_hosts > 1:
        refused: list[Callable[[], Any]] = [
            lambda: llm.update_weights(str(path)),
            lambda: llm.sleep(),
            lambda: llm.model,
        ]
        found["refused"] = [_message(call) for call in refused]
        add("after", PROMPTS, GREEDY)
    return found


def _message(call: Callable[[], Any]) -> str:
    from jaxinfer.core.errors import EngineError

    try:
        call()
    except EngineError as error:
        return str(error)
    raise AssertionError("not refused")


def free_ports() -> int:
    """A port that is free, as the next one is."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except (OSError, OverflowError):
                continue


def environment(devices: int) -> dict[str, str]:
    """The environment of a host."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def two(commands: list[list[str]], devices: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes, host 0 first; they are killed at the end."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = environment(devices)
    started = [
        subprocess.Popen(one, stdin=subprocess.DEVNULL, env=own, **pipes) for one in commands
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def answers_of_two(folder: Path, name: str, rows: int, devices: int) -> dict[str, Any]:
    """The answers of an engine on two hosts with so many devices each."""
    port = free_ports()
    base = [sys.executable, "-m", "kit.hosts"]
    given = [str(devices), str(folder), name, str(rows), str(port)]
    with two([[*base, rank, *given] for rank in ("0", "1")], devices) as (first, second):
        out, error = first.communicate(timeout=SECONDS)
        _, other = second.communicate(timeout=SECONDS)
        assert (first.returncode, second.returncode) == (0, 0), error + other
    return json.loads(next(line for line in out.splitlines() if LINE in line).partition(LINE)[2])


def main() -> None:
    """One host."""
    rank, devices, place, name, rows, port = sys.argv[1:]
    folder = Path(place)
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2 * int(devices),
        "num_hosts": 2,
        "host_rank": int(rank),
        "coordinator": f"127.0.0.1:{port}",
    }
    if rank == "0":
        print(LINE + json.dumps(answers(folder, name, int(rows), **settings)), flush=True)
        return
    from jaxinfer.engine.api.vllm_args import engine_config
    from jaxinfer.engine.start.follow import follow

    own = settings_of(folder, int(rows), int(rank))
    follow(engine_config(str(folder / name), own | settings))


if __name__ == "__main__":
    main()
