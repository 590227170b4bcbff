"""``Sequence``: an unfinished request in the scheduler's state."""

from __future__ import annotations

import msgspec

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import Request
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import TAPS, Pages, SlotAdmission
from jaxinfer.core.tiers import TierUnit

type Order = tuple[int, int, str]  # (priority, arrival, request_id): the lowest is served first

NO_SLOT = -1


class Restoring(msgspec.Struct, frozen=True, gc=False):
    """The part of a prefix that a tier loads for a sequence: tokens from ``known`` to ``end``."""

    ticket: int
    known: int  # tokens that the device has
    end: int
    units: tuple[TierUnit, ...]
    row: int | None = None  # of the snapshots, for a state that is loaded; owned by the sequence


class Sequence(msgspec.Struct, frozen=True, gc=False):
    """One unfinished request.

    ``token_ids`` are the tokens that the host knows. Steps in flight draw
    ``num_in_flight_tokens`` more, and ``num_computed_tokens`` includes the tokens that they
    compute. While it is below ``num_prefill_tokens`` (the tokens known at admission) the sequence
    prefills; afterwards it decodes and
    ``num_computed_tokens == len(token_ids) + num_in_flight_tokens - 1``.
    """

    request: Request
    order: Order
    token_ids: IntLog
    max_num_tokens: int  # prompt and output together
    epoch: int = 0  # number of the admission, unique even if a request id is reused
    slot: int = NO_SLOT
    pages: tuple[Pages, ...] = ()  # of each group; empty while it waits
    num_prefill_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    page_hashes: tuple[bytes, ...] = ()  # of the first full pages; kept when preempted
    num_registered_pages: int = 0  # pages that are in the prefix index
    num_cached_tokens: int | None = None  # tokens reused at the first admission
    # tokens whose activations and logprobs as a prompt have been delivered, perhaps before a
    # preemption
    num_delivered: int = 0
    # positions of page borders whose state a later chunk saves in a snapshot, ascending
    borders: tuple[int, ...] = ()
    # the last of them, or a border that it decodes up to, while the step that saves it is in flight
    saving: int | None = None
    tail: bytes | None = None  # the page hash of the newest snapshot that was saved while decoding
    restoring: Restoring | None = None  # while a load is in flight
    may_restore: bool = True  # False once a load for it has failed
    was_offloaded: bool = False  # True once it was preempted and its units were saved
    is_new: bool = False  # True while its slot is to be written by the step of its first row
    reads: int | None = None  # the snapshot that its first row will start from

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def is_prefilling(self) -> bool:
        """True if tokens of the prefill are still to be computed."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that buckets of its steps must have."""
        taps = self.request.sampling.taps or self.request.steering is not None
        return (TAPS,) if taps else ()

    @property
    def is_waiting_for_load(self) -> bool:
        """True if it gets no row before a load ends."""
        return self.restoring is not None

    @property
    def admission(self) -> SlotAdmission:
        """The record by which its slot is written."""
        return SlotAdmission(self.slot, self.request, self.token_ids, self.epoch)

    def min_computed_tokens(self, query_tokens: int) -> int:
        """Tokens that will be computed after the steps in flight, if all their drafts are refused.

        A row draws up to ``query_tokens`` tokens, and at least one.
        """
        rows = cdiv(self.num_in_flight_tokens, query_tokens)
        return self.num_computed_tokens - self.num_in_flight_tokens + rows

    def first_needed(self, query_tokens: int) -> int:
        """The position from which windows count whose pages the sequence keeps.

        It is that of its next token, or of a snapshot that a step in flight saves: another sequence
        can start there only if the pages before it are held until they are registered.
        """
        least = self.min_computed_tokens(query_tokens)
        return least if self.saving is None else min(least, self.saving)

    @property
    def scores(self) -> bool:
        """True if the remaining prompt tokens have logprobs that are still to be computed."""
        if self.request.sampling.prompt_logprobs is None:
            return False
        first = max(self.num_computed_tokens, self.num_delivered)
        return first < len(self.request.prompt_token_ids) - 1
