"""A GPU's plain steps: nothing in them that makes the host wait, and the same tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.exec.compile import build_executables
from jaxinfer.exec.executor import WARM_UP_RUNS, Executor
from jaxinfer.exec.memory import init_state
from jaxinfer.exec.program import Program
from kit.counted import Counted
from kit.engines import engine_of, run, tiny_limits
from kit.tiny_models import tiny_model
from pallas_kernels import registry

LIMITS = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16)
BUCKETS = [bucket.name for bucket in LIMITS.buckets]
WAITS = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
SORTS = ("stablehlo.sort", "chlo.top_k")
SMALLEST_ROOM = 2**21  # bytes: what XLA's allocator over virtual memory gives to any small array

PLAIN = SamplingParams(max_tokens=6, seed=1, top_k=9, top_p=0.9, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
ASKING = (
    SamplingParams(max_tokens=4, seed=2, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=3, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=4, logit_bias={5: 2.0}, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=5, prompt_logprobs=1, ignore_eos=True),
)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("bucket", BUCKETS)
def test_no_branch_loop_or_sort(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what a GPU's kernels leave to XLA; the kernels themselves are not traced."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    with in_place_of_triton_call(recorder := Recorder()):
        plain = program.trace(bucket).lower().as_text()
        assert {"_draw", "_add_and_norm"} <= {call.kernel.__name__ for call in recorder.calls}
        assert not [word for word in (*WAITS, *SORTS) if word in plain]
        if (extras := f"{bucket}_extras") in program.names():
            assert any(word in program.trace(extras).lower().as_text() for word in WAITS)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_batch_is_read_once_to_memory_that_stays(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA records anew what reads memory that has moved, and a batch always has."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    for name in (bucket, f"{bucket}_extras"):
        if name not in program.names():
            continue
        with in_place_of_triton_call(Recorder()):
            step = program.trace(name).jaxpr.jaxpr
        layout = program.layout(next(b for b in LIMITS.buckets if b.name == bucket))
        (flat,) = (var for var in step.invars if var.aval.shape == layout.abstract().shape)
        (reader,) = (equation for equation in step.eqns if flat in equation.invars)
        own = reader.invars[0].aval
        assert reader.primitive.name == "dynamic_update_slice"
        assert own.size * own.dtype.itemsize > SMALLEST_ROOM


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_a_prompts_last_layer_is_a_step_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last token of each row; with extras all tokens are asked for."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")  # of two layers
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    both, one = ["_attend_tile", "_append_and_attend"], ["_attend_tile"]
    for name, attention in (("p16x1", both), ("p16x1_extras", one)):
        with in_place_of_triton_call(recorder := Recorder()):
            program.trace(name)
        assert [c.kernel.__name__ for c in recorder.calls if c.kernel.__name__ in both] == attention


def test_extras_run_only_where_asked_for_and_tokens_are_the_same(tmp_path: Path) -> None:
    model, params = tiny_model("llama")
    limits = tiny_limits(max_num_seqs=1, max_num_batched_tokens=16)
    program = Program(model, limits, platform="gpu")
    always = Program(model, limits, platform="cpu")  # each of its steps has extras
    chosen, others = (
        Counted(build_executables(one, folder=tmp_path / one.platform, progress=NoProgress()))
        for one in (program, always)
    )
    assert set(chosen.executables.by_name) == set(program.names())
    engine, other = (
        engine_of(Executor(one, counted.executables, params, *init_state(one)), limits)
        for one, counted in ((program, chosen), (always, others))
    )

    Executor(program, chosen.executables, params, *init_state(program)).warm_up()
    steps = {b.name: 1 if b.num_prefills else WARM_UP_RUNS for b in limits.buckets}
    assert chosen.calls == steps

    def ran_extras(requests: Sequence[SamplingParams]) -> set[bool]:
        """Whether extras ran, of all steps; the tokens are those of steps with extras."""
        chosen.calls.clear()
        prompts = [(5, 6, 7), (9, 8, 7, 6, 5)]
        assert run(engine, prompts, requests) == run(other, prompts, requests)
        return {name.endswith("_extras") for name in chosen.calls}

    assert ran_extras([PLAIN, GREEDY]) == {False}
    for asking in ASKING:
        assert ran_extras([asking, asking]) == {True}
    assert ran_extras([PLAIN, ASKING[0]]) == {False, True}
