"""A step between its launch and its result.

Owns: ``Prepared``, ``InFlight``, and reading a finished step row by row, so that an error of one
row ends only its request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate, batched
from math import isfinite
from types import MappingProxyType
from typing import Any

import jax
import msgspec
import numpy as np

from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.hosts import HostLost
from jaxinfer.core.points import Point
from jaxinfer.core.request import Request
from jaxinfer.core.step import (
    NO_OUTPUT,
    NO_TAPS,
    RowOutput,
    RowResult,
    ScheduledSeq,
    StepPlan,
    TokenLogprobs,
)
from jaxinfer.exec.calls.call import Launch
from jaxinfer.exec.calls.digest import DIGEST
from jaxinfer.exec.calls.extras import ExtrasOutput
from jaxinfer.exec.calls.score import SCORE
from jaxinfer.exec.step.drafts import NO_TOKEN
from jaxinfer.exec.step.points import chosen_columns
from jaxinfer.exec.step.sampling import NO_MASK, NOT_FINITE, Logprobs, read_logprobs

LOGGER = "jaxinfer.exec"
NOT_FINITE_ERROR = (
    "the model's logits are not finite (NaN or infinite): its weights are damaged, or overflow in "
    "this dtype; check the checkpoint, or use another dtype"
)

NO_MASK_ERROR = "the answer's constraint came too late for a token; the host was busy or stopped"

type RowKey = tuple[str, int]  # (request_id, epoch)
NO_ERRORS: Mapping[RowKey, JaxinferError] = MappingProxyType({})


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """The host arrays of a step; they are prepared before any call of it is launched."""

    plan: StepPlan  # without the rows that could not be prepared
    requests: tuple[Request, ...]  # the request of each row, decodes first
    batch: np.ndarray  # int32[...]: see ``BatchLayout``
    extras: tuple[int, ...]  # row indices that are drawn again, with extras
    is_constrained: bool  # whether any of these rows needs a mask
    needs_logprobs: bool  # whether any of these rows needs logprobs
    masked: tuple[int, ...] = ()  # row indices for whose masks the step waits
    before: tuple[Launch, ...] = ()  # calls before the step
    after: tuple[Launch, ...] = ()  # calls after it, but for draws
    needs_taps: bool = False  # whether activations of any row are read

    @property
    def needs_masks(self) -> bool:
        """True if a mask is needed by the step or after it."""
        return self.is_constrained or bool(self.masked)


class ExtrasCall(msgspec.Struct, frozen=True, gc=False):
    """A launched call that draws the tokens of some rows with extras."""

    rows: tuple[int, ...]  # indices of the step's rows
    output: ExtrasOutput
    number: int  # number of the call on the token board, if there is one


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """A launched step whose tokens are still on the device."""

    prepared: Prepared
    token_ids: jax.Array  # int32[N]: see ``StepOutput``
    number: int  # number of the call on the token board, if there is one
    mask_number: int  # number of the step on the mask board, if it waits for masks
    extras: list[ExtrasCall]  # launched later if masks of the step's rows are not known yet
    results: dict[str, Any]  # of calls after the step that have one, by the call's name
    failed: dict[RowKey, EngineError]  # the errors of rows that could not be prepared
    pooled: jax.Array | None = None  # float32[R, D] of the prefill rows, if any of them pools
    taps: jax.Array | None = None  # [T, W of all points], if any are read
    # of rows that were not drawn with extras
    errors: dict[RowKey, EngineError] = msgspec.field(default_factory=dict)


def fail_extras(step: InFlight, error: Exception) -> None:
    """End the requests of a step's rows with extras, whose draws could not be launched."""
    plan = step.prepared.plan
    logging.getLogger(LOGGER).error("step %s", plan.step_id, exc_info=error)
    reason = EngineError(f"step {plan.step_id} failed: {error}")
    rows = (plan.rows[i] for i in step.prepared.extras)
    step.errors.update({(row.request_id, row.epoch): reason for row in rows})


def tokens_of_rows(
    step: InFlight,
    drawn: np.ndarray,  # int32[N]: of all rows, padding included
    redrawn: Sequence[np.ndarray],  # int32 of each call with extras; they replace the others
) -> list[tuple[int, ...]]:
    """The tokens of each row of a step."""
    plan, bucket, drawn_ids = step.prepared.plan, step.prepared.plan.bucket, drawn.tolist()
    found = [(token_id,) for token_id in drawn_ids[: len(plan.decodes)]]
    if bucket.query_tokens > 1:
        rows = batched(drawn_ids[: len(plan.decodes) * bucket.query_tokens], bucket.query_tokens)
        found = [tuple([one for one in row if one != NO_TOKEN]) for row in rows]
    found += [(token_id,) for token_id in drawn_ids[bucket.num_decode_tokens :]]
    for call, tokens in zip(step.extras, redrawn, strict=True):
        for index, token_id in zip(call.rows, tokens.tolist(), strict=False):
            found[index] = (token_id,)
    return found


def only_rows(plan: StepPlan, rows: set[RowKey]) -> StepPlan:
    """The plan with only these rows."""
    request_ids = {request_id for request_id, _ in rows}
    return msgspec.structs.replace(
        plan,
        admissions=tuple(a for a in plan.admissions if a.request.request_id in request_ids),
        decodes=tuple(row for row in plan.decodes if (row.request_id, row.epoch) in rows),
        prefills=tuple(row for row in plan.prefills if (row.request_id, row.epoch) in rows),
    )


def row_results(
    step: InFlight,
    token_ids: Sequence[tuple[int, ...]],
    errors: Mapping[RowKey, JaxinferError] = NO_ERRORS,
    points: Sequence[Point] = (),
) -> tuple[RowResult, ...]:
    """The result of each row of a finished step; ``token_ids`` are the tokens of each row.

    A row in ``errors`` has that error. Rows that could not be prepared have a result with theirs.
    """
    reader, rows = _LogprobReader(step), step.prepared.plan.rows
    taps = _row_taps(step, points)
    vectors = None if step.pooled is None else np.array(step.pooled)
    first = len(step.prepared.plan.decodes)
    results = [
        _failed((row.request_id, row.epoch), errors[row.request_id, row.epoch])
        if (row.request_id, row.epoch) in errors
        else _row_result(
            reader,
            i,
            row,
            token_ids[i],
            vectors[i - first] if row.pools and vectors is not None else None,
            taps[i],
        )
        for i, row in enumerate(rows)
    ]
    if (digests := step.results.get(DIGEST.name)) is not None:
        results = _with_digests(results, rows, np.asarray(digests))
    results += [_failed(key, error) for key, error in step.failed.items()]
    return tuple(results)


def _with_digests(
    results: Sequence[RowResult], rows: Sequence[ScheduledSeq], digests: np.ndarray
) -> list[RowResult]:
    """The results with the digests of rows that draw or pool; ``digests``: uint32 of each row."""
    pairs = zip(results, rows, digests[: len(rows)].tolist(), strict=True)
    return [
        msgspec.structs.replace(one, digest=digest) if row.samples or row.pools else one
        for one, row, digest in pairs
    ]


def _failed(key: RowKey, error: JaxinferError) -> RowResult:
    """The result of a row that ends with an error."""
    return RowResult(*key, (), error=str(error), is_request_error=isinstance(error, RequestError))


def _row_result(
    reader: _LogprobReader,
    index: int,
    row: ScheduledSeq,
    token_ids: tuple[int, ...],
    pooled: np.ndarray | None,  # float32[D]
    taps: memoryview,
) -> RowResult:
    """The result of one row; an error of the row is in its result."""
    key = (row.request_id, row.epoch)
    if (row.samples or row.pools) and NOT_FINITE in token_ids:
        return RowResult(*key, (), error=NOT_FINITE_ERROR)
    if row.samples and NO_MASK in token_ids:
        return RowResult(*key, (), error=NO_MASK_ERROR)
    try:
        sampled, prompt = reader.sampled(index, row, token_ids), reader.prompt(index, row)
    except Exception as error:
        logging.getLogger(LOGGER).exception("request %s", row.request_id)
        return RowResult(*key, (), error=f"the result cannot be read: {error}")
    for entry in prompt:
        if not isfinite(entry.logprobs[0]):
            return RowResult(*key, (), error=NOT_FINITE_ERROR)
    yields = sampled or prompt or taps or pooled is not None
    output = RowOutput(sampled, prompt, pooled, taps) if yields else NO_OUTPUT
    return RowResult(*key, token_ids if row.samples else (), output)


def _row_taps(step: InFlight, points: Sequence[Point]) -> list[memoryview]:
    """The activations that each row asks for: see ``RowOutput.taps``."""
    plan, requests = step.prepared.plan, step.prepared.requests
    if step.taps is None:
        return [NO_TAPS] * len(requests)
    read, start = np.asarray(step.taps), 0  # [T, W of all points]
    chosen: dict[tuple[str, ...], np.ndarray] = {}  # the columns of each choice of points
    found: list[memoryview] = []
    for number, (row, request) in enumerate(zip(plan.rows, requests, strict=True)):
        if number == len(plan.decodes):
            start = plan.bucket.num_decode_tokens
        end = start + row.num_scheduled_tokens
        names = request.sampling.taps
        if names and names not in chosen:
            chosen[names] = chosen_columns(read, names, points).view(np.uint8)
        found.append(memoryview(chosen[names][start:end]).cast("B") if names else NO_TAPS)
        start = end
    return found


class _LogprobReader:
    """Reads the logprobs of a step row by row."""

    def __init__(self, step: InFlight) -> None:
        prepared = step.prepared
        self._requests, self._num_decodes = prepared.requests, len(prepared.plan.decodes)
        # the result of its call, and the row within it, of each row that is drawn with extras
        self._drawn: dict[int, tuple[Logprobs[np.ndarray], int]] = {}
        for call in step.extras if prepared.needs_logprobs else ():
            result = read_logprobs(np.asarray(call.output.logprobs))
            self._drawn |= {index: (result, row) for row, index in enumerate(call.rows)}
        self._scores: Logprobs[np.ndarray] | None = None
        if SCORE.name in step.results:  # int32[Tp, ...] of the targets
            self._scores = read_logprobs(np.asarray(step.results[SCORE.name]))
            # the start of each prefill row's chunk among the prefill tokens
            lengths = (row.num_scheduled_tokens for row in prepared.plan.prefills)
            self._starts = tuple(accumulate(lengths, initial=0))

    def sampled(
        self, index: int, row: ScheduledSeq, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the token that a row with extras drew."""
        sampling = self._requests[index].sampling
        if sampling.logprobs is None or not row.samples:
            return ()
        (token_id,), named = token_ids, sampling.logprob_token_ids
        return (_token_logprobs(*self._drawn[index], token_id, sampling.logprobs, named),)

    def prompt(self, index: int, row: ScheduledSeq) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the targets of a chunk."""
        if row.target_ids is None:
            return ()
        top = self._requests[index].sampling.prompt_logprobs
        assert top is not None and self._scores is not None, "targets were not scored"
        start = self._starts[index - self._num_decodes]
        return tuple(
            _token_logprobs(self._scores, start + offset, token_id, top)
            for offset, token_id in enumerate(row.target_ids.tolist())
            if token_id >= 0
        )


def _token_logprobs(
    source: Logprobs[np.ndarray],
    index: int,
    token_id: int,
    top: int,
    named: tuple[int, ...] = (),
) -> TokenLogprobs:
    """The logprobs of one position: the chosen token, the ``top`` most likely ones, named ones."""
    ids: list[int] = source.top_ids[index, :top].tolist()
    values: list[float] = source.top_logprobs[index, :top].tolist()
    values += source.named[index, : len(named)].tolist()
    chosen, rank = float(source.chosen[index]), int(source.rank[index])
    return TokenLogprobs((token_id, *ids, *named), (chosen, *values), rank, len(named))


def device_failed(plan: StepPlan, error: Exception) -> EngineError:
    """The error of a device whose state is lost; that of a lost host stays as it is."""
    if isinstance(error, HostLost):
        return error
    return EngineError(f"the device failed in step {plan.step_id}: {error}")
