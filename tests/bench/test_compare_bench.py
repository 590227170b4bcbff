"""Comparisons of stub servers in processes of their own: rounds, ratios, failures, resuming."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.bench import compare, verify
from jaxinfer.bench.backends import BACKENDS
from jaxinfer.bench.client import Client
from jaxinfer.bench.folder import Folder
from jaxinfer.bench.main import run as run_command
from jaxinfer.bench.offer import NotReady
from jaxinfer.bench.records import Run
from jaxinfer.cli.main import cli
from jaxinfer.core.config import cache_root
from jaxinfer.core.errors import BenchError
from tests.bench.stub_server import StubServer

STUB = f"{sys.executable} {Path(__file__).with_name('stub_process.py')} {{port}}"
LOAD = ("--num-prompts=3", "--random-input-len=5", "--random-output-len=3", "--vocab-size=50")


def command(path: Path, peers: dict[str, str], *more: str) -> list[str]:
    """A comparison of stubs with options by backend."""
    commands = [f"--command-{name}={STUB} {options}" for name, options in peers.items()]
    backends = ",".join(dict.fromkeys([*peers, *(["sglang"] if "sglang" in more else [])]))
    own = [word for word in more if word != "sglang"]
    return [f"--backends={backends}", "--model=m", *commands, *LOAD, f"--output={path}", *own]


def pids(path: Path) -> list[int]:
    """The processes that all servers of a run had."""
    words = [log.read_text().split("pids ")[1].split()[:2] for log in path.glob("*.log")]
    return [int(pid) for pair in words for pid in pair]


def alive(pid: int) -> bool:
    """Whether a process runs; one whose parent has not waited for it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def result(path: Path, name: str = "result.json") -> dict[str, Any]:
    return json.loads((path / name).read_text())


def test_a_comparison_with_a_missing_and_a_dying_peer(tmp_path: Path) -> None:
    path = tmp_path / "run"
    peers = {"jaxinfer": "", "vllm": "gap=0.06", "llamacpp": "dies_after=3"}
    words = command(path, peers, "sglang", "--python-sglang=/nowhere/python", "--prompts=ids")
    words += ["--rounds=1", "--gate=tpot_p50<=1.0*vllm", "--temperature=0"]
    assert compare.main(words) == 1  # partial
    run, found = result(path, "run.json"), result(path)
    states = {one["name"]: (one["state"], one["reason"]) for one in run["series"]}
    assert states["jaxinfer-0"] == states["vllm-0"] == ("complete", "")
    assert states["sglang-0"][0] == "missing" and "/nowhere/python" in states["sglang-0"][1]
    assert states["llamacpp-0"][0] == "partial"
    assert "ended with status 3: " in states["llamacpp-0"][1]
    assert "no more memory" in states["llamacpp-0"][1]
    ratio = found["ratios"]["vllm"]["figures"]["p50_tpot_ms"]
    assert 0.1 < ratio["median"] < 0.9 and ratio["interval"] is None
    assert found["ratios"]["llamacpp"]["figures"] == found["ratios"]["sglang"]["figures"] == {}
    assert found["gates"][0]["holds"]
    # the answers before its end are kept
    assert len((path / "records" / "llamacpp-0.jsonl").read_text().splitlines()) == 3
    # of a command no package is asked for its version, but its server is
    engines = result(path, "environment.json")["engines"]
    assert engines["jaxinfer"] == engines["vllm"] == "0" and "sglang" not in engines
    workloads = {one["workload"] for one in run["series"] if one["state"] == "complete"}
    assert len(workloads) == 1  # the same prompts and times
    assert verify.main([str(path)]) == 0
    assert len(pids(path)) == 6 and not any(map(alive, pids(path)))


@pytest.mark.parametrize(
    "route, version",
    [(BACKENDS["vllm"].version_route, "0"), (BACKENDS["sglang"].version_route, "0.5"), ("/no", "")],
)
def test_a_server_that_runs_is_asked_for_its_version(route: str, version: str) -> None:
    async def ask() -> str:
        async with StubServer() as server:
            with closing(Client(server.url)) as client:
                return await compare.version_of(client, route)

    assert asyncio.run(ask()) == version


def test_counts_of_a_second_answer_are_of_the_same_answer(tmp_path: Path) -> None:
    """Or there are none: llama.cpp's streams have no counts, and drawn answers differ."""
    words = ["--backends=llamacpp", "--url-llamacpp=http://127.0.0.1:9", "--model=m", *LOAD]
    given = compare.parser().parse_args([*words, "--prompts=ids"])
    (peer,) = compare.peers_of(given)
    run = Run(command="compare", created="now", settings={})
    comparison = compare.Comparison(given, [peer], Folder.create(tmp_path / "run", run))
    queries, times = comparison._queries(0, 0)
    with pytest.raises(NotReady, match="without --temperature 0 the second answer would be"):
        comparison._load(peer, "m", queries, times)
    given.temperature = 0.0
    assert len(comparison._load(peer, "m", queries, times).bodies) == 3


def test_rounds_alternate_and_differ_and_a_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    words = command(path, {"jaxinfer": "", "vllm": ""}, "--rounds=2")
    assert compare.main(words) == 0
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:4]]
    assert lines == ["jaxinfer-0", "vllm-0", "vllm-1", "jaxinfer-1"]
    series = {one["name"]: one for one in result(path, "run.json")["series"]}
    assert series["jaxinfer-0"]["workload"] != series["jaxinfer-1"]["workload"]
    assert series["jaxinfer-1"]["workload"] == series["vllm-1"]["workload"]
    run = result(path, "run.json")
    run["series"][2]["state"] = "partial"
    (path / "run.json").write_text(json.dumps(run))
    assert compare.main([*words, "--resume"]) == 0
    assert capsys.readouterr().out.startswith("vllm-1: complete")  # and no other
    assert len(result(path, "run.json")["series"]) == 4
    assert verify.main([str(path)]) == 0


def test_several_rates_of_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "level_size", lambda rate: 3)
    path = tmp_path / "run"
    peers = {"jaxinfer": "", "vllm": "dies_after=4"}  # in the second level
    words = command(path, peers, "--rounds=1", "--sweep=100,200,inf", "--gate=tpot_p50<=9*vllm")
    assert compare.main(words) == 1
    run, found = result(path, "run.json"), result(path)
    states = {one["name"]: one["state"] for one in run["series"]}
    assert states["vllm-0-rate-100"] == "complete" and states["vllm-0-rate-200"] == "partial"
    assert states["vllm-0-rate-inf"] == "missing" and states["jaxinfer-0-rate-inf"] == "complete"
    first, second, third = found["ratios"].values()
    assert first["figures"] and not second["figures"] and not third["figures"]
    assert (first["rate"], third["rate"]) == (100, None)
    assert not found["gates"][0]["holds"]  # which is of every rate
    assert len(list(path.glob("*.log"))) == 2


def test_no_ratio_of_engines_that_send_other_counts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = command(path, {"jaxinfer": "", "vllm": "more_tokens"}, "--rounds=1")
    assert compare.main(words) == 0
    ratio = result(path)["ratios"]["vllm"]
    assert ratio["figures"] == {} and "output tokens of 3 of 3 requests differ" in ratio["reason"]


def test_a_server_that_never_answers_is_missing(tmp_path: Path) -> None:
    words = ["--backends=vllm", "--url-vllm=http://127.0.0.1:9", *LOAD, "--rounds=2"]
    words += [f"--output={tmp_path / 'run'}", "--ready-check-timeout-sec=0.2"]
    assert compare.main(words) == 1
    for series in result(tmp_path / "run", "run.json")["series"]:
        assert series["state"] == "missing" and "was not ready in 0.2 s" in series["reason"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--backends=vlm"], "'vlm' is no backend; choose among jaxinfer"),
        (["--backends=vllm"], "vllm has no model; give --model or --model-vllm"),
        (
            ["--backends=llamacpp", "--model-llamacpp=m"],
            "take no token ids, so prompts are decoded",
        ),
    ],
)
def test_wrong_comparisons_are_refused(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=says):
        compare.main([*words, *LOAD, f"--output={tmp_path / 'run'}"])


def test_a_terminated_comparison_leaves_no_server(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = command(path, {"jaxinfer": "gap=30"}, "--rounds=1")
    script = "from jaxinfer.cli.main import main; main()"
    with subprocess.Popen([sys.executable, "-c", script, "bench", "compare", *words]) as process:
        deadline = time.monotonic() + 30
        log = path / "jaxinfer-0.log"
        while not (log.exists() and "pids" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    assert not any(map(alive, pids(path)))
    assert result(path, "run.json")["state"] == "partial"
    assert os.path.exists(path / "report.md")


def test_a_second_signal_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends two: to the process and to its group."""
    written: list[bool] = []

    def command(arguments: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            written.append(True)
        return 1

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(compare, "main", command)
    assert run_command(["compare"], lambda words: {}) == 1 and written
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.nightly
def test_servers_of_other_projects(tmp_path: Path) -> None:
    """SmolLM2 in jaxinfer, and in transformers and llama.cpp where the environment names their
    interpreters: JAXINFER_TEST_TRANSFORMERS, JAXINFER_TEST_LLAMACPP.
    """
    pythons = {
        name: python
        for name in ("transformers", "llamacpp")
        if (python := os.environ.get(f"JAXINFER_TEST_{name.upper()}"))
    }
    if not pythons:
        pytest.skip("no interpreter of another engine is named")
    model, folder, path = "smollm2-135m-instruct", tmp_path / "model", tmp_path / "run"
    exported = CliRunner().invoke(cli, ["export", model, str(folder), "--weights"])
    assert exported.exit_code == 0, exported.output
    gguf = next((cache_root() / "downloads").glob("**/SmolLM2-135M-Instruct.Q4_1.gguf/*.gguf"))
    words = [f"--backends={','.join(['jaxinfer', *pythons])}", f"--tokenizer={model}"]
    words += [f"--python-{name}={python}" for name, python in pythons.items()]
    words += [f"--model-jaxinfer={model}", f"--model-transformers={folder}", "--temperature=0"]
    words += [f"--model-llamacpp={gguf}", "--max-concurrency=1", "--num-prompts=3"]
    words += ["--random-input-len=16", "--random-output-len=4", "--rounds=1", f"--output={path}"]
    assert compare.main(words) == 0, (path / "report.md").read_text()
    assert all(one["figures"] or one["reason"] for one in result(path)["ratios"].values())
    assert verify.main([str(path)]) == 0
    records = path / "records" / "jaxinfer-0.jsonl"
    records.write_text(records.read_text().replace("1", "2", 1))
    assert verify.main([str(path)]) == 1
