"""Two hosts on one machine beside one process: tokens and times.

``python -m bench.hosts MODEL OUTPUT``: a folder with a config.json, whose weights are random. Each
host has one GPU of two (on a CPU a device). OUTPUT gets a JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS, PROMPT_TOKENS, TOKENS = 8, 256, 128
MEASURE = "measure"  # the first argument of a process of this module


def settings(hosts: int, rank: int, port: int) -> dict[str, Any]:
    """The engine's settings in one of the processes."""
    given: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "max_model_len": 1024,
        "max_num_seqs": ROWS,
        "num_pages": 1 + ROWS * 1024 // 16,
    }
    if hosts > 1:
        given |= {"num_hosts": hosts, "host_rank": rank, "coordinator": f"127.0.0.1:{port}"}
    return given


def measure(model: str, hosts: int, rank: int, port: int) -> None:
    """One process; that of rank 0 prints its times and tokens."""
    from jaxinfer import LLM, SamplingParams
    from jaxinfer.engine.api.vllm_args import engine_config
    from jaxinfer.engine.start.follow import follow

    if rank:
        follow(engine_config(model, settings(hosts, rank, port)))
        return
    llm = LLM(model, **settings(hosts, rank, port))
    found: dict[str, Any] = {}
    for rows in (1, ROWS):
        prompts = [
            {"prompt_token_ids": [(7 * i + row) % 1000 + 3 for i in range(PROMPT_TOKENS)]}
            for row in range(rows)
        ]
        for tokens in (1, TOKENS):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            found[f"seconds of {tokens} tokens of {rows}"] = time.perf_counter() - start
            found[f"tokens of {rows}"] = [list(one.outputs[0].token_ids) for one in outputs]
    print(f"\n{MEASURE} {json.dumps(found)}", flush=True)


def run(model: str, hosts: int) -> dict[str, Any]:
    """The figures of an engine of so many processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started: list[subprocess.Popen[str]] = []
    for rank in range(hosts):
        own = {"CUDA_VISIBLE_DEVICES": str(rank), "JAX_NUM_CPU_DEVICES": "1"}
        environment = os.environ | (own if hosts > 1 else {"JAX_NUM_CPU_DEVICES": "2"})
        command = [sys.executable, "-m", "bench.hosts", MEASURE, model]
        command += map(str, (hosts, rank, port))
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, text=True, env=environment))
    out, codes = started[0].communicate()[0], [one.wait() for one in started]
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")
    line = next(line for line in out.splitlines() if line.startswith(MEASURE))
    return json.loads(line.removeprefix(MEASURE))


def main() -> None:
    """Compare, and write the figures."""
    model, output = sys.argv[1:]
    one, two = run(model, 1), run(model, 2)
    equal = {name: one.pop(name) == two.pop(name) for name in list(one) if name[0] == "t"}
    found = {"one process": one, "two hosts": two, "tokens are equal": equal}
    Path(output).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == MEASURE:
        measure(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
