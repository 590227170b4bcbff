"""Profiles: kernels of a GPU's trace and of a CPU's, joined to steps and requests, with floors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench import offline, verify
from jaxinfer.bench.floor import CEILINGS
from jaxinfer.bench.op_costs import floors_of
from jaxinfer.bench.profile_table import OUTSIDE, Kernel, Profiled, spent_by_step, tables_of
from jaxinfer.bench.profile_trace import (
    QUEUED,
    Event,
    kernels_of,
    op_of,
    read_trace,
    step_by_run,
    triton_ops,
)
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ArgumentError, BenchError, EngineError
from jaxinfer.core.profile import Instruction, OpCosts, Part, ProfiledStep, Steps
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.loop.profiler import instructions_of
from jaxinfer.models.costs import op_costs_of
from kit.engines import tiny_engine
from kit.tiny_models import tiny_model

H200 = Path(__file__).parents[1] / "data" / "profile" / "h200_8_rows.xplane.pb.gz"
PROMPT, DECODE = "p2560x8", "d8"  # the buckets of its three steps
NAMES = [f"llm-{number}" for number in range(8)]
QWEN3_4B = OpCosts(
    parts={
        "head": Part(1, 777_912_320, 777_912_320.0),
        "gate_up": Part(36, 3_586_129_920, 3_586_129_920.0),
        "others": Part(108, 3_680_501_760, 3_680_501_760.0),
    },
    weight_bytes=8_044_936_192,
    kv_bytes=147_456,
    pair_flops=589_824,
)


def step(number: int, bucket: str, **work: int) -> ProfiledStep:
    return ProfiledStep(number, bucket, NAMES, wall_ns=3_000_000, **work)


def h200_profile() -> Profiled:
    """The trace of one prompt step of 8 prompts of 300 tokens, and of two decode steps."""
    work: dict[str, int] = {"tokens": 2400, "draws": 8, "pairs": 8 * 300 * 301 // 2}
    decodes = [step(n, DECODE, tokens=8, draws=8, context=8 * (300 + n)) for n in (1, 2)]
    steps = Steps("NVIDIA H200", 1, [step(0, PROMPT, **work), *decodes])
    ceiling = CEILINGS["NVIDIA H200"]
    return Profiled(
        device=steps.device,
        bytes_per_s=ceiling.bytes_per_s,
        flops_per_s=ceiling.flops_per_s,
        costs=QWEN3_4B,
        steps=steps.steps,
        kernels=kernels_of(gzip.decompress(H200.read_bytes()), steps),
    )


def rows_of(tables: dict[str, Any], bucket: str) -> dict[str, Any]:
    (found,) = (one for one in tables["buckets"] if one["bucket"] == bucket)
    return {row["op"]: row for row in found["rows"]}


def test_kernels_of_a_gpu_belong_to_the_steps_that_launched_them() -> None:
    kernels = h200_profile().kernels
    counts = {number: sum(one.step == number for one in kernels) for number in (0, 1, 2, OUTSIDE)}
    assert counts == {0: 327, 1: 278, 2: 278, OUTSIDE: 0}  # a graph of 277, and the batch's copy
    ends = [max(one.start_ns for one in kernels if one.step == number) for number in range(3)]
    assert ends == sorted(ends)


def test_the_table_of_a_gpu_has_shares_floors_and_idle_time() -> None:
    tables = tables_of(h200_profile())
    assert [one["bucket"] for one in tables["buckets"]] == [PROMPT, DECODE]
    prompts, decodes = rows_of(tables, PROMPT), rows_of(tables, DECODE)
    assert prompts["swiglu_gemm"]["calls"] == 35  # the last layer computes 8 tokens
    floor = 1e6 * 2400 * 3_586_129_920 * 35 / 36 / 790e12
    assert prompts["swiglu_gemm"]["floor_us"] == pytest.approx(floor)
    assert 0.5 < prompts["swiglu_gemm"]["share_of_floor"] < 0.7
    assert 0.5 < prompts["gemm"]["share_of_floor"] < 0.7
    assert 0.9 < prompts["unembed"]["share_of_floor"] < 1
    assert prompts["residual_norm"]["calls"] == 73 and prompts["sample"]["calls"] == 7
    assert prompts["residual_norm"]["floor_us"] is None
    for one in tables["buckets"]:
        assert sum(row["us"] for row in one["rows"]) == pytest.approx(one["device_us"])
        assert sum(row["share"] for row in one["rows"]) == pytest.approx(1)
        assert one["requests"] == 8 and one["wall_us"] == 3000
    assert decodes["idle before the step"]["us"] > 400  # Python's tracer slowed the host
    assert 0 < decodes["idle between kernels"]["us"] < 10
    assert decodes["gemm"]["floor_us"] is None  # one of 145 matrices: the others have no known op
    floor = tables["buckets"][1]["floor_us"]
    assert floor == pytest.approx(1e6 * (8_044_936_192 + 8 * 301.5 * 147_456) / 4.3e12)


def test_runs_of_a_cpu_begin_in_the_order_of_their_launches() -> None:
    host = [Event("engine_step", 10 * n, 10 * n + 5, {"step_num": n}) for n in (1, 2)]
    # the second step has two runs, and then the host queues one outside of any step
    host += [Event(QUEUED, start, start + 1, {}) for start in (11, 21, 23, 28)]
    runs = {7: 2, 40: 12, -3: 22, 9: 30, 8: 40}  # begins by ids; the first was queued before
    kernels = [Event("op", begin, begin + 1, {"run_id": run}) for run, begin in runs.items()]
    step_of = step_by_run(host, kernels)
    assert [step_of(one) for one in kernels] == [OUTSIDE, 1, 2, 2, OUTSIDE]


def test_overlapping_kernels_count_once() -> None:
    kernels = [
        Kernel(0, "a", "a", 0, 10),
        Kernel(0, "b", "b", 4, 10),  # began before "a" ended
        Kernel(1, "copy", "copy", 6, 3),  # of the next step, while this one runs
        Kernel(0, "c", "c", 16, 4),
        Kernel(1, "a", "a", 25, 5),
    ]
    spent = spent_by_step(kernels)
    assert dict(spent[0].own) == {"a": 10, "b": 4, "c": 4}
    assert (spent[0].between, spent[0].before, spent[0].total) == (2, 0, 20)
    assert dict(spent[1].own) == {"copy": 0, "a": 5}
    assert (spent[1].between, spent[1].before, spent[1].total) == (0, 5, 10)


@pytest.mark.parametrize(
    ("kernel", "target", "scope", "op"),
    [
        ("append_decode_mosaic_gpu_kernel", "", "", "append_decode"),
        ("skinny_gemm_mosaic_gpu_3", "", "", "skinny_gemm"),  # linked
        ("_add_and_norm", "", "", "residual_norm"),
        ("choose_among_few", "", "", "sample"),
        ("nvjet_sm90_tst_320x128_64x3", "", "jit(last_part)/layers_1/dot_general", "gemm"),
        ("gemm_fusion_dot_general_1", "", "jit(last_part)/Decoder.unembed/...D", "unembed"),
        ("MemcpyH2D", "", "", "copy"),
        ("loop_gather_fusion_4", "", "", "fusion"),
        ("ffi_call.732", "jaxinfer_attention", "", "attention"),
        ("ffi_call.733", "jaxinfer_quantised_gemm", "jit(f)/Decoder.unembed/ffi_call", "unembed"),
        ("some_new_kernel", "", "", "some_new_kernel"),
    ],
)
def test_ops_of_kernels(kernel: str, target: str, scope: str, op: str) -> None:
    assert op_of(kernel, Instruction(scope, target), scope, triton_ops()) == op


def test_the_only_gemm_has_the_floor_of_all_other_matrices() -> None:
    own = step(0, DECODE, tokens=8, draws=8, context=80)
    calls = {"skinny_gemm": 108, "swiglu_gemm": 36, "unembed": 1, "append_decode": 36}
    found = floors_of(QWEN3_4B, own, calls)
    assert found["skinny_gemm"][0] == 3_680_501_760
    assert found["append_decode"] == (80 * 147_456, 80 * 589_824)
    assert "skinny_gemm" not in floors_of(QWEN3_4B, own, calls | {"skinny_gemm": 72})
    one = floors_of(QWEN3_4B, own, {"gemm": 145})["gemm"]
    assert one == found["gemms"] == (8_044_544_000, 8 * 8_044_544_000.0)


def test_instructions_are_read_from_hlo() -> None:
    text = (
        "HloModule jit_last_part, is_scheduled=true\n"
        '  %call.7 = (f32[0]{0}) custom-call(%a), custom_call_target="jaxinfer_mask", '
        'metadata={op_name="jit(last_part)/ffi_call" stack_frame_id=1}, backend_config={x = 0}\n'
        "  %plain.1 = f32[2]{0} add(%a, %b)\n"
        '  ROOT %fusion = s32[4]{0} fusion(%r), metadata={op_name="jit(last_part)/add"}\n'
    )
    assert instructions_of(iter([text])) == {
        "jit_last_part": {
            "call.7": Instruction("jit(last_part)/ffi_call", "jaxinfer_mask"),
            "fusion": Instruction("jit(last_part)/add", ""),
        }
    }


@pytest.fixture(scope="module")
def llm() -> LLM:
    engine, (model, params) = tiny_engine(), tiny_model("llama")
    weights = {"model": model, "params": params, "reference": "", "generation_config": {}}
    engine._weights = engine.profiler._weights = SimpleNamespace(**weights)  # type: ignore[assignment]
    return LLM.of_engine(engine, EngineConfig(model="tiny"), NO_PROGRESS)


ARGUMENTS = ["--input-len=5", "--output-len=4", "--batch-size=2", "--num-iters=1"]


def test_a_profiled_run_is_verified(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline, "engine_of", lambda _: llm)
    run = tmp_path / "run"
    given = [*ARGUMENTS, "--num-iters-warmup=0", "--profile", f"--output={run}"]
    assert offline.latency(given, lambda _: {}) == 0
    profiled = msgspec.json.decode((run / "profile.json").read_bytes(), type=Profiled)
    assert len(profiled.steps) == 4  # the prompts, and three tokens more
    assert {name for one in profiled.steps for name in one.requests} == {"llm-2", "llm-3"}
    by_step = [sum(one.step == own.step for one in profiled.kernels) for own in profiled.steps]
    assert min(by_step) > 10 and by_step[1:] == [by_step[1]] * 3  # one executable, three times
    assert profiled.costs == op_costs_of(llm.model.model)
    assert next((run / profiled.trace).rglob("*.trace.json.gz"))  # for Perfetto
    report = (run / "report.md").read_text()
    assert "## Profile" in report and "| idle between kernels |" in report
    assert verify.main([str(run)]) == 0
    rows = json.loads((run / "profile.json").read_text())
    rows["kernels"][7][4] += 1000  # ns
    (run / "profile.json").write_text(json.dumps(rows))
    capsys.readouterr()
    assert verify.main([str(run)]) == 1
    said = capsys.readouterr().out
    assert "profile.json is changed" in said and "result.json: profile: buckets:" in said


def test_a_window_ends_after_its_steps(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path, num_steps=2)
    with pytest.raises(EngineError, match="a profile is being taken"):
        llm.start_profile(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.generate([[1, 2, 3]], sampling, use_tqdm=False)
    folder = llm.stop_profile()
    steps = msgspec.json.decode((folder / "steps.json").read_bytes(), type=Steps)
    assert [one.tokens for one in steps.steps] == [3, 1]
    assert {one.step for one in kernels_of(read_trace(folder), steps)} <= {
        OUTSIDE,
        *(one.step for one in steps.steps),
    }
    with pytest.raises(EngineError, match="no profile is being taken"):
        llm.stop_profile()


def test_bad_input_is_named(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written"):
        llm.start_profile(tmp_path / "file")
    with pytest.raises(BenchError, match="has no trace"):
        read_trace(tmp_path)
    with pytest.raises(BenchError, match="no events of a device"):
        kernels_of(b"", Steps("cpu", 1, []))


def test_a_trace_that_cannot_be_written_fails_no_step(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_trace() -> None:
        original()
        raise OSError("no space left on device")

    original = jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    llm.start_profile(tmp_path, num_steps=1)
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(EngineError, match="cannot be written to .*no space left"):
        llm.stop_profile()
