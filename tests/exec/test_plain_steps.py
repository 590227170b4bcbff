"""Nothing in a step makes the host wait, and extras run after the step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import ScheduledSeq
from jaxinfer.exec.calls.admit import ADMIT
from jaxinfer.exec.calls.extras import (
    EXTRAS,
    ExtrasFunction,
    ExtrasOutput,
    extras_rows,
    pack_extras,
)
from jaxinfer.exec.calls.score import SCORE
from jaxinfer.exec.compile.build import build_executables
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.stages import first_names
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import WARM_UP_RUNS, Executor
from jaxinfer.exec.step.sampling import BLOCK, read_logprobs
from jaxinfer.exec.step.slots import SlotState, settings_of
from jaxinfer.models.base import Model
from kit.counted import Counted
from kit.engines import engine_of, run, tiny_limits
from kit.tiny_models import tiny_model
from pallas_kernels.harness import registry
from pallas_kernels.harness.pins import ALL_XLA

LIMITS = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16)
BUCKETS = [bucket.name for bucket in LIMITS.buckets]
WAITS = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
SORTS = ("stablehlo.sort", "chlo.top_k")
SMALLEST_BLOCK = 2**21  # bytes that XLA's allocator over virtual memory uses for a small array

PLAIN = SamplingParams(max_tokens=6, seed=1, top_k=9, top_p=0.9, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
WITH_EXTRAS = (
    SamplingParams(max_tokens=4, seed=2, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=3, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=4, logit_bias={5: 2.0}, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=5, prompt_logprobs=1, ignore_eos=True),
)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("bucket", BUCKETS)
def test_no_branch_loop_or_sort(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a GPU's step outside its kernels has none; kernels are not traced."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    with in_place_of_triton_call(recorder := Recorder()):
        plain = program.trace(bucket).lower().as_text()
        assert {"_draw", "_add_and_norm"} <= {call.kernel.__name__ for call in recorder.calls}
        assert not [word for word in (*WAITS, *SORTS) if word in plain]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_batch_is_only_read_by_its_copy(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA records kernels again that read memory which has moved, and a batch always has."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    with in_place_of_triton_call(Recorder()):
        step = program.trace(bucket).jaxpr.jaxpr
    layout = program.layout(next(b for b in LIMITS.buckets if b.name == bucket))
    (flat,) = (var for var in step.invars if var.aval.shape == layout.abstract().shape)
    (reader,) = (equation for equation in step.eqns if flat in equation.invars)
    own = reader.invars[0].aval
    assert reader.primitive.name == "dynamic_update_slice"
    assert own.size * own.dtype.itemsize > SMALLEST_BLOCK


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_a_prompts_last_layer_is_a_step_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the last token of each row, unless the bucket scores."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")  # a model of two layers
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    both, one = ["_attend_tile", "_append_and_attend"], ["_attend_tile"]
    scoring = replace(program, limits=tiny_limits(max_num_seqs=1, max_num_batched_tokens=16))
    for one_of, name, attention in ((program, "p16x1", both), (scoring, "p16x1", one)):
        with in_place_of_triton_call(recorder := Recorder()):
            one_of.trace(name)
        assert [c.kernel.__name__ for c in recorder.calls if c.kernel.__name__ in both] == attention


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_engine_that_pools_has_prompt_steps_without_a_head(
    pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the last token's vector the last layer is a step of decoding."""
    from kit.triton_shims import Recorder, in_place_of_triton_call

    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16, pooling=pooling)
    program = Program(tiny_model("qwen3")[0], limits, platform="gpu")  # a model of two layers
    assert first_names(program) == program.names() == ("admit", "p16x1")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    with in_place_of_triton_call(recorder := Recorder()):
        traced = [program.trace(name) for name in program.names()[1:]]
    kernels = [call.kernel.__name__ for call in recorder.calls]
    assert ("_append_and_attend" in kernels) == (pooling == "last"), kernels
    vocabulary = program.model.config.vocab_size
    assert f"x{vocabulary}xf32" not in "".join(one.lower().as_text() for one in traced)


def test_extras_and_scores_have_no_layers() -> None:
    """Their only matmul is the head's, so they are compiled quickly and serve every bucket."""
    program = Program(tiny_model("qwen3")[0], LIMITS, platform="gpu")
    for name in (EXTRAS.executable(extras_rows(program)[0]), SCORE.executable(16)):
        assert program.trace(name).lower().as_text().count("stablehlo.dot_general") == 1


def test_extras_run_only_for_rows_with_extras_and_tokens_are_the_same(tmp_path: Path) -> None:
    model, params = tiny_model("llama")
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16)
    of_gpu, of_cpu = (Program(model, limits, platform=platform) for platform in ("gpu", "cpu"))
    device, host = (
        Counted(
            build_executables(
                Store.of(one, program_memory(one, None), tmp_path / one.platform), NoProgress()
            )
        )
        for one in (of_gpu, of_cpu)
    )
    assert set(device.executables.by_name) == set(of_gpu.names())
    engine, other = (
        engine_of(
            Executor(one, counted.executables, params, *init_state(one)),
            limits,
        )
        for one, counted in ((of_gpu, device), (of_cpu, host))
    )

    Executor(of_gpu, device.executables, params, *init_state(of_gpu)).warm_up()
    assert set(device.calls) == set(of_gpu.names()), "each has run once"
    assert {device.calls[b.name] for b in limits.buckets if not b.num_prefills} == {WARM_UP_RUNS}

    def ran(requests: Sequence[SamplingParams]) -> Counter[str]:
        """The calls other than steps. Tokens must equal those of an engine that keeps logits."""
        device.calls.clear()
        prompts = [(5, 6, 7), (9, 8, 7, 6, 5)]
        assert run(engine, prompts, requests) == run(other, prompts, requests)
        steps = {bucket.name for bucket in limits.buckets}
        return Counter({name: n for name, n in device.calls.items() if name not in steps})

    assert not ran([PLAIN, GREEDY])
    logprobs, penalty, bias, prompt_logprobs = WITH_EXTRAS
    assert ran([PLAIN, logprobs]) == {"extras2": 4}
    assert ran([penalty, bias]) == {ADMIT.name: 2, "extras2": 5}
    assert ran([prompt_logprobs, GREEDY]) == {"score16": 1}


def test_many_rows_with_extras_are_drawn_by_blocks() -> None:
    """129 rows are more than ``BLOCK``: each draws the token that it draws alone."""
    count, model = 2 * BLOCK + 1, tiny_model("llama")[0]
    slots = _slots_of(model, [_request(i) for i in range(count)])
    rows = [ScheduledSeq("r", 0, slot, 3 + slot % 9, 1, IntLog()) for slot in range(count)]

    def drawn(rows: Sequence[ScheduledSeq]) -> tuple[SlotState, ExtrasOutput]:
        number = 3 * BLOCK if len(rows) > 1 else 1
        draw = jax.jit(ExtrasFunction(model, number, keeps_logits=True))
        masks = np.full((number, cdiv(model.config.vocab_size, 32)), 0xFFFF_FFFF, np.uint32)
        sampling = [SamplingParams(logprobs=0)] * len(rows)
        return draw({}, slots, pack_extras(rows, number, count, sampling), masks)

    after, output = drawn(rows)
    for slot in (0, BLOCK - 1, BLOCK, count - 1):
        alone_after, alone = drawn(rows[slot : slot + 1])
        assert output.token_ids[slot] == alone.token_ids[0]
        place = (slot, rows[slot].num_computed_tokens + 1)
        assert after.token_ids[place] == alone_after.token_ids[place] == alone.token_ids[0]
        many, one = (read_logprobs(np.asarray(o.logprobs)) for o in (output, alone))
        for all_of, one_of in zip(many, one, strict=True):
            np.testing.assert_allclose(all_of[slot], one_of[0], rtol=1e-6)


CHANGES = (
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 4.0},
    {"logit_bias": {0: 50.0}},
    {"min_tokens": 99, "max_tokens": 99},
)


def test_a_cpu_skips_only_what_no_row_of_a_call_needs() -> None:
    """The tokens and logprobs of all branches, and of the native kernel, are those of plain XLA."""
    model, rng, count = tiny_model("llama")[0], np.random.default_rng(4), 1 + len(CHANGES)
    requests = [_request(0), *(_request(0, **change) for change in CHANGES)]
    slots, marked = (_slots_of(model, requests, draws_once=once) for once in (False, True))
    masks = rng.integers(0, 2**32, (8, cdiv(model.config.vocab_size, 32)), np.uint32)
    masks[:, 0] |= 1  # token 0 may be drawn
    whole = jax.jit(ExtrasFunction(model, 8, keeps_logits=True, pins=ALL_XLA))
    lean = jax.jit(ExtrasFunction(model, 8, keeps_logits=True, draws_once=True))

    def drawn(slot: int, needs_logprobs: bool) -> int:
        """The token of a slot, in a call with slot 0, which has no extras."""
        rows = [ScheduledSeq("r", 0, one, 30, 1, IntLog()) for one in (0, slot)]
        sampling = [SamplingParams(logprobs=0 if needs_logprobs else None)]
        wire = pack_extras(rows, 8, count, sampling)
        after, expected = whole({}, slots, wire, masks)
        lean_after, found = lean({}, slots._replace(settings=marked.settings), wire, masks)
        np.testing.assert_array_equal(lean_after.token_ids, after.token_ids)
        logprobs = np.asarray(expected.logprobs) * needs_logprobs
        pair = (read_logprobs(one) for one in (np.asarray(found.logprobs), logprobs))
        for one, other in zip(*pair, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        token_id = int(found.token_ids[1])
        assert masks[1, token_id // 32] >> token_id % 32 & 1
        return token_id

    same = jnp.tile(slots.drawn_from[0], (count + 1, 1))
    slots = slots._replace(drawn_from=same, bias_ids=jnp.zeros_like(slots.bias_ids))
    plain = drawn(0, needs_logprobs=False)
    assert drawn(0, needs_logprobs=True) == plain != 0
    slots = slots._replace(
        token_ids=jnp.full_like(slots.token_ids, plain),
        stop_ids=jnp.full_like(slots.stop_ids, plain),
        bias_values=jnp.full_like(slots.bias_values, 50.0),
    )
    assert drawn(0, needs_logprobs=False) == plain
    for slot in range(1, count):
        assert drawn(slot, needs_logprobs=False) != plain, CHANGES[slot - 1]


def _slots_of(model: Model, requests: Sequence[Request], draws_once: bool = False) -> SlotState:
    """Slots of these requests and one for padding, with random histories and logits."""
    later = (lambda request: request.has_extras) if draws_once else None
    rng, count = np.random.default_rng(3), len(requests)
    limits = msgspec.structs.replace(LIMITS, max_num_seqs=count)
    slots = init_state(Program(model, limits, platform="cpu"))[1]
    return slots._replace(
        settings=slots.settings.at[:count].set(settings_of(requests, later)),
        token_ids=jnp.asarray(rng.integers(0, 300, slots.token_ids.shape), jnp.int32),
        drawn_from=jnp.asarray(rng.standard_normal(slots.drawn_from.shape), jnp.float32),
    )


def _request(number: int, **extras: Any) -> Request:
    own = {"frequency_penalty": 0.1 * (number % 7)} | extras
    sampling = SamplingParams(temperature=0.5 + number % 3, top_k=number % 5, **own)
    return Request(
        request_id=str(number),
        prompt_token_ids=(1, 2),
        sampling=sampling,
        max_tokens=9,
        seed=number,
    )
