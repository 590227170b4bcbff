"""Answers that a benchmark must not misread: forms of streams, answers without text, without counts
or without end. Each case was reported of another benchmark's client.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench import compare, serve
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.figures import samples, summarize
from jaxinfer.bench.offer import NotReady, in_loop, offer, wait_until_ready
from jaxinfer.bench.records import Record, Run, Series, records_of
from jaxinfer.bench.requests import Load
from jaxinfer.bench.results import results_of
from jaxinfer.bench.serve import Target
from jaxinfer.bench.workload import Query
from jaxinfer.core.errors import BenchError

from .stub_server import StubServer
from .test_serve_bench import ROUTE, body, with_stub

USAGE = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


def text(word: str, **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": word, **more}]})


def sent(stub: str, **more: Any) -> Answer:
    """The answer of the stub's behaviour to a request with these fields."""
    asked = {"prompt": [1, 2], "max_tokens": 2, "stub": stub, **more}
    return with_stub(lambda _, client: client.post(ROUTE, json.dumps(asked).encode()))


STREAMS = {
    "lines that end in CRLF": f"data: {text('a')}\r\n\r\n: ping\r\n\r\n"
    f"data: {text('b')}\r\n\r\ndata: {USAGE}\r\n\r\ndata: [DONE]\r\n\r\n",
    "a comment right before the data": f": ping\ndata: {text('a')}\n\n"
    f"data: {text('b')}\n\n: ping\ndata: {USAGE}\n\ndata: [DONE]\n\n",
    "names and ids of events": f"id: 1\nevent: message\ndata: {text('a')}\n\n"
    f"data: {text('b')}\nid: 2\n\ndata: {USAGE}\n\ndata: [DONE]\n\n",
    "data of several lines": 'data: {"choices": [{"index": 0,\ndata: "text": "a"}]}\n\n'
    f"data:{text('b')}\n\ndata:{USAGE}\n\ndata:[DONE]\n\n",
    "no empty line at the end": f"data: {text('a')}\n\ndata: {text('b')}\n\ndata: {USAGE}\n",
    "counts in every chunk, choices of null": f"data: {text('a')}\n\ndata: "
    '{"choices": [{"index": 0, "text": "b"}], "usage": {"prompt_tokens": 3}}\n\n'
    'data: {"choices": null, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_streams_of_other_forms(stream: str) -> None:
    answer = sent("verbatim", sends=stream)
    assert (answer.text, answer.error) == (["a", "b"], "")
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.times)) == (3, 2, 2)


def test_a_stream_may_end_with_its_reason_alone() -> None:
    answer = sent("verbatim", sends=f"data: {text('a', finish_reason='length')}\n\n")
    assert (answer.error, len(answer.times)) == ("", 1)
    cut = sent("verbatim", sends=f"data: {text('a')}\n\ndata: {text('b')[:-9]}")
    assert "unreadable chunk" in cut.error


@pytest.mark.parametrize(
    ("stub", "more", "error"),
    [
        ("verbatim", {"sends": 'event: error\ndata: {"message": "overloaded"}\n\n'}, "overloaded"),
        ("page", {}, "of text/html, which is neither JSON nor a stream of events"),
    ],
)
def test_an_error_has_its_reason(stub: str, more: dict[str, Any], error: str) -> None:
    assert error in sent(stub, **more).error


def test_an_answer_without_text_has_failed() -> None:
    (record,) = records_of([sent("nothing")], 0.0)
    assert record.error == "the answer has no text"
    with pytest.raises(NotReady, match="the answer has no text"):
        with_stub(lambda _, client: wait_until_ready(client, ROUTE, body("nothing"), 60))


def taken(*deltas: dict[str, Any]) -> Answer:
    """A chat whose chunks come at 1, 2, ... s."""
    answer = Answer(0.0)
    for now, delta in enumerate(deltas, 1):
        reason = delta.pop("finish_reason", None)
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        answer.take(json.dumps({"choices": [choice]}).encode(), float(now))
    answer.end, answer.output_tokens = 9.0, 2
    return answer


def test_a_role_with_an_empty_reason_is_no_first_chunk() -> None:
    """Some servers send ``"finish_reason": ""`` with every chunk."""
    head = {"role": "assistant", "content": "", "finish_reason": ""}
    assert taken(head, {"content": "a", "finish_reason": ""}).times == [2.0]


def test_a_chunk_that_only_ends_an_answer_is_no_gap_between_tokens() -> None:
    """Chats end with one right after the last token: as a gap it would be one of 0."""
    head, end = {"role": "assistant", "content": ""}, {"finish_reason": "stop"}
    answer = taken(head, {"content": "a"}, {"content": "b"}, {**end})
    (record,) = records_of([answer], 0.0)
    found = samples([record])
    assert found["itl"] == [1000.0] and found["e2el"] == [4000.0] and found["tpot"] == [2000.0]
    # it is the only sign of an answer whose first token ends it
    assert taken({"role": "assistant"}, {**end}).times == [2.0]
    listed = Answer(0.0)
    listed.take(text("a").encode(), 1.0)
    listed.take(text("", token_ids=[2], finish_reason="stop").encode(), 2.0)
    assert listed.times == [1.0, 2.0]


def test_a_server_that_never_answers_has_its_time_and_no_more() -> None:
    async def late(_: StubServer, client: Client) -> Answer:
        began = time.monotonic()
        answer = await client.post(ROUTE, body("silent"), 0.2)
        assert time.monotonic() - began < 5
        return answer

    assert with_stub(late).error == "the server did not answer in 0.2 s"
    with pytest.raises(NotReady, match="did not answer in 0.5 s"):
        with_stub(lambda _, client: wait_until_ready(client, ROUTE, body("silent"), 0.1))


def test_a_deadline_of_requests_ends_a_run(tmp_path: Path) -> None:
    async def ask(stub: StubServer, _: Client) -> int:
        words = [f"--base-url={stub.url}", "--vocab-size=50", "--random-input-len=2"]
        words += ['--extra-body={"stub": "silent"}', "--num-prompts=2", "--request-timeout-sec=0.2"]
        words += ["--ready-check-timeout-sec=0", f"--output={tmp_path / 'run'}"]
        return await asyncio.to_thread(serve.main, words)

    assert with_stub(ask) == 1  # no request succeeded
    lines = (tmp_path / "run" / "records" / "serve.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all("did not answer in 0.2 s" in line for line in lines)


class Hung(asyncio.Protocol):
    """Takes connections, and says nothing."""


def test_a_port_behind_which_nothing_answers_is_not_waited_for(tmp_path: Path) -> None:
    """Neither for its list of models nor by a comparison."""

    async def ask() -> int:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(Hung, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            words = ["--vocab-size=50", "--num-prompts=1", "--ready-check-timeout-sec=0.1"]
            says = "does not list its models .the server did not answer"
            with pytest.raises(BenchError, match=says):
                await asyncio.to_thread(serve.main, [f"--base-url={url}", *words])
            where = [f"--output={tmp_path / 'run'}", "--rounds=1", "--backends=vllm"]
            return await asyncio.to_thread(compare.main, [f"--url-vllm={url}", *words, *where])

    assert asyncio.run(ask()) == 1
    (series,) = json.loads((tmp_path / "run" / "run.json").read_text())["series"]
    assert series["state"] == "missing" and "was not ready in 0.1 s" in series["reason"]


def test_tokens_that_no_server_counted_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not 0 tokens a second, and no ratio of two engines."""

    async def ask(stub: StubServer, _: Client) -> int:
        words = [f"--base-url={stub.url}", "--vocab-size=50", "--random-input-len=2"]
        words += ['--extra-body={"stub": "uncounted"}', "--num-prompts=3", "--random-output-len=4"]
        words += ["--gate=output_throughput>0", f"--output={tmp_path / 'run'}"]
        return await asyncio.to_thread(serve.main, words)

    assert with_stub(ask) == 1
    shown = capsys.readouterr().out
    assert "3 answers came without the server's counts of tokens" in shown
    assert "the run has no output_throughput" in shown and "Output token throughput" not in shown
    figures = json.loads((tmp_path / "run" / "result.json").read_text())["series"]["serve"]
    assert figures["uncounted"] == 3
    assert not {"total_output_tokens", "output_throughput"} & {*figures}
    assert figures["client_input_tokens"] == 6  # which were sent as ids
    run = Run(command="compare", created="now", settings={})
    run.series = [Series(name="a", backend="jaxinfer"), Series(name="b", backend="vllm")]
    records = {name: [Record(gaps_ns=[5, 5], end_ns=10)] for name in ("a", "b")}
    (found,) = results_of(run, records)["ratios"].values()
    assert "2 answers have no counts of tokens" in found["reason"] and not found["figures"]


def test_tokens_are_counted_by_both_sides() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    answer = Answer(0.0, end=3.0)
    answer.take(text("a", token_ids=[1]).encode(), 1.0)
    answer.take(text("bc", token_ids=[2, 3]).encode(), 2.0)
    answer.take(json.dumps({"choices": [], "usage": usage}).encode(), 3.0)
    found = summarize(records_of([answer], 0.0, sent=[6]))
    assert (found["total_input_tokens"], found["client_input_tokens"]) == (7, 6)
    assert (found["total_output_tokens"], found["client_output_tokens"]) == (3, 3)
    assert (found["cached_input_tokens"], found["tokens_per_chunk"]) == (4, 1.5)
    # a sum over some of the requests would be no count of the client's
    other = records_of([answer, answer], 0.0, sent=[6, None])
    assert "client_input_tokens" not in summarize(other)


def test_time_in_the_clients_queue_is_a_figure_of_its_own() -> None:
    async def ask(_: StubServer, client: Client) -> list[Record]:
        outcome = await offer(client, ROUTE, [body()] * 3, [0.0] * 3, 1)
        return records_of(outcome.answers, outcome.start)

    records = with_stub(ask)
    queued = [record.queued_ns / 1e6 for record in records]
    assert queued[0] < queued[1] < queued[2] and queued[2] > 2 * 2 * 10  # two answers of 3 words
    found = summarize(records, metrics=("e2el", "client_queue_time", "e2el_including_client_queue"))
    both = found["mean_e2el_ms"] + found["mean_client_queue_time_ms"]
    assert found["mean_e2el_including_client_queue_ms"] == pytest.approx(both)


def test_after_failures_no_connection_is_kept() -> None:
    """Too many of them may be what failed, and the records need files too."""

    async def ask(stub: StubServer, client: Client) -> tuple[int, int]:
        load = Load([Query([1], 1)] * 5, [body("refused")] * 5, [0.0] * 5)
        target = Target(client, "m", ROUTE, shows_progress=False)
        await target.measure(load, Series(name="one"), None)
        before = stub.connections
        await asyncio.gather(*(client.post(ROUTE, body()) for _ in range(5)))
        return before, stub.connections

    # one more was opened to ask whether the server lives, and is used again
    assert with_stub(ask) == (6, 10)


def test_as_many_files_are_open_as_the_system_allows() -> None:
    async def limit() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        assert in_loop(limit()) > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
