"""Published ratios next to ours, and the server with known delays that clients are compared on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import nightly
from bench.clients import PacedServer, differences_of
from bench.published import BEGIN, END, PUBLISHED, lines_of, redraw
from jaxinfer.bench.client import Client
from jaxinfer.bench.server_process import free_port
from jaxinfer.core.errors import BenchError
from kit.documents import check_command


def group(figure: str, *points: tuple[str, str, float | None]) -> dict[str, Any]:
    """A published row whose points all have the ratio 1.5."""
    rows = [
        {"point": point, "run": run, "rate": rate, "times_as_fast": 1.5}
        for point, run, rate in points
    ]
    return {"source": "an engine", "workload": "a load", "figure": figure, "points": rows}


def write(folder: Path, **result: Any) -> None:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))


def ratio(rate: float | None, **medians: float) -> dict[str, Any]:
    figures = {name: {"median": one, "interval": [one, 2 * one]} for name, one in medians.items()}
    return {"peer": "vllm", "rate": rate, "reason": "", "figures": figures}


def test_our_ratios_stand_next_to_published_ones(tmp_path: Path) -> None:
    two = {"at 4": ratio(4, p50_ttft_ms=0.5), "at 8": ratio(8, p50_ttft_ms=2.0)}
    write(tmp_path / "qps-low", ratios=two)
    sglang = ratio(None, output_throughput=1.25) | {"peer": "sglang"}
    write(
        tmp_path / "offline", ratios={"vllm": ratio(None, output_throughput=0.8), "sglang": sglang}
    )
    write(tmp_path / "tiers", tiers=[{"length": 256, "cold_over_host": 3.0}])
    lines = lines_of(
        tmp_path,
        [
            group("p50_ttft_ms", ("4", "qps", 4), ("8", "qps", 8), ("16", "qps", 16)),
            group("output_throughput", ("", "offline", None)),
            group("cold_over_host", ("256", "tiers", 256), ("512", "tiers", 512)),
        ],
    )
    assert lines[:5] == [
        "Below 1 here:",
        "",
        "- offline: output_throughput, next to vLLM: 0.80 (0.80 to 1.60)",
        "- qps-low, 8 requests a second: p50_ttft_ms, next to vLLM: 0.50 (0.25 to 0.50)",
        "",
    ]
    assert [" | ".join(line.split(" | ")[-2:]) for line in lines[7:10]] == [
        "2.00 / 0.50 / – | – / – / – |",
        "0.80 | 1.25 |",
        "3.00 / – | – / – |",
    ]


def test_the_published_ratios_are_read(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, json.loads(PUBLISHED.read_text()))
    assert "Below" not in lines[0] and len(lines) == 3 + len(json.loads(PUBLISHED.read_text()))


def test_a_paced_server_notes_its_own_times() -> None:
    port = free_port()

    async def ask() -> tuple[list[float], dict[str, float]]:
        server = asyncio.create_task(PacedServer().serve(port))
        client = Client(f"http://127.0.0.1:{port}")
        while (await client.get("/v1/models")).status != 200:
            await asyncio.sleep(0.02)
        body = {"model": "paced", "prompt": [1, 2], "max_tokens": 4, "stream": True}
        answer = await client.post("/v1/completions", json.dumps(body).encode())
        measured = json.loads((await client.get("/measured")).body)
        client.close()
        server.cancel()
        assert (answer.error, answer.prompt_tokens, answer.output_tokens) == ("", 2, 4)
        return [1e3 * answer.ttft, *(1e3 * gap for gap in answer.gaps)], measured

    seen, measured = asyncio.run(ask())
    assert 199 < measured["ttft_ms"] <= seen[0] and len(seen) == 4
    assert 0 < measured["itl_ms"] < 1000


def test_differences_are_of_medians_over_rounds() -> None:
    def row(ours: float, other: float) -> dict[str, Any]:
        server = {"ttft_ms": 100.0, "itl_ms": 10.0}
        figures = {"ttft": ours, "itl": 10.0, "tpot": 10.0}
        return {
            "jaxinfer": {"client": figures, "server": server},
            "guidellm": {"client": {"ttft": other, "tpot": 10.0}, "server": server},
        }

    found = differences_of([row(101, 100), row(102, 100), row(150, 100)], ["jaxinfer", "guidellm"])
    assert found["server"] == pytest.approx({"ttft": 0.02, "itl": 0.0})
    assert found["guidellm"] == pytest.approx({"ttft": 0.02, "tpot": 0.0})


@pytest.mark.parametrize("sglang", [None, "sglang/python"])
def test_every_published_run_is_one_of_the_night(sglang: str | None) -> None:
    """And each command of a night is one that the benchmark accepts."""
    published = json.loads(PUBLISHED.read_text())
    asked = {point["run"] for group in published for point in group["points"]}
    given = SimpleNamespace(
        models={}, python_vllm="python", python_sglang=sglang, folder=Path("night")
    )
    made = {}
    for name, model, words in nightly.runs(Path("trace.csv")):
        made[name] = nightly.command_of(given, name, model, words)  # type: ignore[arg-type]
    assert asked == made.keys()
    for command in made.values():
        check_command(["jaxinfer", *command[3:]])


def test_a_night_keeps_complete_runs_and_redraws_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1 if "--random-input-len=256" in command else 0)

    monkeypatch.setattr(nightly.subprocess, "run", run)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found = {"p50_ttft_ms": {"median": 0.5, "interval": None}}
    rows = {"vllm": {"peer": "vllm", "rate": None, "reason": "", "figures": found}}
    write(tmp_path / "zedinfer-qwen3-8b-128", ratios=rows, state="complete")
    write(tmp_path / "zedinfer-qwen3-8b-256", ratios={}, state="partial")
    words = [str(tmp_path), "--only=zedinfer-qwen3", f"--page={page}", "--models=qwen3-8b=here"]
    assert nightly.main(words) == 1
    lengths = [next(one for one in command if "input-len" in one) for command in commands]
    assert lengths == [
        "--random-input-len=256",
        "--random-input-len=512",
        "--random-input-len=1024",
    ]
    assert all("--model=here" in command for command in commands)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 8B, one stream, 128 out, by prompt tokens: TTFT p50 |" in text and "2.00" in text
    again = page.read_text()
    assert nightly.main([*words, "--only=none"]) == 0 and page.read_text() == again
    page.write_text("no place")
    with pytest.raises(BenchError, match="has no place for the table"):
        redraw(page, [])
