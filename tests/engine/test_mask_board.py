"""Rows whose step waits for their masks: answers are those of draws after the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.constraints import Constraints
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.run.in_flight import InFlight, Prepared
from jaxinfer.exec.run.mask_board import MaskBoard
from kit.engines import compiled_for, copy_to_cpu, engine_of, run, tiny_limits, tokens
from kit.tiny_models import tiny_model
from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.mask import native
from pallas_kernels.mask.board import board_words

VOCAB = 320
PROMPTS = ([72, 105, 33], [9, 8, 7, 6], [40, 41, 42, 43, 44], [77] * 9, [1, 2], [3] * 20)
FORM = {"regex": "[0-9]{3}-(ab|c){1,9}-[a-z]{8}"}
PLAIN = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
MASKED = replace(PLAIN, structured_outputs=FORM)
KINDS = {
    "all": [MASKED] * len(PROMPTS),
    "some": [MASKED, PLAIN] * (len(PROMPTS) // 2),
    "n": [replace(MASKED, n=2)] * len(PROMPTS),
    "with other extras": [replace(MASKED, logprobs=2), MASKED, PLAIN] * (len(PROMPTS) // 3),
}
DRAWN_AGAIN = Pins((("mask", "xla"),))

pytestmark = pytest.mark.skipif(native.supports() is not None, reason="the library is not built")


def small_engine(pins: Pins = NO_PINS) -> Engine:
    """An engine with pages for about two sequences, so that others are preempted."""
    (model, params), limits = tiny_model("llama"), tiny_limits(num_pages=16)
    buckets = bucket_table(
        4, 32, decode_start=4, prefill_start=64, prefill_factor=8, mixed_start=16
    )
    limits = replace(limits, buckets=buckets)
    program = Program(model, limits, pins=pins)
    assert program.reads_masks == (pins == NO_PINS)
    executables = compiled_for(program, extras=True)
    return engine_of(Executor(program, executables, params, *init_state(program)), limits)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    drawn_again = small_engine(DRAWN_AGAIN)
    return {name: tokens(run(drawn_again, PROMPTS, kind)) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_draws_after_the_step(
    engine: Engine, expected: dict[str, Any], name: str
) -> None:
    before = engine.stats().num_preemptions
    assert tokens(run(engine, PROMPTS, KINDS[name])) == expected[name]
    assert engine.stats().num_preemptions > before


def test_a_mask_that_does_not_come_ends_only_its_request(
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SECONDS", 0.2)
    engine = small_engine()
    monkeypatch.setattr(Constraints, "write", lambda *_: None)
    for index, (prompt, kind) in enumerate(zip(PROMPTS, KINDS["some"], strict=True)):
        engine.add_request(str(index), RequestSpec(prompt, kind))
    errors, found = dict[str, str](), dict[str, list[int]]()
    while engine.has_work:
        for delta in engine.step().deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error:
                errors[delta.request_id] = delta.error
    assert errors.keys() == {"0", "2", "4"}
    assert "too late" in errors["0"]
    for index in (1, 3, 5):
        assert [tuple(found[str(index)])] == [tuple(one) for one in expected["some"][index]]


def test_masks_of_a_step_in_flight_are_written_when_the_one_before_is_collected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    launch, collect, write = Executor.launch, Executor.collect, Constraints.write
    complete, completed = MaskBoard.complete, list[int]()

    def launched(self: Executor, plan: Any) -> InFlight:
        step = launch(self, plan)
        if step.prepared.masked:
            seen.append(("launched", step.mask_number))
        return step

    def collected(self: Executor, step: InFlight) -> Any:
        if step.prepared.masked:
            seen.append(("collected", step.mask_number))
        return collect(self, step)

    def written(self: Constraints, prepared: Prepared, number: int) -> None:
        if prepared.masked:
            seen.append(("written", number))
        write(self, prepared, number)

    def recorded(self: MaskBoard, number: int, slots: Sequence[int]) -> None:
        completed.append(number)
        complete(self, number, slots)

    monkeypatch.setattr(Executor, "launch", launched)
    monkeypatch.setattr(Executor, "collect", collected)
    monkeypatch.setattr(Constraints, "write", written)
    monkeypatch.setattr(MaskBoard, "complete", recorded)
    loose = replace(PLAIN, allowed_token_ids=tuple(range(VOCAB)))
    run(engine, PROMPTS, [loose, PLAIN] * (len(PROMPTS) // 2))
    order: dict[int, list[str]] = {}
    for what, number in seen:
        order.setdefault(number, []).append(what)
    kinds = {tuple(steps) for steps in order.values()}
    assert kinds == {
        ("written", "launched", "collected"),  # none was in flight
        ("launched", "written", "collected"),
    }
    assert completed == sorted({*completed}) == [*order], "each step once, in order"


def test_a_copy_of_the_board_in_a_devices_memory(
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU reads a copy; here a CPU does, whose numbers come after the bits."""
    copies = list[list[int]]()

    def board_of(program: Program) -> MaskBoard:
        slots = program.limits.max_num_seqs + 1
        memory, on_device = np.zeros((2, 2, board_words(slots, VOCAB)), np.int32)
        first = on_device.ctypes.data

        def copy(*pairs: tuple[int, np.ndarray]) -> None:
            assert all(first <= to < first + on_device.nbytes for to, _ in pairs)
            copies.append([array.ndim for _, array in pairs])
            copy_to_cpu(*pairs)

        return MaskBoard(memory, slots, VOCAB, first, copy)

    monkeypatch.setattr(MaskBoard, "of_program", board_of)
    found = tokens(run(small_engine(), PROMPTS, KINDS["some"]))
    assert found == expected["some"]
    assert len(copies) > 20 and all(one == [2, 1] for one in copies)


def test_draws_with_other_extras_are_launched_when_the_masks_of_their_step_are_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their staging buffers may wait for the step, which waits for its masks."""
    order = list[tuple[str, int]]()
    draw, write = Executor._draw_all_extras, Constraints.write

    def drawn(self: Executor, step: InFlight) -> None:
        if step.prepared.masked:
            order.append(("drawn", step.mask_number))
        draw(self, step)

    def written(self: Constraints, prepared: Prepared, number: int) -> None:
        order.append(("written", number))
        write(self, prepared, number)

    monkeypatch.setattr(Executor, "_draw_all_extras", drawn)
    monkeypatch.setattr(Constraints, "write", written)
    loose = replace(PLAIN, allowed_token_ids=tuple(range(VOCAB)))
    run(engine, PROMPTS, [loose, replace(PLAIN, logprobs=2)] * (len(PROMPTS) // 2))
    numbers = [number for what, number in order if what == "drawn"]
    assert len(numbers) > 5
    for number in numbers:
        assert order.index(("written", number)) < order.index(("drawn", number))
