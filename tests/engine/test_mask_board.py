"""Rows whose step waits for their masks: answers are those of draws after the step.

A CPU's step does not wait for masks, so here a Python function reads the board in place of the
GPU's kernel, which ``tests/kernels/test_mask.py`` runs. The launch of a step with such a function
returns when the step has ended, so steps overlap here only where no mask is read.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.constraints import Constraints
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.run.in_flight import InFlight, Prepared
from jaxinfer.exec.run.mask_board import MaskBoard
from jaxinfer.exec.step import sampling
from kit.engines import compiled_for, engine_of, run, tiny_engine, tiny_limits, tokens
from kit.tiny_models import tiny_model
from pallas_kernels.mask.board import NUMBER_WORDS, board_words, mask_words
from pallas_kernels.sample.xla import allowed_tokens

SECONDS = 20.0  # that a step waits at most
VOCAB = 320
WORDS, SLOTS = mask_words(VOCAB), tiny_limits().max_num_seqs + 1
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


def read(wanted: Any, slots: Any, place: Any) -> tuple[np.ndarray, np.ndarray]:
    """The masks of rows, and whether each was there."""
    wanted, slots = np.asarray(wanted), np.asarray(slots)
    low, high, number = map(int, np.asarray(place))
    base = (high & 0xFFFF_FFFF) << 32 | low & 0xFFFF_FFFF
    masks, came = np.full((len(wanted), WORDS), -1, np.int32), np.ones(len(wanted), np.int32)
    if base:
        memory = (ctypes.c_int32 * board_words(SLOTS, VOCAB)).from_address(base)
        board, first = np.ctypeslib.as_array(memory), SLOTS * NUMBER_WORDS
        numbers, bits = (
            board[:first:NUMBER_WORDS],
            board[first : first + SLOTS * WORDS].reshape(SLOTS, WORDS),
        )
        end = time.monotonic() + SECONDS
        for row in np.flatnonzero(wanted):
            while numbers[slots[row]] != number and time.monotonic() < end:
                time.sleep(0.001)
            came[row], masks[row] = numbers[slots[row]] == number, bits[slots[row]]
    return masks, came


def mask(
    logits: jax.Array, finite: jax.Array, wanted: jax.Array, *others: jax.Array, **_: Any
) -> tuple[jax.Array, jax.Array]:
    """In place of ``pallas_kernels.mask``."""
    del finite
    shapes = (
        jax.ShapeDtypeStruct((logits.shape[0], WORDS), jnp.int32),
        jax.ShapeDtypeStruct(wanted.shape, jnp.int32),
    )
    bits, came = io_callback(read, shapes, wanted, *others)
    allowed = allowed_tokens(jax.lax.bitcast_convert_type(bits, jnp.uint32), logits.shape[1])
    return jnp.where(allowed, logits, -jnp.inf), came


def no_mask(
    logits: jax.Array, finite: jax.Array, wanted: jax.Array, *_: jax.Array, **others: Any
) -> tuple[jax.Array, jax.Array]:
    """All masks are there and allow every token."""
    del finite, others
    return logits, jnp.ones_like(wanted)


def waiting_engine(function: Any, *, overlap: bool) -> Engine:
    """An engine with pages for about two sequences, so that others are preempted."""
    (model, params), limits = tiny_model("llama"), tiny_limits(num_pages=16)
    buckets = bucket_table(
        4, 32, decode_start=4, prefill_start=64, prefill_factor=8, mixed_start=16
    )
    limits = replace(limits, buckets=buckets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "reads_masks", True)
        patch.setattr(Program, "draws_once", False)
        patch.setattr(sampling, "mask", function)
        program = Program(model, limits)
        executables = compiled_for(program, extras=True)
        executor = Executor(program, executables, params, *init_state(program))
    return engine_of(executor, limits, overlap=overlap)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return waiting_engine(mask, overlap=False)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    drawn_again = tiny_engine(tiny_limits())
    return {name: tokens(run(drawn_again, PROMPTS, kind)) for name, kind in KINDS.items()}


@pytest.fixture
def not_drawn_once() -> Iterator[None]:
    """As on a GPU, a step draws also for rows with extras."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "draws_once", False)
        yield


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("not_drawn_once")
def test_answers_are_those_of_draws_after_the_step(
    engine: Engine, expected: dict[str, Any], name: str
) -> None:
    before = engine.stats().num_preemptions
    assert tokens(run(engine, PROMPTS, KINDS[name])) == expected[name]
    assert engine.stats().num_preemptions > before


@pytest.mark.usefixtures("not_drawn_once")
def test_a_mask_that_does_not_come_ends_only_its_request(
    engine: Engine, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constraints, "write", lambda *_: None)
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.0)
    for index, (prompt, kind) in enumerate(zip(PROMPTS, KINDS["some"], strict=True)):
        engine.add_request(str(index), prompt, kind)
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


@pytest.mark.usefixtures("not_drawn_once")
def test_masks_of_a_step_in_flight_are_written_when_the_one_before_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overlapping = waiting_engine(no_mask, overlap=True)
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
    run(overlapping, PROMPTS, [loose, PLAIN] * (len(PROMPTS) // 2))
    order: dict[int, list[str]] = {}
    for what, number in seen:
        order.setdefault(number, []).append(what)
    kinds = {tuple(steps) for steps in order.values()}
    assert kinds == {
        ("written", "launched", "collected"),  # none was in flight
        ("launched", "written", "collected"),
    }
    assert completed == sorted({*completed}) == [*order], "each step once, in order"
