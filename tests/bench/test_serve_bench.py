"""The online benchmark: its client against a server on a real socket, its workload, its figures."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench import load
from jaxinfer.bench import serve
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.figures import samples, summarize, table
from jaxinfer.bench.gates import gate_of, verdict
from jaxinfer.bench.offer import Ended, NotReady, Outcome, in_loop, offer, wait_until_ready
from jaxinfer.bench.process_tree import tree_cpu, tree_memory
from jaxinfer.bench.records import PARTIAL, Record, Series, records_of
from jaxinfer.bench.requests import Load
from jaxinfer.bench.serve import Target, sweep_line
from jaxinfer.bench.server_process import CommandProcess, free_port
from jaxinfer.bench.workload import (
    Query,
    RandomLengths,
    arrivals,
    body_of,
    random_queries,
    read_queries,
)
from jaxinfer.core.errors import BenchError

from .stub_server import GAP, StubServer

ROUTE = "/v1/completions"


def with_stub[T](test: Callable[[StubServer, Client], Awaitable[T]]) -> T:
    """Run a coroutine with its own stub server."""

    async def main() -> T:
        async with StubServer() as stub:
            client = Client(stub.url)
            try:
                return await test(stub, client)
            finally:
                client.close()

    return asyncio.run(main())


def body(stub: str = "words", max_tokens: int = 3) -> bytes:
    return json.dumps({"prompt": [1, 2], "max_tokens": max_tokens, "stub": stub}).encode()


def test_a_stream_is_read_with_the_time_of_each_chunk() -> None:
    answer = with_stub(lambda _, client: client.post(ROUTE, body()))
    assert answer.error == ""
    assert "".join(answer.text) == "w0 w1 w2 "
    assert (answer.prompt_tokens, answer.output_tokens) == (2, 3)
    assert len(answer.gaps) == 2 and all(gap > GAP / 2 for gap in answer.gaps)
    assert 0 < answer.ttft < answer.latency


@pytest.mark.parametrize(
    ("deltas", "times"),
    [
        (({"role": "assistant", "content": ""}, {"content": "a"}, {"content": ""}), [1.0, 2.0]),
        (({"role": "assistant", "content": None}, {"reasoning_content": "a"}), [1.0]),
        (({"role": "assistant", "tool_calls": []}, {"tool_calls": [{"index": 0}]}), [1.0]),
        (
            ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}),
            [0.0, 1.0],
        ),
    ],
)
def test_a_role_alone_is_no_first_chunk(deltas: tuple[Any, ...], times: list[float]) -> None:
    """Some servers send it when they get the request, others with the first token."""
    answer = Answer(0.0)
    for number, delta in enumerate(deltas):
        answer.take(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode(), number)
    assert answer.times == times and not answer.error


def test_an_error_within_a_stream_is_its_own_text() -> None:
    answer = Answer(0.0)
    answer.take(b'{"error": {"message": "out of pages"}}', 1.0)
    assert answer.error == '{"message":"out of pages"}'


def test_an_error_of_null_is_none() -> None:
    answer = Answer(0.0)
    answer.take(b'{"choices": [{"text": "a"}], "error": null, "usage": null}', 1.0)
    assert answer.times == [1.0] and not answer.error


def test_a_stream_that_comes_byte_by_byte() -> None:
    answer = with_stub(lambda _, client: client.post(ROUTE, body("bytewise")))
    assert answer.error == ""
    assert answer.text == ["é\r\n\n"] and answer.output_tokens == 1


@pytest.mark.parametrize(
    ("stub", "error"),
    [
        ("refused", "HTTP 400: .*no such field"),
        ("fails_midway", "engine died"),
        ("not_done", r"without \[DONE\]"),
        ("cut", "connection ended before the answer"),
        ("not_http", "not HTTP/1.1"),
    ],
)
def test_an_invalid_response_is_an_error_of_that_request(stub: str, error: str) -> None:
    async def bad_then_good(_: StubServer, client: Client) -> list[Answer]:
        return [await client.post(ROUTE, body(stub)), await client.post(ROUTE, body())]

    bad, good = with_stub(bad_then_good)
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(bad.error)
    assert good.error == ""


def test_the_client_is_no_bottleneck() -> None:
    """20,000 tokens a second and core, by CPU time: other work of the machine adds none."""
    port = free_port()
    stub = [
        sys.executable,
        str(Path(__file__).with_name("stub_process.py")),
        str(port),
        "gap=0.003",
    ]

    async def stream() -> Outcome:
        client = Client(f"http://127.0.0.1:{port}")
        await wait_until_ready(client, ROUTE, body(max_tokens=1), 60)
        outcome = await offer(client, ROUTE, [body(max_tokens=200)] * 64, [0.0] * 64)
        client.close()
        return outcome

    with tempfile.TemporaryFile() as log, CommandProcess(stub, log):
        outcome = in_loop(stream())
    assert sum(answer.output_tokens for answer in outcome.answers) == 64 * 200
    assert outcome.cpu_us_per_chunk < 1e6 / 20_000


def test_no_server_listens() -> None:
    answer = asyncio.run(Client("http://127.0.0.1:9").post(ROUTE, body()))
    assert answer.error and not answer.times


def test_connections_are_kept_and_replaced_when_the_server_closed_them() -> None:
    async def ask(stub: StubServer, client: Client) -> tuple[int, int, list[str]]:
        kept = [await client.post(ROUTE, body()) for _ in range(3)]
        before = stub.connections
        closed = [await client.post(ROUTE, body("then_closes")) for _ in range(2)]
        return before, stub.connections, [answer.error for answer in kept + closed]

    assert with_stub(ask) == (1, 2, [""] * 5)


@pytest.mark.parametrize("limit", [1, 3, None])
def test_no_more_requests_are_open_than_allowed(limit: int | None) -> None:
    async def ask(stub: StubServer, client: Client) -> int:
        outcome = await offer(client, ROUTE, [body()] * 6, [0.0] * 6, limit)
        assert [answer.error for answer in outcome.answers] == [""] * 6
        assert outcome.cpu_us_per_chunk > 0
        return stub.most_open_requests

    assert with_stub(ask) == (limit or 6)


def test_a_run_that_is_ended_keeps_its_answers() -> None:
    """The second session has one of two answers; the third request was not sent yet."""
    sessions = (1, 1, 2, 2, 3)
    load = Load(
        [Query([1], 1, session=number) for number in sessions],
        [body(max_tokens=count) for count in (1, 1, 1, 5000, 1)],
        [0.0, 0.0, 0.0, 0.0, 60.0],
    )

    async def ended(_: StubServer, client: Client) -> tuple[Target, Series, list[Record]]:
        target = Target(client, "m", ROUTE, shows_progress=False)
        measuring = asyncio.create_task(target.measure(load, series := Series(name="one"), None))
        await asyncio.sleep(0.3)
        measuring.cancel()
        return target, series, await measuring

    target, series, records = with_stub(ended)
    assert [(one.turn, one.output_tokens, one.error) for one in records] == [(0, 1, ""), (1, 1, "")]
    assert (series.state, series.reason) == (PARTIAL, "the run was ended")
    with pytest.raises(Ended):
        target.check_ended()


def test_no_request_leaves_before_its_time() -> None:
    times = [0.0, 0.1, 0.15]

    async def ask(_: StubServer, client: Client) -> list[float]:
        begin = time.perf_counter()
        outcome = await offer(client, ROUTE, [body(max_tokens=1)] * 3, times)
        return [answer.start - begin for answer in outcome.answers]

    left = with_stub(ask)
    assert all(when <= at for when, at in zip(times, left, strict=True))
    # a busy machine is late by tenths of a second
    assert left == sorted(left) and left[-1] < 10 * times[-1]


def test_waiting_for_a_server_ends_at_once_when_it_refuses() -> None:
    def wait(stub: str) -> None:
        with_stub(lambda _, client: wait_until_ready(client, ROUTE, body(stub), 60))

    wait("words")
    with pytest.raises(NotReady, match="no such field"):
        wait("refused")


def test_random_prompts_have_their_length_and_do_not_depend_on_the_count() -> None:
    lengths = RandomLengths(input_len=20, output_len=8, prefix_len=4, range_ratio=0.5)
    vocab = list(range(100, 200))
    few, many = (random_queries(lengths, vocab, count, seed=7) for count in (3, 30))
    assert many[:3] == few
    sizes = {len(query.prompt) - 4 for query in many}
    assert min(sizes) >= 10 and max(sizes) <= 30 and len(sizes) > 5
    assert {query.max_tokens for query in many} <= set(range(4, 13))
    assert len({tuple(query.prompt[:4]) for query in many}) == 1
    assert all(100 <= token < 200 for query in many for token in query.prompt)  # type: ignore
    exact = random_queries(RandomLengths(input_len=20, output_len=8), vocab, 5, seed=7)
    assert {(len(query.prompt), query.max_tokens) for query in exact} == {(20, 8)}


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (100.0, 0.1)])
def test_arrivals_have_the_requested_rate_and_spread(burstiness: float, spread: float) -> None:
    times = arrivals(4000, rate=8, burstiness=burstiness, seed=0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times[-1] == pytest.approx(4000 / 8)
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(spread, rel=0.1)
    assert times == arrivals(4000, rate=8, burstiness=burstiness, seed=0)
    assert arrivals(3, math.inf, burstiness, seed=0) == [0.0] * 3


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('{"prompt": "a", "output_tokens": 5}\n{"prompt": "b"}\n', {("a", 5), ("b", 256)}),
        ('[{"conversations": [{"from": "human", "value": "hi"}]}, {}]', {("hi", 256)}),
    ],
    ids=["custom", "sharegpt"],
)
def test_datasets_of_files(tmp_path: Path, text: str, prompts: set[tuple[str, int]]) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    queries = read_queries(path, 4, None, seed=0)
    assert len(queries) == 4
    assert {(query.prompt, query.max_tokens) for query in queries} == prompts
    assert {query.max_tokens for query in read_queries(path, 4, 9, seed=0)} == {9}
    path.write_text("{}")
    with pytest.raises(BenchError, match="no row with 'prompt'"):
        read_queries(path, 1, None, seed=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": 5}', "row 2 .* neither text, token ids nor messages"),
        ('{"prompt": [1, "b"]}', "row 1 .* neither text"),
        ('{"prompt": [{"content": "a"}]}', "row 1 .* neither text"),
        ('[{"conversations": ["a"]}]', "row 1 .* no request"),
        ('[{"conversations": {"from": "human"}}]', "row 1 .* no request"),
        ('{"prompt": "a", "output_tokens": "x"}', "output_tokens is 'x'"),
        ('{"prompt": "a", "output_tokens": -1}', "output_tokens is -1"),
    ],
)
def test_rows_of_another_form_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read_queries(path, 2, None, seed=0)


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}', encoding="utf-8-sig")
    assert read_queries(path, 1, 3, seed=0)[0].prompt == "a"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"n": 2}', "n: a request has one answer"),
        ('{"best_of": 3}', "best_of: a request has one answer"),
        ('{"use_beam_search": true}', "use_beam_search: a request has one answer"),
        ('{"stream": false}', "stream is a field that the benchmark sets"),
    ],
)
def test_fields_that_records_cannot_have(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_serve("--extra-body", text)
    assert words in capsys.readouterr().err


def test_bodies_of_both_routes() -> None:
    query = random_queries(RandomLengths(input_len=2, output_len=3), [5], 1, seed=0)[0]
    asked = json.loads(body_of(query, ROUTE, "m", {"ignore_eos": True}))
    assert asked == {
        "model": "m",
        "prompt": [5, 5],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    with pytest.raises(BenchError, match="a chat takes text"):
        body_of(query, "/v1/chat/completions", "m", {})


def test_figures_are_vllms() -> None:
    answers = [
        Answer(10.0, times=[10.5, 11.5, 13.5], prompt_tokens=4, output_tokens=5, end=14.0),
        Answer(11.0, times=[11.25], prompt_tokens=6, output_tokens=1, end=11.25),
        Answer(10.0, times=[13.0], output_tokens=9, error="cut", end=13.0),
    ]
    one, two, failed = records_of(answers, 10.0)
    assert samples([one, two]) == {
        "ttft": [500.0, 250.0],
        "tpot": [750.0],  # (3.5 - 0.5) / 4, although there are only 3 chunks
        "itl": [1000.0, 2000.0],
        "e2el": [3500.0, 250.0],
        "client_queue_time": [0.0, 0.0],
        "e2el_including_client_queue": [3500.0, 250.0],
    }
    result = summarize([one, two, failed], goodput={"ttft": 300, "e2el": 1000})
    assert result["duration"] == 4.0
    assert (result["completed"], result["failed"], result["max_concurrent_requests"]) == (2, 1, 2)
    assert result["request_throughput"] == 0.5 and result["request_goodput"] == 0.25
    assert result["output_throughput"] == 1.5 and result["total_token_throughput"] == 4.0
    assert result["median_ttft_ms"] == 375 and result["p99_itl_ms"] == pytest.approx(1990)


def test_a_metric_without_a_sample_has_no_figures() -> None:
    """A limit on TPOT, or any limit after failures, must not hold for want of samples."""
    one = Answer(10.0, times=[10.5], prompt_tokens=4, output_tokens=1, end=10.5)
    failed = Answer(10.0, error="HTTP 500", end=10.1)
    found = summarize(records_of([one, failed], 10.0), percentiles=(99,))
    assert found["p99_ttft_ms"] == 500
    assert not [name for name in found if "tpot" in name or "itl" in name]
    found = summarize(records_of([failed], 10.0), percentiles=(99,))
    assert found["failed"] == 1 and not [name for name in found if name.endswith("_ms")]
    assert not verdict(gate_of("ttft_p99<200ms"), [found], ())["holds"]
    table(found, (99,))
    sweep_line("1", found)


def run_serve(*arguments: str) -> int:
    """Run the command against a stub; its exit code."""
    given = ["--vocab-size=50", "--random-input-len=6", "--random_output_len=2", *arguments]

    async def ask(stub: StubServer, _: Client) -> int:
        code = await asyncio.to_thread(serve.main, [f"--base-url={stub.url}", *given])
        assert all(len(each["prompt"]) == 6 for each in stub.bodies)
        return code

    return with_stub(ask)


def test_one_level_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [f"--result-dir={tmp_path}", "--result-filename=result.json", "--save-detailed"]
    where += ["--save-result", f"--output={tmp_path / 'run'}"]
    assert run_serve("--num-prompts=4", f"--server-pid={os.getpid()}", *where) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["model"]) == (4, 0, "stub")
    assert result["output_lens"] == [2] * 4 and result["errors"] == [""] * 4
    assert result["server_rss_mb"] > 10
    assert "Mean TTFT (ms)" in capsys.readouterr().out


def test_a_sweep_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [serve.level_size(rate) for rate in (1, 4, 32, math.inf)] == [15, 48, 384, 512]
    monkeypatch.setattr(serve, "level_size", lambda rate: 7)
    assert run_serve("--sweep=200,inf", f"--output={tmp_path / 'run'}") == 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert str(tmp_path) not in str(run["settings"])  # a path of one machine
    assert [series["rate"] for series in run["series"]] == [200, None]
    assert [row["completed"] for row in result["series"].values()] == [7, 7]
    assert all(row["p99_tpot_ms"] > 0 for row in result["series"].values())


def test_cpu_time_counts_the_children() -> None:
    before = tree_cpu(os.getpid())
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint('x', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = tree_cpu(os.getpid())
        child.communicate()
    assert after.tree - before.tree >= 0.28 > after.own - before.own


def test_memory_counts_the_children() -> None:
    alone = tree_memory(os.getpid())
    script = "data = bytearray(b'x') * 50_000_000; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = tree_memory(os.getpid())
        child.communicate()
    assert both.processes == alone.processes + 1
    assert both.rss - alone.rss > 50_000_000
    with pytest.raises(ProcessLookupError):
        tree_memory(child.pid)


def test_steady_load_keeps_its_streams_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MEMORY_PERIOD", 0.05)

    async def ask(stub: StubServer, _: Client) -> int:
        command = [f"--base-url={stub.url}", "--streams=5", "--seconds=1", "--warmup=0.2"]
        command += [f"--server-pid={os.getpid()}", f"--output={tmp_path / 'load.json'}"]
        await asyncio.to_thread(load.main, command)
        return stub.most_open_requests

    assert with_stub(ask) == 5
    result = json.loads((tmp_path / "load.json").read_text())
    assert result["errors"] == 0 and result["answers"] >= 5
    assert 1e3 * GAP <= result["gap_p50_ms"] < 3e3 * GAP
    assert result["rss_drift_percent"] == pytest.approx(0, abs=5)


def steady(**changes: Any) -> dict[str, Any]:
    """Figures of a good run, with changes."""
    good = {"errors": 0, "answers": 9, "gap_ratio": 2.0, "rss_drift_percent": 1.0}
    return {**good, **changes}


@pytest.mark.parametrize(
    ("summary", "broken"),
    [
        (steady(), []),
        (steady(errors=1), ["1 of 9 requests failed"]),
        (steady(gap_ratio=4.1), ["p99 gap / median is 4.1, above 4.0"]),
        (steady(rss_drift_percent=-6.0), ["memory moved by -6.0 %"]),
    ],
)
def test_bounds_of_a_steady_run(summary: dict[str, Any], broken: list[str]) -> None:
    assert load.broken_bounds(summary) == broken


def test_a_warm_up_is_not_growing_memory() -> None:
    run = load.Load(seconds=10.0, warmup=2.0)
    run.memory = [(float(second), 1000 + 10 * second, 0) for second in range(11)]
    run.take(Answer(0.0, times=[1.0, 1.9, 2.1, 2.2], output_tokens=4), start=0.0)
    summary = run.summary()
    assert summary["output_tokens"] == 4 and run.gaps == pytest.approx([0.2, 0.1])
    # medians of 2..6 s and of 6..10 s
    assert summary["rss_drift_percent"] == pytest.approx(100 * (1080 / 1040 - 1))
