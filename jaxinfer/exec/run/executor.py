"""Runs compiled steps: holds weights, layer state, slots and executables.

A step is a sequence of up to five kinds of calls: ``ADMIT`` for requests whose slots need more than
settings, ``STEER`` for steered requests, the step of the bucket, then draws with extras and scores
of prompts.

The mask of a constrained row depends on its token in the step before. If that step is in flight,
the mask is written when it is collected, to the mask board or for draws that are launched then. At
most two steps are in flight, so that is before any later one and no row waits for another's mask.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import batched
from typing import Any

import jax
import msgspec
import numpy as np

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import Request
from jaxinfer.core.step import Bucket, ScheduledSeq, StepPlan, StepResult
from jaxinfer.exec.compile.build import Compiled, Executables
from jaxinfer.exec.compile.program import ADMIT, EXTRAS, FIRST, SCORE, STEER, Program
from jaxinfer.exec.run.batch_staging import BatchStaging
from jaxinfer.exec.run.constraints import Constraints
from jaxinfer.exec.run.device_memory import compile_init_state, is_intact, no_steering
from jaxinfer.exec.run.in_flight import (
    LOGGER,
    ExtrasCall,
    InFlight,
    Prepared,
    RowKey,
    device_failed,
    fail_extras,
    only_rows,
    row_results,
    tokens_of_rows,
)
from jaxinfer.exec.run.mask_board import MaskBoard
from jaxinfer.exec.run.prompts import with_prompts
from jaxinfer.exec.run.token_board import TokenBoard
from jaxinfer.exec.step.batch import NO_PLACE, NO_SETTINGS, pack
from jaxinfer.exec.step.extras import pack_extras
from jaxinfer.exec.step.forward import StepOutput, flat_params
from jaxinfer.exec.step.points import Steering, pack_steering
from jaxinfer.exec.step.slots import SlotState, settings_of
from jaxinfer.models.base import Params, head_params
from jaxinfer.nn.state import State

WARM_UP_RUNS = 2  # of a decode step on a GPU: the first loads its kernels, the second is recorded


class Executor:
    """The device side of an engine. Not thread-safe: one thread launches and collects."""

    def __init__(
        self,
        program: Program,
        executables: Executables,
        params: Params,
        state: State,
        slots: SlotState,
    ) -> None:
        self._program = program
        self._by_name = dict(executables.by_name)
        self.replace_weights(params)
        limits = program.limits
        self._state = state
        self._slots = slots
        self._steering = no_steering(program)
        self._requests: dict[int, Request] = {}  # of each slot
        self._slots_with_extras: set[int] = set()
        self._constraints = Constraints(program.mask_words, MaskBoard.of_program(program))
        self._in_flight: deque[InFlight] = deque()  # launched and not collected
        rows = max([*(bucket.num_draws for bucket in limits.buckets), *program.extras_rows])
        self._board = TokenBoard.of_device(program.placement.device, rows)
        self._staging = BatchStaging.of_device(program.placement.device)
        self._layouts = {bucket: program.layout(bucket) for bucket in limits.buckets}

    def replace_weights(self, params: Params | None) -> None:
        """Let later launches read these weights; steps in flight keep the old ones.

        The caller has checked shapes, dtypes and devices. With None no weights are held until the
        next call; the old ones are not deleted, as a user may hold them.
        """
        flat = () if params is None else flat_params(self._program.model, params)
        parts = self._program.parts if flat else ()
        self._weights_of_parts = [tuple(flat[i] for i in own.weights) for own in parts]
        self._weights, self._head = flat, head_params(params or {})
        self.params = params

    def forget(self, request_ids: Sequence[str]) -> None:
        """See ``StepExecutor``."""
        self._constraints.forget(request_ids)

    def free_state(self) -> None:
        """See ``StepExecutor``."""
        for array in jax.tree.leaves(self._own_arrays):
            array.delete()

    def make_state(self) -> None:
        """See ``StepExecutor``; raises ``EngineError`` if the device has no memory for it."""
        self._state, self._slots = self._new_state()
        self._steering = no_steering(self._program)

    @property
    def _own_arrays(self) -> tuple[State, SlotState, Steering]:
        """The arrays on the device that calls consume and replace."""
        return self._state, self._slots, self._steering

    @cached_property  # compiled when the engine wakes for the first time
    def _new_state(self) -> Callable[[], tuple[State, SlotState]]:
        return compile_init_state(self._program)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets whose executables are loaded."""
        names_of, loaded = self._program.names_of, self._by_name.keys()
        return tuple(bucket for bucket in self._layouts if loaded >= {*names_of(bucket)})

    def add(self, loaded: Mapping[str, Compiled]) -> tuple[Bucket, ...]:
        """Add later executables; returns the buckets now complete."""
        before = self.buckets
        self._by_name |= loaded
        return tuple(bucket for bucket in self.buckets if bucket not in before)

    def warm_up(self) -> None:
        """Run every executable on padding, so that no request waits for work of first runs.

        A GPU loads kernels at the first run of an executable, and at the second run of a decode
        step XLA records a CUDA graph, which takes 1 ms. Prompt steps run once, as recording is
        short compared with their own time. On a CPU only the smallest step runs, which starts XLA's
        threads.
        """
        buckets = sorted(self.buckets, key=lambda b: (b.num_tokens, b.taps), reverse=True)
        if self._program.platform == "cpu":
            self.run_once(buckets[-1:])
            return
        self.run_once(buckets)
        self._admit(self._program.admission_rows(()))
        if points := self._program.limits.points:
            values = bytes(4 * sum(point.width for point in points))
            self._steer(pack_steering(self._program.limits.max_num_seqs, values))
        for count in self._program.extras_rows:
            jax.block_until_ready(self._draw_with_extras((), (), count).output)

    def run_once(self, buckets: Sequence[Bucket]) -> None:
        """Run the steps of these buckets on padding."""
        on_gpu = self._program.platform != "cpu"
        for bucket in buckets:
            for _ in range(WARM_UP_RUNS if on_gpu and not bucket.num_prefills else 1):
                prepared = self._prepare(StepPlan(-1, bucket, (), (), ()))
                if bucket.scores and on_gpu:
                    targets = np.full(bucket.num_prefill_tokens, -1, np.int32)
                    prepared = msgspec.structs.replace(prepared, targets=targets)
                step = self._launch_prepared(prepared, {})
                self._tokens_of(step)
                jax.block_until_ready(step.scores)

    def launch(self, plan: StepPlan) -> InFlight:
        """Queue one step and return without waiting for it.

        The host's arrays are prepared first. If this fails for a row, the step runs without it, and
        its result is an error. An exception of a call is raised if the device's state is intact;
        else the state was donated to that call and is lost: ``EngineError``.
        """
        if plan.admissions:
            self._requests |= (admitted := {new.slot: new.request for new in plan.admissions})
            self._slots_with_extras -= admitted.keys()
            needs = self._constraints.needs_extras
            self._slots_with_extras |= {i for i, request in admitted.items() if needs(request)}
            self._constraints.admit(plan.admissions)
        prepared, failed = self._prepare_rows(plan)
        try:
            step = self._launch_prepared(prepared, failed)
        except Exception as error:
            if is_intact(self._own_arrays):
                raise
            raise device_failed(plan, error) from error
        self._in_flight.append(step)
        return step

    def collect(self, step: InFlight) -> StepResult:
        """Wait for a launched step and read the results of its rows.

        The tokens give the masks of the next step in flight, whose draws are launched first.
        """
        assert self._in_flight.popleft() is step, "steps are collected in the order of launch"
        token_ids, rows = self._tokens_of(step), step.prepared.plan.rows
        errors = self._constraints.push(rows, token_ids) | step.errors
        if self._in_flight and self._in_flight[0].prepared.needs_masks:
            self._continue(self._in_flight[0])
        return StepResult(
            step.prepared.plan.step_id,
            row_results(step, token_ids, errors, self._program.limits.points),
        )

    def _tokens_of(self, step: InFlight) -> list[tuple[int, ...]]:
        """Wait for the tokens of a launched step; returns those of each row, padding included."""
        try:
            drawn = self._read(step.number, step.token_ids)
            redrawn = [self._read(call.number, call.output.token_ids) for call in step.extras]
        except Exception as error:
            raise device_failed(step.prepared.plan, error) from error
        return tokens_of_rows(step, drawn, redrawn)

    def _prepare_rows(self, plan: StepPlan) -> tuple[Prepared, dict[RowKey, EngineError]]:
        """Prepare a plan without the rows that cannot be prepared, and the errors of these."""
        try:
            return self._prepare(plan), {}
        except Exception:
            failed: dict[RowKey, EngineError] = {}
            for row in plan.rows:
                try:
                    self._prepare(only_rows(plan, {(row.request_id, row.epoch)}))
                except Exception as error:
                    words = f"the request cannot be prepared: {error}"
                    failed[row.request_id, row.epoch] = EngineError(words)
                    logging.getLogger(LOGGER).exception("request %s", row.request_id)
            if not failed:
                raise
        others = {(row.request_id, row.epoch) for row in plan.rows} - failed.keys()
        return self._prepare(only_rows(plan, others)), failed

    def _prepare(self, plan: StepPlan) -> Prepared:
        rows, prefills = plan.rows, plan.prefills
        requests = tuple([self._requests[row.slot] for row in rows])
        slots, awaited = self._slots_with_extras, self._constraints.awaited
        waits = [row.samples and row.slot in awaited for row in rows] if awaited else ()
        masked = tuple([i for i, one in enumerate(waits) if one])
        extras = [i for i, row in enumerate(rows) if row.samples and row.slot in slots]
        settings = NO_SETTINGS
        if prefills:
            drawn_later = self._constraints.needs_extras if self._program.draws_once else None
            settings = settings_of(requests[len(plan.decodes) :], drawn_later)
        steered = [one.steering is not None for one in requests] if plan.bucket.taps else ()
        prepared = Prepared(
            plan,
            requests,
            batch=pack(plan, self._layouts[plan.bucket], settings, steered, masked),
            masked=masked,
            extras=tuple(batched(extras, self._program.extras_rows[-1])) if extras else (),
            is_constrained=any([requests[i].constraint is not None for i in extras]),
            needs_logprobs=any([requests[i].sampling.logprobs is not None for i in extras]),
            needs_taps=plan.bucket.taps and any([one.sampling.taps for one in requests]),
        )
        return with_prompts(prepared, self._program) if prefills else prepared

    def _launch_prepared(self, prepared: Prepared, failed: dict[RowKey, EngineError]) -> InFlight:
        bucket = prepared.plan.bucket
        place, mask_number = self._next_place(), 0
        prepared.batch[: len(place)] = place
        if prepared.masked:
            mask_number = self._constraints.begin(prepared, known=not self._in_flight)
        staged = self._staged(prepared.batch)
        for rows in prepared.admissions:
            self._admit(rows)
        for wire in prepared.steers:
            self._steer(wire)
        output = self._launch_step(bucket, staged)
        self._read_later(output.token_ids, staged)
        scores = None
        if prepared.targets is not None:
            name = f"{SCORE}{len(prepared.targets)}"
            scores = self._read_back(name, self._head, output.hidden, prepared.targets)
        if (pooled := output.pooled) is not None:
            self._copy_to_host(pooled)
        taps = output.taps if prepared.needs_taps else None
        if taps is not None:
            self._copy_to_host(taps)
        # the hidden states, which are as large as a layer's, are released here
        drawn = output.token_ids, place[-1], mask_number
        step = InFlight(prepared, *drawn, [], scores, failed, pooled, taps)
        if prepared.extras and not (prepared.needs_masks and self._in_flight):
            self._draw_all_extras(step)
        return step

    def _draw_all_extras(self, step: InFlight) -> None:
        """Launch the draws of a step's rows with extras; the masks of these rows are known."""
        prepared, rows = step.prepared, step.prepared.plan.rows
        for indices in prepared.extras:
            call = self._draw_with_extras(indices, [rows[i] for i in indices])
            step.extras.append(call)
            if prepared.needs_logprobs:
                self._copy_to_host(call.output.logprobs)

    def _continue(self, step: InFlight) -> None:
        """Write masks, and launch draws with extras: their buffers may wait for earlier draws."""
        if step.prepared.masked:
            self._constraints.write(step.prepared, step.mask_number)
        try:
            if step.prepared.extras:
                self._draw_all_extras(step)
        except Exception as error:
            if not is_intact(self._own_arrays):
                raise device_failed(step.prepared.plan, error) from error
            fail_extras(step, error)

    def _admit(self, rows: np.ndarray) -> None:  # int32[A, ...]
        self._slots = self._by_name[ADMIT](self._slots, rows)

    def _steer(self, wire: np.ndarray) -> None:  # int32[...]: see ``pack_steering``
        self._steering = self._by_name[STEER](self._steering, wire)

    def _draw_with_extras(
        self, indices: tuple[int, ...], rows: Sequence[ScheduledSeq], count: int | None = None
    ) -> ExtrasCall:
        """Queue a call for these rows, of ``count`` rows or the smallest number that holds them."""
        count = count or next(n for n in self._program.extras_rows if n >= len(rows))
        sampling = [self._requests[row.slot].sampling for row in rows]
        wire = pack_extras(rows, count, self._program.limits.max_num_seqs, sampling)
        place = self._next_place()
        wire[: len(place)] = place
        staged = self._staged(wire)
        draw = self._by_name[f"{EXTRAS}{count}"]
        masks = self._constraints.masks(rows, count)
        self._slots, output = draw(self._head, self._slots, staged, masks)
        self._read_later(output.token_ids, staged)
        return ExtrasCall(indices, output, place[-1])

    def _read_back(self, name: str, *arguments: Any) -> jax.Array:
        """Queue a call whose result only the host reads."""
        result = self._by_name[name](*arguments)
        self._copy_to_host(result)
        return result  # type: ignore[no-any-return]

    def _launch_step(self, bucket: Bucket, staged: Any) -> StepOutput:
        """Launch a step. If it is split, the device runs a part while the next one is launched."""
        step = self._by_name[bucket.name]
        if bucket.taps:
            arguments = (self._weights, self._state, self._slots, staged, self._steering)
            self._state, self._slots, output = step(*arguments)
            return output  # type: ignore[no-any-return]
        if not self._program.is_split(bucket):
            self._state, self._slots, output = step(self._weights, self._state, self._slots, staged)
            return output  # type: ignore[no-any-return]
        first = self._by_name[bucket.name + FIRST]
        (of_first, of_second), (one, two) = self._weights_of_parts, self._program.parts
        arrays, stream = first(of_first, self._arrays(one.arrays), self._slots, staged)
        self._replace(one.arrays, arrays)
        arguments = (of_second, self._arrays(two.arrays), self._slots, staged, stream)
        arrays, self._slots, output = step(*arguments)
        self._replace(two.arrays, arrays)
        return output  # type: ignore[no-any-return]

    def _arrays(self, indices: Sequence[int]) -> State:
        return tuple(self._state[i] for i in indices)

    def _replace(self, indices: Sequence[int], arrays: State) -> None:
        """Replace some arrays of the layers' state, which a call has consumed."""
        state = list(self._state)
        for i, array in zip(indices, arrays, strict=True):
            state[i] = array
        self._state = tuple(state)

    def _next_place(self) -> tuple[int, int, int]:
        return NO_PLACE if self._board is None else self._board.next_place()

    def _staged(self, wire: np.ndarray) -> Any:  # int32[...]
        """A host array as the argument of a call: in a staging buffer, if there are any."""
        return wire if self._staging is None else self._staging.copy_in(wire)

    def _read_later(self, result: jax.Array, staged: Any) -> None:
        """Keep a launched call's argument until it has ended, and prepare to read its result."""
        if self._staging is not None:
            self._staging.read_by(result, staged)
        if self._board is None:
            self._copy_to_host(result)

    def _copy_to_host(self, result: jax.Array) -> None:
        """Start to copy a result to the host.

        A CPU's arrays are in host memory already. There the copy would only leave a callback that
        needs the interpreter, and that aborts the process if it runs while Python shuts down.
        """
        if self._program.platform != "cpu":
            result.copy_to_host_async()

    def _read(self, number: int, tokens: jax.Array) -> np.ndarray:  # int32[B]
        return np.asarray(tokens) if self._board is None else self._board.read(number, tokens)
