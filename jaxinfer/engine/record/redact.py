"""Recordings without the tokens: each token id is replaced, so that texts cannot be read.

Token ids become others by a secret permutation of 31 bits, a Feistel network of pseudo-random
functions (Luby and Rackoff, 1988) whose key is never written. Equal tokens stay equal, so that
prefixes are shared and answers end as they did; how often each token occurs can be counted. The
recording's states are those of a second scheduler that gets the replaced events: no hash of the
true tokens is written.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b, shake_256

import numpy as np
from msgspec.structs import replace

from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.steering import Steering
from jaxinfer.core.step import NO_OUTPUT, Arrive, Event, RowResult, StepDone, StepFailed
from jaxinfer.core.tiers import Loaded, TierChanged
from jaxinfer.engine.record.states import RECORDED
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, schedule

_HALF_BITS, _ROUNDS = 16, 6
# fields of SamplingParams that have no tokens or texts, and that the scheduler may look at
_KEPT = ("max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "taps", "n")
_STAND_IN = "redacted"


class Redactor:
    """Replaces the tokens of an engine's events, one run long."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        num_bytes = 2 << _HALF_BITS
        streams = [shake_256(self._key + bytes([i])).digest(num_bytes) for i in range(_ROUNDS)]
        self._functions = [np.frombuffer(stream, np.uint16) for stream in streams]
        self._state: SchedulerState | None = None  # of the second scheduler
        self._keys: dict[bytes, bytes] = {}  # of units in tiers: those of the second scheduler

    def call(
        self,
        before: SchedulerState,
        events: Sequence[Event],
        output: ScheduleOutput | None,
        after: SchedulerState,
    ) -> tuple[SchedulerState, Sequence[Event], ScheduleOutput | None, SchedulerState]:
        """The call as it would have been with other tokens."""
        state = before if self._state is None else self._state
        events = tuple(self._event(event) for event in events)
        if output is None:
            return state, events, None, state
        saved = output.orders.saves
        self._state, output = schedule(state, events)
        pairs = zip(saved, output.orders.saves, strict=True)
        self._keys |= {true.key: own.key for true, own in pairs}
        return state, events, output, self._state

    def ids(self, token_ids: Sequence[int]) -> np.ndarray:  # int32[T]
        """The ids that replace these. Values of 32 bits are permuted again until they have 31, so
        that it is a permutation of the values of 31 bits.
        """
        found = self._permuted(np.asarray(token_ids, np.uint32).reshape(-1))
        while (high := found >= 1 << 31).any():
            found[high] = self._permuted(found[high])
        return found.astype(np.int32)

    def _permuted(self, values: np.ndarray) -> np.ndarray:  # uint32[T]
        left, right = values >> _HALF_BITS, values & ((1 << _HALF_BITS) - 1)
        for function in self._functions:
            left, right = right, left ^ function[right]
        return left << _HALF_BITS | right

    def _event(self, event: Event) -> Event:
        match event:
            case Arrive(request):
                return Arrive(self._request(request))
            case StepDone(result):
                return StepDone(replace(result, rows=tuple(map(self._row, result.rows))))
            case StepFailed(step_id):
                return StepFailed(step_id, _STAND_IN)
            case TierChanged(added, removed):
                known = [tuple(map(self._keys.__getitem__, keys)) for keys in (added, removed)]
                for key in removed:
                    del self._keys[key]
                return TierChanged(*known)
            case Loaded(ticket, failed):
                return Loaded(ticket, tuple(map(self._keys.__getitem__, failed)))
            case _:
                return event

    def _row(self, row: RowResult) -> RowResult:
        error = _STAND_IN if row.error else ""  # it may quote the text
        if row.output is NO_OUTPUT:
            return replace(row, token_ids=self._tuple(row.token_ids), error=error, digest=0)
        taps = memoryview(b"\0") if row.output.is_of_tokens else memoryview(b"")
        pooled = None if row.output.pooled is None else np.zeros(0, np.float32)
        output = replace(NO_OUTPUT, taps=taps, pooled=pooled)
        tokens = self._tuple(row.token_ids)
        return replace(row, token_ids=tokens, output=output, error=error, digest=0)

    def _request(self, request: Request) -> Request:
        sampling = request.sampling
        kept = {name: getattr(sampling, name) for name in _KEPT}
        steering = request.steering
        if steering is not None:
            steering = Steering(b"", self._hashed(steering.digest))
        stops = self._tuple(sampling.stop_token_ids)
        return replace(
            request,
            prompt_token_ids=self._tuple(request.prompt_token_ids),
            sampling=SamplingParams(**kept, stop_token_ids=stops),
            cache_salt=self._hashed(request.cache_salt.encode()).hex()
            if request.cache_salt
            else "",
            seed=0,
            eos_token_ids=self._tuple(request.eos_token_ids),
            constraint=RECORDED if request.has_extras else None,
            steering=steering,
        )

    def _tuple(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.ids(token_ids).tolist()) if len(token_ids) else ()

    def _hashed(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=16).digest()
