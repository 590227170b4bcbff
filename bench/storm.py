"""Many requests of all kinds at once: no request may end another one.

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``:

    .venv/bin/python -m bench.storm [--streams 200] [--requests 5000] [--alone 200] -- MODEL

First the scene of a bug report: so many streams decode, and requests of 1,000 prompt tokens arrive
that ask for logprobs, penalties, prompt logprobs and so on, one kind after the other. Then random
requests with every sampling field, as many at once as the server takes; some clients leave. Then
some of those requests again, one at a time. Exits with 1 unless all are answered, nothing is
compiled late, no page is in use afterwards, and requests that are sent alone get the tokens that
they had, up to near ties. In bfloat16 rounding may reverse tokens that the check does not recognise
as near ties; with ``--dtype float32`` and JAX_DEFAULT_MATMUL_PRECISION=highest all are the same.

``tests/server/test_storm.py`` sends the same requests to a simulated device, and
``tests/e2e/test_storm.py`` to SmolLM2 on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.server_process import ServerProcess

STREAM_TOKENS = 400
AT_ONCE = 512
SECONDS_UNTIL_STREAMS_DECODE = 2.0
SECONDS_TO_END = 10
SHARE_THAT_LEAVES = 0.1  # of the clients, at some time in the first second
SHARE_IN_COMMON = 0.3  # of the prompts: these share their beginnings
COMPLETIONS = "/v1/completions"
# Difference of two logits that another batch may reverse. A logit of a bfloat16 model moves by some
# 0.03 (bench/results/h100/accuracy.json), so the difference of two, in two runs, by 0.06, and the
# largest of many by more: of 76 answers that differed on an H100, 26 were beyond 0.05, and of 42
# none beyond 0.2. A wrong page or slot moves logits by 1 and more.
NEAR_TIE = 0.2

type Body = dict[str, Any]
type Tokens = dict[int, list[int]]  # by choice

ARRIVALS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"9": 5}},
    "min_tokens": {"min_tokens": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "all": {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.1, "n": 3, "min_tokens": 2},
}


@dataclass
class Met:
    """The results of a storm: how requests ended, and those whose repetition must match."""

    ended: Counter[str] = field(default_factory=Counter[str])
    repeatable: list[tuple[Body, Tokens]] = field(default_factory=list[tuple[Body, Tokens]])


async def sent(client: Client, body: Body) -> Answer:
    """One request, answered to its end."""
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
    bodies = [stream_of(ids, STREAM_TOKENS) for _ in range(streams)]
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


async def storm(
    url: str, bodies: Iterable[Body], ids: random.Random, at_once: int = AT_ONCE
) -> Met:
    """Send requests, so many open at any time; some clients leave before their answer ends."""
    client, met, left_to_send = Client(url), Met(), iter(bodies)

    async def worker() -> None:
        for body in left_to_send:
            patience = ids.random() if ids.random() < SHARE_THAT_LEAVES else None
            try:
                answer = await asyncio.wait_for(sent(client, body), patience)
            except TimeoutError:
                met.ended["left"] += 1
                continue
            met.ended[told(answer)] += 1
            if "seed" in body or body.get("temperature") == 0:
                met.repeatable.append((body, answer.token_ids))

    await asyncio.gather(*(worker() for _ in range(at_once)))
    client.close()
    return met


async def alone(
    url: str, requests: Sequence[tuple[Body, Tokens]], near_tie: float = NEAR_TIE
) -> Counter[str]:
    """Send requests again, one at a time: how many get the same tokens, how many others after a
    near tie, and how many differ.
    """
    client, found = Client(url), Counter[str]()
    for body, together in requests:
        answer = await sent(client, body)
        if told(answer) != "answered":
            found[told(answer)] += 1
        elif answer.token_ids == together:
            found["same"] += 1
        else:
            tied = await _is_near_tie(client, body, together, answer.token_ids, near_tie)
            found["near ties" if tied else "different"] += 1
    client.close()
    return found


async def _is_near_tie(
    client: Client, body: Body, together: Tokens, by_itself: Tokens, near_tie: float
) -> bool:
    """True if every choice that differs has its former token again when the logits of the two
    tokens at the first difference are moved towards each other, by up to ``near_tie`` in all.

    The bias holds at every position, so a small one, which changes no other token, comes first.
    """
    for choice in together.keys() | by_itself.keys():
        one, other = together.get(choice, []), by_itself.get(choice, [])
        if one == other:
            continue
        pairs = enumerate(zip(one, other, strict=False))
        at = next((i for i, (first, second) in pairs if first != second), None)
        if at is None:
            print(f"different ends of choice {choice}: {len(one)}, {len(other)} {_fields(body)}")
            return False
        moved = near_tie / 16
        while not await _is_moved_back(client, body, choice, one, (at, other[at]), moved):
            moved *= 2
            if moved > near_tie:
                print(
                    f"different at {at} of choice {choice}: {one[at]}, {other[at]} {_fields(body)}"
                )
                return False
    return True


def _fields(body: Body) -> Body:
    """The fields of a request, and the length of its prompt."""
    return {**body, "prompt": len(body["prompt"])}


async def _is_moved_back(
    client: Client,
    body: Body,
    choice: int,
    expected: Sequence[int],
    other: tuple[int, int],  # the first position that differs, and the other token there
    moved: float,
) -> bool:
    """True if the answer is as expected up to this position, with the two logits moved together."""
    at, token = other
    bias = dict(body.get("logit_bias", {}))
    for changed, more in ((expected[at], moved / 2), (token, -moved / 2)):
        bias[str(changed)] = bias.get(str(changed), 0.0) + more
    answer = await sent(client, {**body, "logit_bias": bias})
    return answer.token_ids.get(choice, [])[: at + 1] == list(expected[: at + 1])


def prompt(ids: random.Random, length: int) -> list[int]:
    """Random token ids."""
    return [ids.randrange(100, 40_000) for _ in range(length)]


def prompt_in_common(ids: random.Random, length: int) -> list[int]:
    """The beginning that many prompts share, and a random last token."""
    return [100 + 7 * i * i % 39_900 for i in range(length - 1)] + prompt(ids, 1)


def stream_of(ids: random.Random, num_tokens: int) -> Body:
    """A request that soon decodes, for so many tokens."""
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return {"prompt": prompt(ids, 16), **fields}


def any_body(ids: random.Random, *, masks: bool = False) -> Body:
    """A request with a random choice of sampling fields, whose answer lists its token ids.

    ``masks``: also fields that restrict what is drawn, which a simulated device does not obey.
    """
    most = ids.choice((1, 2, 8, 33, 64, 300))
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
        "logprob_token_ids": [ids.randrange(250)],
        "prompt_logprobs": ids.choice((0, 3)),
        "seed": ids.randrange(2**63),
        "stop": ids.choice(("e", "1", ["qu", "!!"])),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": [ids.randrange(40_000)],
        "ignore_eos": ids.random() < 0.5,
        "n": ids.choice((1, 1, 2, 4)),
        "stream": ids.random() < 0.5,
        "priority": ids.randrange(3),
        "cache_salt": ids.choice("ab"),
    }
    if masks:
        choices |= {
            "allowed_token_ids": ids.sample(range(40_000), 50),
            "bad_words": ["the", "a b"],
            "structured_outputs": ids.choice(
                ({"choice": ["yes", "no"]}, {"regex": "[a-z ]{1,40}"})
            ),
        }
    chosen = {name: value for name, value in choices.items() if ids.random() < 0.3}
    if "structured_outputs" in chosen:  # its tokens may not be among those allowed
        chosen.pop("allowed_token_ids", None)
    if "logprobs" not in chosen:
        chosen.pop("logprob_token_ids", None)
    if "prompt_logprobs" in chosen:  # a stream cannot have them
        chosen.pop("stream", None)
    if chosen.get("temperature") == 0:
        chosen.pop("n", None)
    length = ids.choice((1, 17, 100, 400, 1500, 3000))
    new_prompt = prompt_in_common if ids.random() < SHARE_IN_COMMON else prompt
    return {
        "prompt": new_prompt(ids, length),
        "max_tokens": most,
        "return_token_ids": True,
        **chosen,
    }


async def left_over(url: str) -> dict[str, float]:
    """Late compiles, and what is in use when the engine has had time to end what clients left, by
    the server's own statistics.
    """
    client, stats, left = Client(url), dict[str, Any](), dict[str, float]()
    for _ in range(SECONDS_TO_END * 10):
        stats = json.loads((await client.get("/stats")).body)
        left = {name: stats["requests"][name] for name in ("active", "running", "waiting")}
        left |= {"live_pages": stats["pages"]["live"]}
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    client.close()
    return {"late_compiles": stats["late_compiles"], **left}


def main() -> int:
    """Start a server, run both parts, print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--alone", type=int, default=200)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="+", help="model and flags of jaxinfer serve, after --")
    given = parser.parse_args()
    ids = random.Random(0)
    bodies = [any_body(ids, masks=True) for _ in range(given.requests)]
    with ServerProcess(*given.serve) as server:
        ended = asyncio.run(scene(server.url, given.streams, ids))
        met = asyncio.run(storm(server.url, bodies, ids))
        again = ids.sample(met.repeatable, min(given.alone, len(met.repeatable)))
        repeated = asyncio.run(alone(server.url, again))
        left = asyncio.run(left_over(server.url))
    report = {
        **host_circumstances("jaxinfer", "pallas_kernels"),
        "scene": ended,
        "storm": met.ended,
        "alone": repeated,
        "left": left,
    }
    print(json.dumps(report, indent=1))
    if given.output:
        write_report(given.output, report)
    good = (
        set(ended) == {"answered"}
        and set(met.ended) <= {"answered", "left"}
        and set(repeated) <= {"same", "near ties"}
    )
    return int(not good or any(left.values()))


if __name__ == "__main__":
    raise SystemExit(main())
