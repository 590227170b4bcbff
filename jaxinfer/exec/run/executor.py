"""Runs compiled steps: holds weights, layer state, slots and executables.

A step of a bucket has calls before and after it, as the records of ``exec.calls`` say.

The mask of a constrained row depends on its token in the step before. If that step is in flight,
the mask is written when it is collected, to the mask board or for draws that are launched then. At
most two steps are in flight, so that is before any later one and no row waits for another's mask.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import Request
from jaxinfer.core.step import TAPS, Bucket, StepPlan, StepResult
from jaxinfer.exec.calls.call import Call, Launch, Work
from jaxinfer.exec.compile.build import Compiled, Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.batch_staging import BatchStaging
from jaxinfer.exec.run.constraints import Constraints
from jaxinfer.exec.run.device_arrays import DeviceArrays
from jaxinfer.exec.run.exchange import Exchange
from jaxinfer.exec.run.follow import Send, Sender
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
from jaxinfer.exec.run.page_contents import page_contents
from jaxinfer.exec.run.token_board import TokenBoard
from jaxinfer.exec.step.batch import NO_PLACE, NO_SETTINGS, fill, pack
from jaxinfer.exec.step.sampling import NOT_FINITE
from jaxinfer.exec.step.slots import SlotState, settings_of
from jaxinfer.models.base import Params
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
        send: Send | None = None,
    ) -> None:
        """``send``: to other hosts, which make the same calls; None if there are none."""
        self._sender = None if send is None else Sender(program, send)
        self._program = program
        self._arrays = DeviceArrays(program, executables.by_name, params, state, slots)
        self._requests: dict[int, Request] = {}  # of each slot
        self._slots_with_extras: set[int] = set()
        self._constraints = Constraints(program.mask_words, MaskBoard.of_program(program))
        self._in_flight: deque[InFlight] = deque()  # launched and not collected
        sizes = [
            size for call in program.calls if call.when == "draw" for size in call.sizes(program)
        ]
        rows = max([*(bucket.num_draws for bucket in program.limits.buckets), *sizes])
        self._board = TokenBoard.of_device(program.placement.device, rows)
        self._staging = BatchStaging.of_placement(program.placement)
        self._exchange = Exchange.of_program(program)
        self._calls_of_prompts = _calls(program.calls)
        self._calls_of_decodes = _calls(call for call in program.calls if call.is_for_decodes)
        self._draws = [call for call in program.calls if call.when == "draw"]
        self._layouts = {bucket: program.layout(bucket) for bucket in program.limits.buckets}

    @property
    def arrays(self) -> DeviceArrays:
        """The arrays that steps replace."""
        return self._arrays

    @property
    def params(self) -> Params | None:
        """The weights that the next launch reads; None if no weights are held."""
        return self._arrays.params

    def replace_weights(self, params: Params | None) -> None:
        """Let later launches read these weights; steps in flight keep the old ones.

        The caller has checked shapes, dtypes and devices. With None no weights are held until the
        next call; the old ones are not deleted, as a user may hold them.
        """
        self._arrays.replace_weights(params)

    def forget(self, request_ids: Sequence[str]) -> None:
        """See ``StepExecutor``."""
        self._constraints.forget(request_ids)

    def free_state(self) -> None:
        """See ``StepExecutor``; raises ``EngineError`` on several hosts."""
        if self._sender is not None:
            raise EngineError("an engine of several hosts cannot sleep; end it to free its memory")
        self._arrays.free()

    def make_state(self) -> None:
        """See ``StepExecutor``; raises ``EngineError`` if the device has no memory for it."""
        self._arrays.make()

    def read_pages(self, ids: Sequence[Sequence[int]]) -> dict[str, tuple[int, np.ndarray]]:
        """The contents of each group's pages, by array: see ``page_contents``."""
        return page_contents(self._program.model.state, self._arrays.state, ids)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets whose executables are loaded."""
        names_of, loaded = self._program.names_of, self._arrays.executables.keys()
        return tuple(bucket for bucket in self._layouts if loaded >= {*names_of(bucket)})

    @property
    def devices(self) -> Sequence[Any]:
        """See ``StepExecutor``."""
        return self._program.placement.own_devices

    def hlo_texts(self, bucket: Bucket) -> Iterator[str]:
        """See ``StepExecutor``; without those of which XLA keeps no text."""
        for name in self._program.names_of(bucket):
            if text := getattr(self._arrays.executables[name], "as_text", str)():
                yield text

    def add(self, loaded: Mapping[str, Compiled]) -> tuple[Bucket, ...]:
        """Add later executables; returns the buckets now complete."""
        before = self.buckets
        self._arrays.add(loaded)
        return tuple(bucket for bucket in self.buckets if bucket not in before)

    def warm_up(self) -> None:
        """Run every executable on padding, so that no request waits for work of first runs.

        A GPU loads kernels at the first run of an executable, and at the second run of a decode
        step XLA records a CUDA graph, which takes 1 ms. Prompt steps run once, as recording is
        short compared with their own time. On a CPU only the smallest step runs, which starts XLA's
        threads.
        """
        buckets = sorted(self.buckets, key=lambda b: (b.num_tokens, b.variants), reverse=True)
        if self._program.platform == "cpu":
            self.run_once(buckets[-1:])
            return
        self.run_once(buckets)
        for call in self._program.calls:
            if call.size_of_bucket is None:  # else it has run with its bucket
                for size in call.sizes(self._program):
                    empty = call.empty(self._program, size)
                    if call.when == "draw":
                        jax.block_until_ready(self._draw(empty).output)
                    else:
                        if self._sender is not None:
                            self._sender.draw(empty)
                        jax.block_until_ready(self._arrays.call(empty, None))

    def run_once(self, buckets: Sequence[Bucket], *, filled: bool = False) -> None:
        """Run the steps of these buckets on padding; ``filled``: on prompts, which take longer."""
        on_gpu = self._program.platform != "cpu"
        for bucket in buckets:
            for _ in range(WARM_UP_RUNS if on_gpu and not bucket.num_prefills else 1):
                prepared = self._prepare(StepPlan(-1, bucket, (), (), ()))
                if filled:
                    fill(prepared.batch, self._layouts[bucket])
                if on_gpu:
                    calls = self._program.calls_of(bucket)
                    empty = (call.empty(self._program, size) for call, size in calls)
                    prepared = msgspec.structs.replace(prepared, after=tuple(empty))
                step = self._launch_prepared(prepared, {})
                self._tokens_of(step)
                jax.block_until_ready(step.results)

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
            if self._arrays.is_intact and self._sender is None:
                raise
            raise device_failed(plan, error) from error
        self._in_flight.append(step)
        return step

    def collect(self, step: InFlight) -> StepResult:
        """Wait for a launched step and read the results of its rows.

        The next step in flight may need masks that follow from these tokens; its draws are then
        launched before the rows are read.
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
            if self._exchange is not None and NOT_FINITE in drawn:
                self._exchange.check()
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
        rows, prefills, taps = plan.rows, plan.prefills, TAPS in plan.bucket.variants
        requests = tuple([self._requests[row.slot] for row in rows])
        slots, awaited = self._slots_with_extras, self._constraints.awaited
        waits = [row.samples and row.slot in awaited for row in rows] if awaited else ()
        masked = tuple([i for i, one in enumerate(waits) if one])
        extras = [i for i, row in enumerate(rows) if row.samples and row.slot in slots]
        settings = NO_SETTINGS
        if prefills:
            drawn_later = self._constraints.needs_extras if self._program.draws_once else None
            settings = settings_of(requests[len(plan.decodes) :], drawn_later)
        steered = [one.steering is not None for one in requests] if taps else ()
        prepared = Prepared(
            plan,
            requests,
            batch=pack(plan, self._layouts[plan.bucket], settings, steered, masked),
            masked=masked,
            extras=tuple(extras),
            is_constrained=any([requests[i].constraint is not None for i in extras]),
            needs_logprobs=any([requests[i].sampling.logprobs is not None for i in extras]),
            needs_taps=taps and any([one.sampling.taps for one in requests]),
        )
        before, after = self._calls_of_prompts if prefills else self._calls_of_decodes
        if not before and not after:
            return prepared
        program, work = self._program, Work(plan, requests)
        return msgspec.structs.replace(
            prepared,
            before=tuple([one for call in before for one in call.launches(program, work)]),
            after=tuple([one for call in after for one in call.launches(program, work)]),
        )

    def _launch_prepared(self, prepared: Prepared, failed: dict[RowKey, EngineError]) -> InFlight:
        bucket = prepared.plan.bucket
        place, mask_number = self._next_place(), 0
        prepared.batch[: len(place)] = place
        if self._exchange is not None:
            self._exchange.put_into(prepared.batch)
        if prepared.masked:
            mask_number = self._constraints.begin(prepared, known=not self._in_flight)
        if self._sender is not None:
            self._sender.step(prepared.before, bucket, prepared.batch, prepared.after)
        staged = self._staged(prepared.batch)
        for launch in prepared.before:
            self._arrays.call(launch, None)
        output = self._arrays.step(bucket, staged)
        self._read_later(output.token_ids, staged)
        results: dict[str, Any] = {}
        for launch in prepared.after:
            result = self._arrays.call(launch, output)
            if launch.call.has_result:
                results[launch.call.name] = result
                jax.tree.map(self._copy_to_host, result)
        if (pooled := output.pooled) is not None:
            self._copy_to_host(pooled)
        taps = output.taps if prepared.needs_taps else None
        if taps is not None:
            self._copy_to_host(taps)
        # the hidden states, which are as large as a layer's, are released here
        drawn = output.token_ids, place[-1], mask_number
        step = InFlight(prepared, *drawn, [], results, failed, pooled, taps)
        if prepared.extras and not (prepared.needs_masks and self._in_flight):
            self._draw_all_extras(step)
        return step

    def _draw_all_extras(self, step: InFlight) -> None:
        """Launch the draws of a step's rows with extras; the masks of these rows are known."""
        prepared = step.prepared
        work = Work(prepared.plan, prepared.requests, prepared.extras, self._constraints.masks)
        for call in self._draws:
            for launch in call.launches(self._program, work):
                step.extras.append(made := self._draw(launch))
                if prepared.needs_logprobs:
                    self._copy_to_host(made.output.logprobs)

    def _continue(self, step: InFlight) -> None:
        """Write masks, and launch draws with extras: their buffers may wait for earlier draws."""
        if step.prepared.masked:
            self._constraints.write(step.prepared, step.mask_number)
        try:
            if step.prepared.extras:
                self._draw_all_extras(step)
        except Exception as error:
            if not self._arrays.is_intact or self._sender is not None:
                raise device_failed(step.prepared.plan, error) from error
            fail_extras(step, error)

    def _draw(self, launch: Launch) -> ExtrasCall:
        """Queue a call that draws tokens, whose first argument begins with a place on the board."""
        wire, *others = launch.arguments
        place = self._next_place()
        wire[: len(place)] = place
        if self._sender is not None:
            self._sender.draw(launch)
        staged = self._staged(wire)
        output = self._arrays.call(launch._replace(arguments=(staged, *others)), None)
        self._read_later(output.token_ids, staged)
        return ExtrasCall(launch.rows, output, place[-1])

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


def _calls(calls: Iterable[Call]) -> tuple[list[Call], list[Call]]:
    """Those before the step, and those after it."""
    known = [*calls]
    before, after = ([call for call in known if call.when == w] for w in ("before", "after"))
    return before, after
