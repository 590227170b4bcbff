"""Many requests of all kinds at once: no request may end another one.

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``:

    .venv/bin/python -m bench.storm [--streams 200] [--requests 5000] [--output FILE] -- MODEL

First the situation of a bug report: ``--streams`` streams decode, and requests with 1,000 prompt
tokens and logprobs, penalties, prompt logprobs and so on arrive, one kind after the other. Then
random requests with every sampling field, ``AT_ONCE`` open at any time. Exits with 1 unless all are
answered, nothing is compiled late, and no page is in use at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from bench.circumstances import host_circumstances
from bench.serve.client import Answer, Client
from bench.server_process import ServerProcess

STREAM_TOKENS = 400
AT_ONCE = 512
SECONDS_UNTIL_STREAMS_DECODE = 2.0
COMPLETIONS = "/v1/completions"

ARRIVALS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"9": 5}},
    "min_tokens": {"min_tokens": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "all": {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.1, "n": 3, "min_tokens": 2},
}


async def sent(client: Client, body: dict[str, Any]) -> Answer:
    """One request, read to its end."""
    return await client.post(COMPLETIONS, json.dumps(body).encode())


def told(answer: Answer) -> str:
    """The result of a request, in words."""
    return (
        "answered"
        if answer.status == 200 and not answer.error
        else f"{answer.status} {answer.error}"
    )


async def scene(url: str, streams: int, ids: random.Random) -> Counter[str]:
    """Streams decode while each kind of request arrives."""
    client = Client(url)
    bodies = [
        {"prompt": prompt(ids, 16), "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        for _ in range(streams)
    ]
    decoding = [asyncio.create_task(sent(client, body)) for body in bodies]
    await asyncio.sleep(SECONDS_UNTIL_STREAMS_DECODE)
    arriving = [
        asyncio.create_task(
            sent(client, {"prompt": prompt(ids, 1000), "max_tokens": 8, "ignore_eos": True, **asks})
        )
        for asks in ARRIVALS.values()
    ]
    ended = Counter([told(answer) for answer in await asyncio.gather(*decoding, *arriving)])
    client.close()
    return ended


async def storm(url: str, requests: int, ids: random.Random) -> Counter[str]:
    """Random requests, ``AT_ONCE`` open at any time."""
    client, ended, bodies = Client(url), Counter[str](), [any_body(ids) for _ in range(requests)]

    async def worker() -> None:
        while bodies:
            ended[told(await sent(client, bodies.pop()))] += 1

    await asyncio.gather(*(worker() for _ in range(min(AT_ONCE, requests))))
    client.close()
    return ended


def prompt(ids: random.Random, length: int) -> list[int]:
    """Random token ids."""
    return [ids.randrange(100, 40_000) for _ in range(length)]


def any_body(ids: random.Random) -> dict[str, Any]:
    """A request with a random choice of sampling fields."""
    most = ids.choice((1, 2, 8, 33, 64))
    choices: dict[str, Any] = {
        "temperature": ids.choice((0, 0.3, 1.0, 2.0)),
        "top_p": ids.choice((0.1, 0.9, 1.0)),
        "top_k": ids.choice((-1, 1, 5, 50)),
        "min_p": ids.choice((0.0, 0.1)),
        "presence_penalty": ids.choice((-1.0, 0.5)),
        "frequency_penalty": ids.choice((-0.5, 1.0)),
        "repetition_penalty": ids.choice((0.9, 1.2)),
        "logit_bias": {str(ids.randrange(40_000)): ids.uniform(-100, 100) for _ in range(3)},
        "min_tokens": ids.randrange(most + 1),
        "logprobs": ids.choice((0, 1, 5)),
        "prompt_logprobs": ids.choice((0, 3)),
        "seed": ids.randrange(2**63),
        "stop_token_ids": [ids.randrange(40_000)],
        "ignore_eos": ids.random() < 0.5,
        "n": ids.choice((1, 1, 2, 4)),
        "stream": ids.random() < 0.5,
        "priority": ids.randrange(3),
    }
    chosen = {name: value for name, value in choices.items() if ids.random() < 0.3}
    if "prompt_logprobs" in chosen:  # a stream cannot have them
        chosen.pop("stream", None)
    if chosen.get("temperature") == 0:
        chosen.pop("n", None)
    length = ids.choice((1, 17, 100, 400, 1500, 3000))
    return {"prompt": prompt(ids, length), "max_tokens": most, **chosen}


async def left_over(url: str) -> dict[str, float]:
    """Late compiles and pages in use, from the server's own statistics."""
    client = Client(url)
    stats = json.loads((await client.get("/stats")).body)
    client.close()
    return {"late_compiles": stats["late_compiles"], "live_pages": stats["pages"]["live"]}


def main() -> int:
    """Start a server, run both parts, print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="+", help="model and flags of jaxinfer serve, after --")
    given = parser.parse_args()
    ids = random.Random(0)
    with ServerProcess(*given.serve) as server:
        met = {
            "scene": asyncio.run(scene(server.url, given.streams, ids)),
            "storm": asyncio.run(storm(server.url, given.requests, ids)),
        }
        left = asyncio.run(left_over(server.url))
    report = {**host_circumstances("jaxinfer", "pallas_kernels"), **met, "left": left}
    print(json.dumps(report, indent=1))
    if given.output:
        given.output.write_text(json.dumps(report, indent=1) + "\n")
    answered = all(set(ended) == {"answered"} for ended in met.values())
    return int(not answered or any(left.values()))


if __name__ == "__main__":
    raise SystemExit(main())
