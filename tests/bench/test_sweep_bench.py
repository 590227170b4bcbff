"""Sweeps within limits, replays of traces, plans and presets, against a stub server."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.bench import compare, plan, serve, sweep, verify
from jaxinfer.bench.main import preset_arguments, presets
from jaxinfer.bench.traces import queries_of, read_trace
from jaxinfer.bench.workload import Prefixes, prefix_queries, read_queries
from jaxinfer.cli.bench import engine_settings
from jaxinfer.cli.main import cli
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import BenchError, ConfigError
from jaxinfer.engine.start.build import plan_elsewhere, plan_engine
from jaxinfer.nn.placement import default_placement
from kit.documents import check_command

from .stub_server import StubServer

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "data" / "traces"
LOAD = ("--random-input-len=4", "--random-output-len=2", "--vocab-size=50")


def with_stub(command: Any, *words: str) -> tuple[int, StubServer]:
    """Run a command against a stub server; its exit code, and the stub."""

    async def run() -> tuple[int, StubServer]:
        async with StubServer() as stub:
            code = await asyncio.to_thread(command, [f"--base-url={stub.url}", *words])
            return code, stub

    return asyncio.run(run())


def searched(capacity: float, first: float = 1.0, highest: float = 1024.0) -> dict[float, bool]:
    """The levels of a search on a server that keeps its limits up to a rate."""
    levels: dict[float, bool] = {}
    while (rate := sweep.next_rate(levels, first, highest, 0.1)) is not None:
        assert len(levels) < 30 and rate not in levels
        levels[rate] = rate <= capacity
    return levels


@pytest.mark.parametrize("capacity", [0.3, 1.0, 5.3, 37.0, 700.0])
def test_a_search_finds_the_rate(capacity: float) -> None:
    levels = searched(capacity)
    best = max(rate for rate, meets in levels.items() if meets)
    assert best <= capacity <= 1.1 * best and len(levels) < 16


def test_a_search_ends_where_nothing_meets_and_where_everything_does() -> None:
    assert not any(searched(0.0).values()) and min(searched(0.0)) == 1 / 64
    assert searched(9e9, highest=100.0) == dict.fromkeys([1, 2, 4, 8, 16, 32, 64, 100], True)


def test_a_sweep_reports_its_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LOAD, "--start-rate=100", "--max-rate=200", "--level-seconds=0.1"]
    path = tmp_path / "run"
    limits = "--limit=ttft_p99<20s,tpot_p99<20s"
    assert with_stub(sweep.main, limits, *words, f"--output={path}")[0] == 0
    assert "200 requests a second within ttft_p99<20s, tpot_p99<20s" in capsys.readouterr().out
    assert "no higher rate was tried" in (path / "report.md").read_text()
    assert "by requests a second" in (path / "report.html").read_text()
    assert verify.main([str(path)]) == 0
    run = json.loads((path / "run.json").read_text())
    assert len({one["workload"] for one in run["series"]}) == 2


def test_a_limit_that_nothing_meets_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LOAD, "--start-rate=4096", "--level-seconds=0.001", f"--output={tmp_path / 'run'}"]
    assert with_stub(sweep.main, "--limit=tpot_p50<1ms", *words)[0] == 1
    assert "no rate that was tried meets tpot_p50<1ms" in capsys.readouterr().out
    assert "No rate that was tried meets" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--limit=fast"], "'fast' is no limit"),
        (["--limit=tpot_p50<1.0*vllm"], "bounds no figure"),
        (["--limit=tpot_p50<1s", "--dataset-name=azure"], "a trace has times of its own"),
    ],
)
def test_wrong_sweeps_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        sweep.main(words)


def test_traces_of_both_forms() -> None:
    mooncake = read_trace(TRACES / "mooncake_12.jsonl")
    assert len(mooncake) == 12 and mooncake[0].when == 0
    assert (mooncake[0].input_len, mooncake[0].output_len) == (6758, 500)
    azure = read_trace(TRACES / "azure_8.csv", 3)
    assert [one.when for one in azure] == pytest.approx([0, 4.314579, 4.541877])
    assert [(one.input_len, one.output_len) for one in azure] == [(374, 44), (396, 109), (879, 55)]


def test_prompts_of_a_trace_share_the_prefixes_of_its_hashes() -> None:
    trace = read_trace(TRACES / "mooncake_12.jsonl")
    queries = queries_of(trace, range(1000), seed=0)
    assert [len(query.prompt) for query in queries] == [one.input_len for one in trace]
    first, *others = zip(trace, queries, strict=True)
    for one, query in others:
        pairs = zip(first[0].blocks, one.blocks, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.blocks))
        assert query.prompt[: 512 * same] == first[1].prompt[: 512 * same]
        assert query.prompt[512 * same :][:512] != first[1].prompt[512 * same :][:512]
    assert any(one.blocks[0] == first[0].blocks[0] for one, _ in others)
    cut = queries_of(trace, range(1000), seed=0, max_input_len=100, max_output_len=7)
    assert {(len(query.prompt), query.max_tokens) for query in cut} == {(100, 7), (100, 3)}


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = ["--vocab-size=50", "--max-output-len=1", "--max-input-len=9", "--num-prompts=4"]
    words += [str(TRACES / "azure_8.csv"), "--time-scale=0.05", f"--output={path}"]
    code, stub = with_stub(serve.replay, *words)
    assert code == 0 and [len(body["prompt"]) for body in stub.bodies] == [9] * 5
    lines = (path / "records" / "replay.jsonl").read_text().splitlines()
    starts = [json.loads(line).get("start_ns", 0) / 1e9 for line in lines]
    wanted = [0.05 * one.when for one in read_trace(TRACES / "azure_8.csv", 4)]
    assert all(start >= when for start, when in zip(starts, wanted, strict=True))
    assert starts[-1] < wanted[-1] + 1  # a busy machine is late by tenths of a second


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ('{"timestamp": 1}', "KeyError: 'input_length'"),
        ("TIMESTAMP,ContextTokens\nnow,1", "neither Mooncake's nor Azure's"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BenchError, match=says):
        read_trace(path)


def test_prompts_with_shared_prefixes() -> None:
    lengths = Prefixes(count=3, prefix_len=8, suffix_len=4, output_len=2)
    queries = prefix_queries(lengths, range(100), 40, seed=1)
    assert len({tuple(query.prompt[:8]) for query in queries}) == 3
    assert len({tuple(query.prompt[8:]) for query in queries}) == 40
    assert queries[:5] == prefix_queries(lengths, range(100), 5, seed=1)


def test_a_gzipped_dataset_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():"}\n'))
    assert [query.prompt for query in read_queries(path, 2, 5, seed=0)] == ["def f():"] * 2


@pytest.mark.parametrize(
    ("data", "says"),
    [(None, "No such file"), (b"", "no row with"), (b"{", "is not JSON"), (b"\xff", "utf-8")],
)
def test_a_bad_dataset_is_named(data: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    if data is not None:
        path.write_bytes(data)
    words = ["--dataset-name=custom", f"--dataset-path={path}", f"--output={tmp_path / 'run'}"]
    with pytest.raises(BenchError, match=rf"data\.jsonl.*{says}"):
        with_stub(serve.main, *words)


def config_of(folder: str, **changes: Any) -> EngineConfig:
    path = str(ROOT / "bench" / "shapes" / folder / "config.json")
    return EngineConfig(model=path, load_format="dummy", skip_tokenizer_init=True, **changes)


def test_a_plan_is_the_engines_own() -> None:
    config = config_of("gpt2")
    here, elsewhere = plan_engine(config), plan_elsewhere(config, default_placement(), None)
    assert elsewhere.memory == here.memory and elsewhere.program.limits == here.program.limits


def test_a_plan_for_a_gpu_fills_its_memory() -> None:
    device = plan.DEVICES["h100"]
    found = plan.described(plan.plan_on(config_of("qwen3-4b"), device), device, 1024)
    assert found["parameters"] == 4_022_468_096
    assert found["weight_bytes"] == 2 * found["parameters"]
    assert found["kv_bytes_per_token"] == 36 * 2 * 8 * 128 * 2
    assert found["kv_cache_bytes"] == found["num_pages"] * 16 * found["kv_bytes_per_token"]
    assert 0.85 < found["total_bytes"] / device.memory < 0.93
    # 8.04 GB less the embedding are read at 3.0 TB/s, and 1,024 tokens of keys and values
    assert found["tpot_ms"][1] == pytest.approx(2.73, abs=0.01)
    small = replace(device, memory=8 << 30)
    with pytest.raises(ConfigError, match="the model does not fit"):
        plan.plan_on(config_of("qwen3-4b"), small)


def test_a_plan_for_several_devices_divides_the_weights() -> None:
    device = plan.DEVICES["h100"]
    one, two = (
        plan.described(plan.plan_on(config_of("gpt2", tensor_parallel_size=n), device), device, 256)
        for n in (1, 2)
    )
    assert two["devices"] == 2 and two["parameters"] == one["parameters"]
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 2
    assert 0.4 < two["weight_bytes"] / one["weight_bytes"] < 0.7


SHAPES = sorted(path.parent.name for path in ROOT.glob("bench/shapes/*/config.json"))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", plan.DEVICES)
def test_every_shape_is_planned_or_refused(shape: str, device: str) -> None:
    chosen = plan.DEVICES[device]
    try:
        found = plan.described(plan.plan_on(config_of(shape), chosen), chosen, 1024)
    except ConfigError as error:
        assert "fit" in str(error) or "room for" in str(error)
        return
    assert 0 < found["total_bytes"] <= chosen.memory
    assert found["tpot_ms"][1] <= found["tpot_ms"][128]


def test_a_plan_from_the_command_line() -> None:
    path = "bench/shapes/gpt2/config.json"
    words = ["bench", "plan", str(ROOT / path), "--device", "l40s", "--json", "--max-num-seqs=4"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["max_num_seqs"] == 4
    result = CliRunner().invoke(cli, ["bench", "plan", "/nowhere/config.json", "--device", "h100"])
    assert result.exit_code == 1 and "/nowhere/config.json does not exist" in result.stderr


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_a_command_that_is_accepted(name: str) -> None:
    check_command(["jaxinfer", "bench", name, "--seed", "7", "--output", "x"])


def test_flags_override_a_preset() -> None:
    command, *flags = preset_arguments("inferengine-pair")
    given = compare.parser().parse_args([*flags, "--num-prompts=3"])
    assert command == "compare" and given.num_prompts == 3 and given.max_concurrency == 16
    assert given.ignore_eos and given.gate == ["output_throughput>=1.0*vllm"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "give a command"),
        (["swerve"], 1, "'swerve' is no benchmark; choose one of serve, throughput"),
        (["serve", "--no-such-flag"], 2, "unrecognized arguments: --no-such-flag"),
        (["serve", "--goodput", "speed:3"], 2, "a limit is on ttft, tpot or e2el"),
        (["serve", "--request-rate", "0"], 2, "a request rate is above 0"),
        (["serve", "--num-prompts", "0"], 2, "0 is no whole number above 0"),
        (["serve", "--gate", "fast"], 2, "'fast' is no limit"),
        (["serve", "--dataset-name", "sharegpt"], 1, "needs --dataset-path"),
        (["serve", "--base-url", "ftp://x"], 1, "'ftp://x' is not a URL"),
        (["serve", "--header", "x"], 1, "--header 'x' has no value"),
        (["latency", "--max-num-sequences", "4"], 2, "No such option '--max-num-sequences'"),
    ],
)
def test_wrong_usage(words: list[str], code: int, says: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *words])
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize("name", ["--help", "serve", "sweep", "compare", "plan", "verify"])
def test_help(name: str) -> None:
    result = CliRunner().invoke(cli, ["bench", name, *([] if name == "--help" else ["--help"])])
    assert result.exit_code == 0 and re.search("usage:", result.output, re.IGNORECASE)


def test_an_engine_that_is_measured_needs_no_tokenizer() -> None:
    """Random prompts are token ids, and folders of random weights often hold none."""
    settings = engine_settings(["--model", "folder", "--skip-tokenizer-init"])
    assert settings["skip_tokenizer_init"] is True
