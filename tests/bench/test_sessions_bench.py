"""Sessions and ramps: what is sent when, and what the report tells of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.bench import serve
from jaxinfer.bench.client import Client
from jaxinfer.bench.offer import Outcome, Turn, offer_sessions
from jaxinfer.bench.sessions import has_sessions, read_sessions, session_queries, session_times
from jaxinfer.bench.traces import read_trace
from jaxinfer.bench.workload import Ramp, ramped
from jaxinfer.core.errors import BenchError

from .stub_server import StubServer
from .test_serve_bench import with_stub

CHATS = [
    {"session_id": "a", "turns": [{"text": "hi"}, {"text": "more", "delay": 30}]},
    {"session_id": "b", "turns": [{"text": "yo"}]},
]
TRACE = [
    {"session_id": "a", "timestamp": 1000, "input_length": 600, "output_length": 2,
     "hash_ids": [1, 2]},
    {"session_id": "b", "timestamp": 1500, "input_length": 9, "output_length": 3},
    {"session_id": "a", "delay": 20, "input_length": 700, "output_length": 4, "hash_ids": [1, 2]},
]  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_serve(path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Measure a stub; the exit code, the bodies it got and the result."""
    where = ["--dataset-name=sessions", f"--dataset-path={path}", f"--output={path.parent / 'run'}"]

    async def ask(stub: StubServer, _: Client) -> tuple[int, list[dict[str, Any]]]:
        flags = [f"--base-url={stub.url}", *where, *arguments]
        code = await asyncio.to_thread(serve.main, flags)
        return code, stub.bodies

    code, bodies = with_stub(ask)
    return code, bodies, json.loads((path.parent / "run" / "result.json").read_text())


def test_a_turn_follows_the_answer_before_it(tmp_path: Path) -> None:
    path = written(tmp_path / "chats.jsonl", CHATS)
    flags = ("--endpoint=/v1/chat/completions", "--output-len=2")
    code, bodies, result = run_serve(path, *flags)
    assert code == 0
    said = [[(one["role"], one["content"]) for one in body["messages"]] for body in bodies[1:]]
    assert sorted(said, key=len) == [
        [("user", "hi")],
        [("user", "yo")],
        [("user", "hi"), ("assistant", "w0 w1 "), ("user", "more")],
    ]
    (figures,) = result["series"].values()
    assert figures["completed"] == 3 and figures["median_ttft_later_turns_ms"] > 0
    lines = (tmp_path / "run" / "records" / "serve.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record.get("turn", 0) for record in records] == [0, 1, 0]
    assert records[1]["start_ns"] >= records[0]["end_ns"] + 30e6


def test_sessions_of_a_trace_have_exact_prefixes_and_their_times(tmp_path: Path) -> None:
    sessions = read_sessions(written(tmp_path / "trace.jsonl", TRACE), 9)
    assert session_times(sessions, 2.0) == [0.0, 1.0]
    one, two, other = session_queries(sessions, range(99), 0, scale=0.5)
    assert (one.session, two.session, other.session, two.think) == (1, 1, 2, 0.01)
    assert isinstance(one.prompt, list) and len(one.prompt) == 600 and len(two.prompt) == 700
    assert two.prompt[:600] == one.prompt and two.max_tokens == 4
    _, bodies, _ = run_serve(tmp_path / "trace.jsonl", "--vocab-size=99", "--time-scale=.01")
    assert [len(body["prompt"]) for body in bodies[1:]] == [600, 9, 700]


def test_messages_of_a_file_are_sent_as_they_are(tmp_path: Path) -> None:
    turns = [
        {"session_id": "a", "messages": [{"role": "user", "content": "x"}], "output_length": 1},
        {"session_id": "a", "messages": [{"role": "user", "content": "y"}], "output_length": 1,
         "tools": [{"type": "function"}]},
    ]  # fmt: skip
    path = written(tmp_path / "agents.jsonl", turns)
    _, bodies, _ = run_serve(path, "--endpoint=/v1/chat/completions")
    assert [body["messages"] for body in bodies[1:]] == [turn["messages"] for turn in turns]
    assert bodies[2]["tools"] == turns[1]["tools"] and "tools" not in bodies[1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "hi", "output_length": 2}, "hi"),
        ({"timestamp": 5, "text_input": "hi"}, "hi"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "hi"),
        ({"timestamp": 5, "input_length": 3, "hash_ids": [1]}, None),
    ],
)
def test_rows_of_one_turn(tmp_path: Path, row: dict[str, Any], says: str | None) -> None:
    """AIPerf's and Mooncake's files have rows in which most keys are absent."""
    path = written(tmp_path / "rows.jsonl", [row])
    assert has_sessions(path) == (says is not None)
    if says is None:
        (one,) = read_trace(path)
        assert (one.input_len, one.output_len) == (3, 256)
        return
    (query,) = session_queries(read_sessions(path, 1), (), 0)
    assert query.messages == [{"role": "user", "content": says}]
    assert query.max_tokens == row.get("output_length", 256)


def test_after_a_failed_turn_no_other_is_sent() -> None:
    async def talk(stub: StubServer, client: Client) -> Outcome:
        bodies = [json.dumps({"prompt": [1], "max_tokens": 1, "stub": stub}).encode()
                  for stub in ("refused", "words")]  # fmt: skip
        outcome = await offer_sessions(client, "/v1/completions", [list(map(Turn, bodies))], [0.0])
        assert len(stub.bodies) == 1
        return outcome

    first, second = with_stub(talk).answers
    assert "no such field" in first.error and "the turn before failed" in second.error


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 1"),
        ('{"session_id": "a"}', "input_length"),
        ('{"session_id": "a", "turns": [{"text": 3}]}', "text is no string"),
        ('{"session_id": "a", "messages": [{}]}', "has no role"),
        ('{"text": "a", "delay": -1}', "delay is below 0"),
        ('{"session_id": "a", "turns": []}', "it has no turns"),
        ('{"text": "a", "timestamp": "noon"}', "line 1"),
        ('{"text": "a", "output_length": -4}', "output_length is below 0"),
        ("", "has no sessions"),
    ],
)
def test_files_that_are_no_sessions_are_refused(tmp_path: Path, row: str, says: str) -> None:
    (tmp_path / "x.jsonl").write_text(row)
    with pytest.raises(BenchError, match=says):
        read_sessions(tmp_path / "x.jsonl", 5)


@pytest.mark.parametrize(("exponential", "middle"), [(False, 5.5), (True, 10**0.5)])
def test_a_ramp_goes_from_rate_to_rate(exponential: bool, middle: float) -> None:
    ramp = Ramp(1.0, 10.0, exponential)
    rates = ramp.rates(201)
    assert rates[[0, 100, 200]] == pytest.approx([1.0, middle, 10.0])
    times = ramped(201, ramp, 100.0, seed=0)  # at this burstiness gaps are nearly equal
    assert np.diff(times) == pytest.approx(1 / rates[1:], rel=0.5)


def test_half_of_a_ramp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="a ramp needs all"):
        serve.main(["--ramp-up-strategy=linear", "--vocab-size=9", f"--output={tmp_path / 'run'}"])
