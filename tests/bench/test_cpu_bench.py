"""The CPU benchmark's pure parts: statistics, tables, the peer protocol with a fake peer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cpu import __main__ as cpu_bench
from bench.cpu.report import (
    OURS,
    overhead_rows,
    overhead_table,
    throughput_rows,
    throughput_table,
)
from bench.engine_overhead import decode_plan
from bench.peer_process import PeerProcess, PeerUnavailable, Run
from bench.throughput import Measured, agreement, measure
from jaxinfer.bench.numbers import paired_ratio, rotated, spread
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.buckets import bucket_table

FAKE = Path(__file__).parent / "fake_peer.py"


class Scripted:
    """An engine that takes a given time per token and records when it ran."""

    def __init__(self, name: str, ms: float, log: list[str]) -> None:
        self.name, self.ms, self.log = name, ms, log

    def run(self, prompts: list[list[int]], max_tokens: int) -> Run:
        self.log.append(self.name)
        return Run(self.ms * 1e-3 * max_tokens, [p[:1] * max_tokens for p in prompts])


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    with PeerProcess(sys.executable, FAKE) as peer:
        yield peer


def test_a_peer_answers_command_after_command(peer: PeerProcess) -> None:
    assert peer.versions == {"fake": "1.0"}
    for length in (1, 3):
        run = peer.run([[7, 8], [9]], length)
        assert run.token_ids == [[7] * length, [9] * length]
        assert 0 <= run.seconds < 5


def test_a_failed_command_is_named(peer: PeerProcess) -> None:
    with pytest.raises(PeerUnavailable, match="failed: ValueError: too long"):
        peer.run([[1]], 101)
    assert peer.run([[1]], 1).token_ids == [[1]]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param("missing", r"not installed \(No module named 'fake'\)", id="missing"),
        pytest.param("broken", "failed: ValueError: the file is broken", id="broken"),
        pytest.param("dead", "ended with status 1: no more memory", id="dead"),
    ],
)
def test_a_peer_that_does_not_start_reports_the_reason(how: str, message: str) -> None:
    with pytest.raises(PeerUnavailable, match=message):
        PeerProcess(sys.executable, FAKE, how)


def test_an_absent_interpreter_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="not installed"):
        PeerProcess(str(tmp_path / "python"), FAKE)


def test_the_comparison_outlives_a_failure_of_the_overhead_and_peers_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no overhead")

    ours: Any = Scripted(OURS, 10, [])
    ours.llm = SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=lambda text: list(text.encode()))
    )
    monkeypatch.setattr(cpu_bench, "Ours", lambda gguf: ours)
    monkeypatch.setattr(cpu_bench, "measure_overhead", fails)
    path, absent = tmp_path / "cpu.json", str(tmp_path / "python")
    words = [f"--{name}-python={absent}" for name in ("transformers", "llama-cpp", "vllm")]
    for more in ([], ["--vllm-model=folder"]):
        words += [f"--output={path}", "--model=model.gguf", "--repeats=1", *more]
        monkeypatch.setattr(sys, "argv", ["cpu", *words])
        with pytest.raises(RuntimeError, match="no overhead"):
            cpu_bench.main()
        report = json.loads(path.read_text())
        assert {row["peer"] for row in report["rows"]} == {OURS}
        assert "vLLM" in capsys.readouterr().out
        reason = f"not installed.*{absent}" if more else "has no model; give --vllm-model"
        assert re.search(reason, report["unavailable"]["vLLM"])


def test_engines_run_in_turns() -> None:
    log: list[str] = []
    engines = {name: Scripted(name, 1, log).run for name in "ab"}
    measure(engines, [[1], [2]], batches=(1, 2), num_tokens=4, repeats=2)
    assert "".join(log) == "abab" + "aabbaabb" + "bbaabbaa"
    assert [rotated("abc", n) for n in (0, 1, 3)] == [list("abc"), list("bca"), list("abc")]


def test_a_wrong_number_of_tokens_is_refused() -> None:
    class Short(Scripted):
        def run(self, prompts: list[list[int]], max_tokens: int) -> Run:
            return super().run(prompts, max_tokens - 1)

    with pytest.raises(ValueError, match=r"a was asked for 1 x 4 tokens and gave \[3\]"):
        measure({"a": Short("a", 1, []).run}, [[1]], batches=(1,), num_tokens=4, repeats=1)


def test_statistics() -> None:
    measured = Measured(4, 64, first=[0.1, 0.2], full=[0.73, 1.46], token_ids=[[1], [2], [3], [4]])
    assert measured.tokens_per_second() == pytest.approx([350.68, 175.34], rel=1e-4)
    assert measured.ms_per_token() == pytest.approx([10, 20])
    peer = Measured(4, 64, token_ids=[[1], [2], [9], [4]])
    assert agreement(measured, peer) == 3
    assert paired_ratio([10, 30, 50], [10, 20, 20]) == 1.5
    assert spread([9, 10, 13]) == pytest.approx(0.2)


def test_the_tables_come_from_the_rows() -> None:
    log: list[str] = []
    engines = {OURS: Scripted(OURS, 10, log).run, "transformers": Scripted("t", 20, log).run}
    results = measure(engines, [[1], [2]], batches=(1, 2), num_tokens=64, repeats=3)
    rows = throughput_rows(results)
    missing = {"llama.cpp": "not installed (no module)"}
    lines = throughput_table(rows, ("transformers", "llama.cpp"), (1, 2), missing)
    assert lines[1].split() == ["jaxinfer", "1", "100.0", "100.0", "0.0%", "10.00", "10.0"]
    numbers = ["2", "100.0", "100.0", "0.0%", "20.00", "20.0", "2.00", "2.00", "2/2"]
    assert lines[4].split() == ["transformers", *numbers]
    assert lines[5].split(maxsplit=1) == ["llama.cpp", "not installed (no module)"]


def test_the_overhead_is_that_of_the_pairs() -> None:
    samples = {("bare", 4): [10.0, 20.0, 40.0], ("engine", 4): [11.0, 21.0, 42.0]}
    rows = overhead_rows(samples, {4: {"schedule": 0.125, "wait": 9.0}})
    head, line = overhead_table(rows, (4,))
    assert head.split()[-3:] == ["over", "schedule", "wait"]
    assert line.split() == ["4", "20.00", "21.00", "5.0%", "0.125", "9.000"]


def test_a_bare_step_owns_pages_of_its_own() -> None:
    limits = Limits(
        num_pages=(64,),
        page_size=16,
        max_num_seqs=8,
        max_model_len=256,
        max_num_batched_tokens=64,
        buckets=bucket_table(
            8, 64, decode_start=1, prefill_start=64, prefill_factor=8, mixed_start=16
        ),
    )
    plan = decode_plan(limits, 3, 65)
    pages = [row.pages[0].ids.array().tolist() for row in plan.decodes]
    assert pages == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    assert all(row.num_computed_tokens == 64 for row in plan.decodes)
    assert plan.bucket.holds(Bucket(3))
