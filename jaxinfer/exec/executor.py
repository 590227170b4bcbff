"""Runs compiled steps: holds weights, KV state, slots and the bucket -> executable table.

Owns: the device state between steps and the translation of a finished step into a ``StepResult``.
``launch`` returns as soon as the step is queued; ``collect`` waits for its tokens. Must not know:
which request comes next, text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import msgspec
import numpy as np

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import Request
from jaxinfer.core.step import (
    RowResult,
    ScheduledSeq,
    SlotAdmission,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from jaxinfer.exec.batch import NO_SETTINGS, NOWHERE, extras_of, pack
from jaxinfer.exec.batch_rooms import BatchRooms
from jaxinfer.exec.compile import Compiled, Executables
from jaxinfer.exec.forward import StepOutput, flat_kv_state, flat_params
from jaxinfer.exec.program import ADMIT, ADMITTED_BY_STEP, Program
from jaxinfer.exec.sampling import Logprobs
from jaxinfer.exec.slots import SlotState, needs_admission, settings_of, slot_rows
from jaxinfer.exec.token_board import TokenBoard
from jaxinfer.models.base import Params
from jaxinfer.nn.kv import KVState

WARM_UP_RUNS = 2  # of a decode step on a GPU: one that loads its kernels, one that is recorded


@dataclass(frozen=True)
class InFlight:
    """A launched step whose tokens are still on the device."""

    plan: StepPlan
    requests: tuple[Request, ...]  # of each row, decodes first
    output: StepOutput
    number: int  # on the board, where there is one


class Executor:
    """The device side of an engine. Not thread-safe: one thread launches and collects."""

    def __init__(
        self,
        program: Program,
        executables: Executables,
        params: Params,
        pages: KVState,
        slots: SlotState,
    ) -> None:
        self._program = program
        self._executables = executables
        self._weights = flat_params(program.model, params)
        self._weights_of_parts = [
            tuple(self._weights[i] for i in own) for own in program.weights_of_parts
        ]
        limits = program.limits
        self._pages = flat_kv_state(pages)
        self._slots = slots
        # the host's mirror of which request a slot's parameters belong to
        self._requests: list[Request | None] = [None] * limits.max_num_seqs
        rows = max(bucket.num_seqs for bucket in limits.buckets)
        self._board = TokenBoard.of_device(jax.devices()[0], rows)
        # A CPU's arrays are host memory already. Asking for a copy would only leave a callback that
        # needs the interpreter, and aborts the process when it comes while Python shuts down.
        self._copies_to_host = self._board is None and jax.default_backend() != "cpu"
        self._rooms = BatchRooms.of_device(jax.devices()[0])
        self._layouts = {bucket: program.layout(bucket) for bucket in limits.buckets}
        self._nobody = program.no_admissions(ADMITTED_BY_STEP)

    def warm_up(self) -> None:
        """Run steps on padding, so that no request pays for what only their first runs do.

        On a CPU steps have nothing of their own to prepare, and the smallest runs once. On a GPU
        each has kernels to load and, at its second run, a CUDA graph for XLA to record: 1 ms of a
        decode step, but nothing beside a prompt's own time. Steps with extras are left out, and
        those in which rows decode beside prompts, which are not loaded yet: 7 on an H200, 10 to 40
        ms each.
        """
        first = (bucket for bucket in self._layouts if not bucket.is_mixed)
        buckets = sorted(first, key=lambda bucket: bucket.num_tokens, reverse=True)
        each = self._program.has_plain_steps
        runs = [
            self.launch(StepPlan(-1, bucket, (), (), ()))
            for bucket in (buckets if each else buckets[-1:])
            for _ in range(WARM_UP_RUNS if each and not bucket.num_prefills else 1)
        ]
        for run in runs:
            self.collect(run)

    def launch(self, plan: StepPlan) -> InFlight:
        """Queue one step and return without waiting for it.

        What the host prepares comes first, so that an error there concerns this step alone. Once
        the device has taken the state, an error loses it: ``EngineError``.
        """
        for admission in plan.admissions:
            self._requests[admission.slot] = admission.request
        requests = tuple(self._request(row) for row in plan.rows)
        extras = extras_of(requests)
        bucket = self._program.bucket_of(plan.bucket, extras=any(extras))
        plan = msgspec.structs.replace(plan, bucket=bucket)
        place = NOWHERE if self._board is None else self._board.next_place()
        settings = settings_of(requests[len(plan.decodes) :]) if plan.prefills else NO_SETTINGS
        batch = pack(plan, self._layouts[bucket], extras, settings, place)
        by_step: list[np.ndarray] = []  # rows that it admits itself
        admissions: list[np.ndarray] = []  # rows of calls before it
        if self._program.admits(bucket, extras=any(extras)):
            own, admissions = self._admission_rows(plan)
            by_step.append(own)
        by_name = self._executables.by_name
        step = by_name[self._program.step_name(bucket, extras=any(extras))]
        first = None
        if self._program.begins_apart(bucket, any(extras)):
            first = by_name[self._program.first_name(bucket)]
        with _device_errors(plan):
            handed = batch if self._rooms is None else self._rooms.filled(batch)
            for rows in admissions:
                self._slots = by_name[ADMIT](self._slots, rows)
            if first is None:
                self._pages, self._slots, output = step(
                    self._weights, self._pages, self._slots, handed, *by_step
                )
            else:
                output = self._launch_parts(first, step, handed)
            if self._rooms is not None:
                self._rooms.read_by(output.token_ids, handed)
            if self._copies_to_host:
                output.token_ids.copy_to_host_async()
        return InFlight(plan, requests, output, place[-1])

    def collect(self, step: InFlight) -> StepResult:
        """Wait for a launched step and read what its rows produced."""
        with _device_errors(step.plan):
            token_ids = self._drawn(step).tolist()
        rows = step.plan.rows
        num_decodes = len(step.plan.decodes)
        num_padding = step.plan.bucket.num_decodes - num_decodes  # rows before the prefills
        reader = _LogprobReader(step)
        results: list[RowResult] = []
        for number, (row, request) in enumerate(zip(rows, step.requests, strict=True)):
            index = number if number < num_decodes else number + num_padding
            results.append(
                RowResult(
                    request_id=row.request_id,
                    epoch=row.epoch,
                    token_id=token_ids[index] if row.samples else None,
                    logprobs=reader.sampled(index, token_ids[index], row, request),
                    prompt_logprobs=reader.prompt(row, request),
                )
            )
        return StepResult(step.plan.step_id, tuple(results))

    def _launch_parts(self, first: Compiled, second: Compiled, handed: Any) -> StepOutput:
        """See ``cut.CutStep``: the device runs the first while the host prepares the second."""
        count = 2 * self._program.first_layers  # pools
        pages, others = self._pages[:count], self._pages[count:]
        of_first, of_second = self._weights_of_parts
        pages, carried = first(of_first, pages, self._slots, handed)
        others, self._slots, output = second(of_second, pages, others, self._slots, handed, carried)
        self._pages = (*pages, *others)
        return output  # type: ignore[no-any-return]

    def _drawn(self, step: InFlight) -> np.ndarray:  # int32[B]
        tokens = step.output.token_ids
        return np.asarray(tokens) if self._board is None else self._board.read(step.number, tokens)

    def _admission_rows(self, plan: StepPlan) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of a plan's admissions that extras need: what its step takes, and what calls of ``ADMIT``
        take before it.
        """
        needed = [one for one in plan.admissions if needs_admission(one.request)]
        first, others = needed[:ADMITTED_BY_STEP], needed[ADMITTED_BY_STEP:]
        size = self._program.admitted_at_once
        by_step = self._slot_rows(first, ADMITTED_BY_STEP) if first else self._nobody
        return by_step, [self._slot_rows(some, size) for some in batched(others, size)]

    def _slot_rows(self, admissions: Sequence[SlotAdmission], count: int) -> np.ndarray:
        """What admits these, as ``count`` rows."""
        return slot_rows(
            admissions,
            count,
            sink_slot=self._program.limits.max_num_seqs,
            vocab_size=self._program.model.config.vocab_size,
            max_model_len=self._program.limits.max_model_len,
        )

    def _request(self, row: ScheduledSeq) -> Request:
        request = self._requests[row.slot]
        assert request is not None, f"slot {row.slot} was scheduled before it was admitted"
        return request


@contextmanager
def _device_errors(plan: StepPlan) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise EngineError(f"the device failed in step {plan.step_id}: {error}") from error


class _LogprobReader:
    """Reads the logprobs of a step row by row; copies each array once, and only when asked for."""

    def __init__(self, step: InFlight) -> None:
        self._output = step.output
        self._sampled: Logprobs | None = None
        self._prompt: Logprobs | None = None
        self._prompt_start = 0  # where the next prefill row's chunk starts in the prefill part

    def sampled(
        self, index: int, token_id: int, row: ScheduledSeq, request: Request
    ) -> TokenLogprobs | None:
        """Of the token that a row drew."""
        top = request.sampling.logprobs
        if top is None or not row.samples:
            return None
        if self._sampled is None:
            self._sampled = _host(self._output.logprobs)
        return _token_logprobs(self._sampled, index, token_id, top)

    def prompt(self, row: ScheduledSeq, request: Request) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow a chunk's own; rows come in the plan's order."""
        if row.token_ids is None:
            return ()
        start = self._prompt_start
        self._prompt_start += row.num_scheduled_tokens
        top = request.sampling.prompt_logprobs
        if top is None or row.target_ids is None:
            return ()
        if self._prompt is None:
            self._prompt = _host(self._output.prompt_logprobs)
        return tuple(
            _token_logprobs(self._prompt, start + offset, token_id, top)
            for offset, token_id in enumerate(row.target_ids.tolist())
            if token_id >= 0
        )


def _token_logprobs(source: Logprobs, index: int, token_id: int, top: int) -> TokenLogprobs:
    """One position: the chosen token first, then the ``top`` most likely ones."""
    ids: list[int] = source.top_ids[index, :top].tolist()
    values: list[float] = source.top_logprobs[index, :top].tolist()
    chosen = float(source.chosen[index])
    return TokenLogprobs((token_id, *ids), (chosen, *values), int(source.rank[index]))


def _host(logprobs: Logprobs | None) -> Logprobs:
    """The same record with numpy arrays."""
    assert logprobs is not None, "a request that asks for logprobs was in a step without extras"
    return Logprobs(*(np.asarray(array) for array in logprobs))  # type: ignore[arg-type]
