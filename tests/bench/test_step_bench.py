"""The whole device bench on tiny models; its floors by hand; its file over several calls."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from jax.profiler import ProfileData

from bench import render
from bench.step import __main__ as step
from bench.step import busy as step_busy
from bench.step import cases as step_cases
from bench.step import file as step_file
from bench.step import memory as step_memory
from bench.step.cases import Prompts, Repeats
from bench.step.experts import mean_distinct, share_of
from jaxinfer.bench.circumstances import write_report
from jaxinfer.bench.floor import CEILINGS, Ceiling, Floor
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import PageGroup
from jaxinfer.exec.compile.page_pools import most_pages, split_pages
from jaxinfer.models.base import abstract_params
from jaxinfer.models.costs import Costs, costs_of
from jaxinfer.models.registry import build_model
from kit.checkpoints import tiny_gpt2_config, tiny_llama_config, tiny_qwen3_moe_config
from kit.engines import tiny_limits
from pallas_kernels.lib.quantised import Form

TINY = step_cases.Workload(
    tpot_batches=(1, 2),
    tpot_input=8,
    long_batches=(2,),
    long_input=40,
    ttft_inputs=(8, 40),
    offline=(3, 8, 4),
    gpt2_input=8,
    ablation_batches=(1,),
    ablation_input=8,
    warm_starts=1,
    memory_sequences=2,
    repeats=Repeats(at_least=1, at_most=1, seconds=0),
)
# two executables, which all groups except `start` share: compiling takes nearly all of the time
PAGES = 16  # of such an engine: one sequence of its context
SIZES = ("max_num_seqs=1", "max_num_batched_tokens=64", "prefill_bucket_start=64")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("step")
    config = folder / "config.json"
    config.write_text(json.dumps(tiny_llama_config(num_hidden_layers=1)))
    sizes = [f"--engine={size}" for size in (*SIZES, "dtype=float32", f"cache_dir={folder}/cache")]
    return [*sizes, f"--config={config}", f"--gpt2-config={config}"]


def run(flags: list[str], only: str, output: Path, *more: str) -> dict[str, Any]:
    step.main([*flags, f"--only={only}", f"--output={output}", *more], TINY)
    return json.loads(output.read_text())


def cases(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["metric"], row["case"]) for row in report["rows"]}


def test_groups_fill_one_file(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cases, "DECODED", 4)
    output = tmp_path / "step.json"
    made = Mock(side_effect=step.LLM)
    monkeypatch.setattr(step, "LLM", made)
    run(flags, "tpot,offline", output)
    assert made.call_count == 1, "groups of the same settings share an engine"
    report = run(flags, "ttft", output, "--prompts", "8", "40")
    assert {"device", "versions", "git", "model"} <= report.keys()
    assert report["versions"].keys() >= {"python", "jax", "jaxlib"}
    assert cases(report) == {
        ("tpot_ms", "b1"),
        ("tpot_ms", "b2"),
        ("tpot_ms", "b2/40"),
        ("ttft_ms", "8"),
        ("ttft_ms", "40"),
        ("offline_tok_s", "greedy"),
        ("offline_tok_s", "sampled"),
    }
    for row in report["rows"]:
        assert row["floor"] is None, "a CPU has no ceilings here"
        assert row["value"] == row["samples"][0]
    assert set(report["groups"]) == {"tpot", "offline", "ttft"}
    engine = report["groups"]["tpot"]["engine"]
    assert engine["enable_prefix_caching"] is False and engine["max_model_len"] == 48
    assert "model" not in engine and "cache_dir" not in engine
    long = next(row for row in report["rows"] if row["case"] == "b2/40")
    short = next(row for row in report["rows"] if row["case"] == "b2")
    # by its bytes; on a busy machine the measured value may be below 0, since it is a difference
    assert long["predicted"] / short["value"] > 1
    tables = "\n".join(render.step_tables(report, {"peer": "none", "rows": []}))
    assert all(f"| {case} |" in tables for case in ("1", "40", "b2/40", "greedy"))


@pytest.mark.nightly  # compiles engines of its own
def test_the_small_model_and_the_ablations(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cases, "DECODED", 4)
    names = ("default", "no-overlap", "sample-by-xla")
    monkeypatch.setattr(step, "ABLATIONS", {name: step.ABLATIONS[name] for name in names})
    output = tmp_path / "step.json"
    run(flags, "ablation", output, "--commit=abc")
    report = run(flags, "ablation", output, "--commit=abc", "--label=other")
    assert (report["git"], report["git_dirty"]) == ("abc", None)  # not the commit of this checkout
    assert cases(report) == {
        (metric, f"{name}/{size}")
        for metric, size in (("ablation_tpot_ms", "b1"), ("ablation_ttft_ms", "8"))
        for name in (*names, "other")
    }
    monkeypatch.setattr(step, "busy_seconds", lambda call: call())
    report = run(flags, "gpt2", output, "--commit=abc")
    assert cases(report) >= {
        ("tpot_ms", "gpt2/b1"),
        ("offline_tok_s", "gpt2/sampled"),
        ("device_busy", "gpt2/b1"),
        ("device_busy", "gpt2/sampled"),
    }


def test_rows_measured_before_a_failure_are_kept(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cases, "DECODED", 4)
    monkeypatch.setattr(step, "ABLATIONS", {"default": {}, "impossible": {"page_size": -1}})
    output = tmp_path / "step.json"
    with pytest.raises(ConfigError, match="page_size"):
        run(flags, "ablation", output)
    assert cases(json.loads(output.read_text())) == {
        ("ablation_tpot_ms", "default/b1"),
        ("ablation_ttft_ms", "default/8"),
    }


@pytest.mark.nightly  # compiles engines of its own
def test_starts_compile_once(flags: list[str], tmp_path: Path) -> None:
    report = run(flags, "start", tmp_path / "step.json")
    values = {(row["metric"], row["case"]): row["value"] for row in report["rows"]}
    assert values["start_compiled", "no_bundle"] == values["start_executables", "no_bundle"] > 0
    assert values["start_compiled", "bundle"] == 0
    for case in ("no_bundle", "bundle"):
        assert 0 < values["start_import_s", case] < values["start_s", case]
        assert values["start_s", case] < values["start_first_token_s", case]


DRIVER = """#!/bin/sh
# 1,000 MiB are another's, as who asks first sees
if [ -e {seen} ]; then used=9100; else used=1000; touch {seen}; fi
while echo $used, 10000; do sleep 0.05; done
"""


def test_a_card_is_watched_while_an_engine_fills_its_pages(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / step_memory.SMI
    driver.write_text(DRIVER.format(seen=tmp_path / "seen"))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    report = run(flags, "memory", tmp_path / "step.json")
    first, full = report["rows"]
    assert (first["metric"], first["case"], full["case"]) == ("card_share", "until_ready", "full")
    assert (first["value"], first["used_mib"], first["asked"]) == (0.81, 8100, 0.92)
    assert full["used_mib"] == 8100
    assert full["answered"] == full["sequences"] == 2 and full["preempted"] == 0
    assert full["tokens"] == 16 * (PAGES // 2)


def test_without_a_card_there_are_no_rows(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    step.main([*flags, "--only=memory", f"--output={tmp_path}/step.json"], TINY)
    assert step_memory.SMI in capsys.readouterr().out


def test_the_most_in_use_since_the_last_question() -> None:
    card = step_memory.Card(["1, 10", "7, 10", "3, 10"])
    card._thread.join()
    # a second call before the next line: three are still in use
    assert (card.taken_peak(), card.taken_peak(), card.total) == (7, 3, 10)


def test_floors_of_qwen3_4b_shapes() -> None:
    config = json.loads((step.SHAPES / "qwen3-4b" / "config.json").read_text())
    costs = costs_of(build_model(config, "bfloat16"))
    layer = 2560 * (32 + 2 * 8) * 128 + 32 * 128 * 2560 + 3 * 2560 * 9728
    assert costs.token_flops == 2 * 36 * layer
    assert costs.weight_bytes == pytest.approx(2 * (36 * layer + 151936 * 2560), rel=1e-4)
    assert costs.kv_bytes == 36 * 2 * 8 * 128 * 2 == 147_456
    assert costs.pair_flops == 36 * 4 * 32 * 128
    floor = Floor(costs, CEILINGS["NVIDIA H200"])
    # figures from the measured ceilings, computed independently
    assert 1e3 * floor.decode(64, 1056) == pytest.approx(4.19, abs=0.01)
    assert 1e3 * floor.prefill(1, 4096) == pytest.approx(44, abs=0.5)
    assert 1e3 * floor.prefill(1, 16384) == pytest.approx(250, abs=2)


def test_the_experts_that_a_step_reads() -> None:
    """Qwen3-30B-A3B: 29.0 B of its parameters are experts, of which a token uses a sixteenth."""
    config = json.loads((step.SHAPES / "qwen3-30b-a3b" / "config.json").read_text())
    costs = costs_of(build_model(config, "bfloat16"))
    experts = 48 * 128 * 3 * 2048 * 768
    assert costs.expert_bytes == 2 * experts and costs.expert_share == 1 / 16
    assert costs.token_flops == pytest.approx(2 * (experts / 16 + 0.93e9), rel=0.05)
    assert costs.bytes_of_weights(1) == pytest.approx(6.1e9, rel=0.02)
    assert costs.bytes_of_weights(64) == pytest.approx(costs.bytes_of_weights(10**6), rel=0.02)
    assert costs.bytes_of_weights(8, distinct=0.5) == costs.weight_bytes + experts


def test_quantised_weights_have_their_own_bytes_and_fp8_half_the_operations() -> None:
    model = build_model(tiny_qwen3_moe_config(), "bfloat16")
    floats, prefix = costs_of(model), "model.layers.0."
    forms = {f"{prefix}self_attn.o_proj.weight": Form("fp8", None, "float32")}
    forms |= {
        f"{prefix}mlp.experts.{i}.down_proj.weight": Form("int8", 32, "float16") for i in range(5)
    }
    costs = costs_of(replace(model, forms=tuple(forms.items())))
    layer = abstract_params(model)["layers_0"]
    (outputs, inputs), (experts, rows, columns) = layer["o"].shape, layer["down"].shape
    assert floats.weight_bytes - costs.weight_bytes == outputs * inputs - 4 * outputs
    saved = experts * rows * (columns - 2 * (columns // 32))
    assert floats.expert_bytes - costs.expert_bytes == saved
    assert floats.token_flops - costs.token_flops == outputs * inputs


def test_distinct_experts_are_counted_by_layer_and_step() -> None:
    one_step = np.array([[[0, 1], [1, 2]], [[3, 4], [3, 4]]])  # two layers, two tokens
    assert mean_distinct(one_step[None]) == (3 + 2) / 2
    assert mean_distinct(np.stack([one_step, 0 * one_step])) == (3 + 2 + 1 + 1) / 4
    assert share_of({"distinct_experts": 3.0, "experts": 12}) == 0.25
    assert share_of({}) is None


@pytest.mark.nightly
def test_rows_of_a_mixture_of_experts_state_what_steps_read(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has two of five experts: others than its neighbours', or the same two."""
    monkeypatch.setattr(step_cases, "DECODED", 8)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_qwen3_moe_config()))
    flags = [*flags[:-2], f"--config={config}", "--batches", "1", "2"]

    def measured(routing: str) -> dict[tuple[str, str], Any]:
        routed = [*flags, f"--engine=dummy_routing={routing}"]
        report = run(routed, "tpot,ttft", tmp_path / f"{routing}.json")
        return {(row["metric"], row["case"]): row for row in report["rows"]}

    found = measured("uniform")
    assert ("tpot_ms", "b2/40") not in found  # `--batches` leaves a long context out
    assert found["tpot_ms", "b1"]["distinct_experts"] == 2
    assert 2.5 < found["tpot_ms", "b2"]["distinct_experts"] < 3.9  # 5 (1 - 0.6 ** 2) = 3.2
    assert found["ttft_ms", "40"]["distinct_experts"] == found["ttft_ms", "40"]["experts"] == 5
    assert {row["distinct_experts"] for row in measured("same").values()} == {2}
    flags.append("--uncounted")
    assert all("experts" not in row for row in measured("uniform").values())


def test_floors_by_hand() -> None:
    costs = Costs(weight_bytes=100, kv_bytes=2, token_flops=10, head_flops=5, pair_flops=1)
    slow_memory, slow_cores = Floor(costs, Ceiling(10, 1e9)), Floor(costs, Ceiling(1e9, 10))
    assert slow_memory.decode(3, 20) == (100 + 3 * 20 * 2) / 10
    assert slow_cores.decode(3, 20) == 3 * (10 + 5 + 20) / 10
    assert slow_memory.prefill(2, 4) == 100 / 10
    assert slow_cores.prefill(2, 4) == 2 * (4 * 10 + 10 + 5) / 10
    with_experts = Floor(replace(costs, expert_bytes=1000), Ceiling(10, 1e9))
    assert with_experts.decode(3, 20, distinct=0.25) == slow_memory.decode(3, 20) + 25
    assert with_experts.prefill(2, 4, distinct=0.5) == slow_memory.prefill(2, 4) + 50
    assert slow_memory.generate(2, 4, 6) == 10 + 5 * (100 + 2 * 7 * 2) / 10


def test_a_gathered_table_is_not_read() -> None:
    tied, own = (
        costs_of(build_model(tiny_llama_config(tie_word_embeddings=tie), "float32"))
        for tie in (True, False)
    )
    assert tied == own
    gpt2 = build_model(tiny_gpt2_config(), "float32")
    longer = build_model(tiny_gpt2_config(n_positions=256), "float32")
    assert costs_of(gpt2) == costs_of(longer)


def test_repeats_leave_the_first_out_and_keep_the_bounds() -> None:
    numbers = iter(np.arange(10.0))
    assert Repeats(2, 5, 0).of(lambda: next(numbers)) == [1, 2]
    assert Repeats(2, 3, 60).of(lambda: next(numbers)) == [4, 5, 6]


def test_prompts_are_the_same_for_the_same_seed() -> None:
    prompts = Prompts(50, seed=3)(2, 7)
    assert prompts == Prompts(50, seed=3)(2, 7) != Prompts(50, seed=4)(2, 7)
    assert [len(prompt) for prompt in prompts] == [7, 7]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


ONE_POOL = (PageGroup(),)
TWO_POOLS = (PageGroup(), PageGroup(window=1024, pool=1))


@pytest.mark.parametrize(
    ("page_size", "groups"), [(16, ONE_POOL), (64, ONE_POOL), (16, TWO_POOLS), (64, TWO_POOLS)]
)
def test_every_case_fits_in_the_pages(page_size: int, groups: tuple[PageGroup, ...]) -> None:
    """Each pool has enough, also that of windows, which gets fewer pages for typical contexts."""
    work = step_cases.Workload()
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "page_size": page_size}
    limits = tiny_limits(**sizes, max_model_len=work.max_model_len, groups=groups)
    pages = split_pages(limits, work.num_pages(limits))
    for own, most in zip(pages, most_pages(limits), strict=True):
        assert min(256 * -(-(1024 + 65) // page_size), most - 1) < own
    assert pages[0] > 16 * -(-(16384 + 65) // page_size)
    assert work.max_model_len >= 16384 + 65


def test_the_sequences_of_a_batch_run_together() -> None:
    """64 rows of Gemma 4, of two pools, once decoded in two batches, which doubled their TPOT."""
    work = step_cases.Workload(tpot_batches=(64,), long_batches=(), ttft_inputs=(8192,))
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "page_size": 16}
    limits = tiny_limits(**sizes, max_model_len=work.max_model_len, groups=TWO_POOLS)
    pages = split_pages(limits, work.num_pages(limits))
    tokens = work.tpot_input + 1 + step_cases.DECODED
    needed = limits.pages_needed(tokens)
    assert all(own > 64 * each for own, each in zip(pages, needed, strict=True))


def test_a_file_of_another_machine_is_refused_before_measuring(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "step.json"
    output.write_text(json.dumps({"device": "another", "groups": {}, "rows": []}))
    monkeypatch.setattr(step, "GROUPS", {"tpot": lambda bench: pytest.fail("was measured")})
    with pytest.raises(SystemExit, match="device another, and here it is"):
        run(flags, "tpot", output)


def test_rows_of_a_group_replace_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.json"
    about = {"device": "cpu"}
    old = step_file.read_report(path, about)
    old = step_file.merged_report(old, "a", {"n": 1}, [{"metric": "m", "case": "x", "value": 1}])
    old = step_file.merged_report(old, "b", {"n": 2}, [{"metric": "m", "case": "y", "value": 2}])
    new = step_file.merged_report(old, "a", {"n": 3}, [{"metric": "m", "case": "x", "value": 3}])
    write_report(path, new)
    assert step_file.read_report(path, about) == new
    assert [row["value"] for row in new["rows"]] == [2, 3]
    assert new["groups"] == {"a": {"n": 3}, "b": {"n": 2}}
    assert [file.name for file in path.parent.iterdir()] == ["step.json"]


def test_spans_that_overlap_count_once() -> None:
    assert step_busy.covered([(5, 7), (0, 3), (1, 2), (2, 4)]) == 6
    assert step_busy.covered([]) == 0


def test_a_trace_without_a_gpu_has_no_busy_time() -> None:
    assert step_busy.busy_seconds(lambda: None) is None


TRACE = """
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #7(Compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 } }
  lines { name: "Stream #8(MemcpyD2H)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 3000000 duration_ps: 2000000 } }
  lines { name: "XLA Modules" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "kernel" } }
}
planes { name: "/host:CPU" lines { name: "Stream of thoughts" timestamp_ns: 0
  events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } } }
"""


def test_only_the_streams_of_a_gpu_count(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ProfileData.from_text_proto(TRACE)
    monkeypatch.setattr(step_busy, "ProfileData", Mock(from_file=Mock(return_value=profile)))
    assert step_busy.busy_seconds(lambda: None) == pytest.approx(6e-6)


def test_no_kind_of_run_of_tpot_comes_after_the_other_more_often() -> None:
    """A run's prefill time depends on the run before it; a token takes 0.5 s."""
    ran = [1]

    def run(tokens: int) -> float:
        after_prompts_alone = ran[-1] == 1
        ran.append(tokens)
        return 3.0 + 0.5 * (tokens - 1) + 2.0 * after_prompts_alone

    assert step_cases.tpot_seconds(run) == pytest.approx(0.5)
    long = 1 + step_cases.DECODED
    assert ran[1:] == [1, long, long, 1]
