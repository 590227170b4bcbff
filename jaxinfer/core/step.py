"""Records that ``sched``, ``exec`` and ``engine`` share: buckets, step plans, results, events.

Scheduler and executor import nothing of each other; they share only these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.tiers import Loaded, Saved, TierChanged

if TYPE_CHECKING:  # core.config imports Bucket; commands read settings without numpy
    import numpy as np

    from jaxinfer.core.intlog import IntLog


NO_TAPS = memoryview(b"")
MAX_SAVES = 2  # snapshots of layer state that a row of a step can save
TAPS = "taps"  # the variant of buckets in whose steps activations of rows are read or steered


class Bucket(msgspec.Struct, frozen=True, order=True):
    """One compiled shape. Rows [0, num_decodes) hold ``query_tokens`` tokens each: the token drawn
    last and drafts of the following ones. The prefill rows come after them.

    ``num_prefill_tokens`` are packed back to back (ragged) over ``num_prefills`` rows. A bucket
    that ``scores`` returns the hidden states of all its prompt tokens, from which prompt logprobs
    are computed; other buckets may compute the last layer only for the last token of each row.
    ``variants`` names, in order, what else its step does: a bucket with some is for the steps with
    a row that needs each of them, and for no others.
    """

    num_decodes: int
    num_prefill_tokens: int = 0
    num_prefills: int = 0
    scores: bool = False
    query_tokens: int = 1
    variants: tuple[str, ...] = ()

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, padding included."""
        return self.num_decodes * self.query_tokens

    @property
    def num_tokens(self) -> int:
        """T: tokens of the step, padding included."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def num_draws(self) -> int:
        """Tokens that the step draws: one for each decode token and for each prefill row."""
        return self.num_decode_tokens + self.num_prefills

    @property
    def num_seqs(self) -> int:
        """B: rows of the step, padding included."""
        return self.num_decodes + self.num_prefills

    @property
    def name(self) -> str:
        """A short unique name: ``d8``, ``d8q4``, ``p512x8``, ``d8p512x8``, ``d8_taps``."""
        query = f"q{self.query_tokens}" if self.query_tokens > 1 else ""
        decodes = f"d{self.num_decodes}{query}" if self.num_decodes else ""
        prefills = f"p{self.num_prefill_tokens}x{self.num_prefills}" if self.num_prefills else ""
        size = decodes + prefills
        return "_".join((size, *self.variants)) if self.variants else size

    def holds(self, step: Bucket) -> bool:
        """True if a step of this size can run in this shape."""
        return (
            step.num_decodes <= self.num_decodes
            and step.num_prefill_tokens <= self.num_prefill_tokens
            and step.num_prefills <= self.num_prefills
            and step.scores <= self.scores
            and step.query_tokens <= self.query_tokens
            and step.variants == self.variants
        )


def choices(variants: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every choice of some of these variants, as ``Bucket.variants``; that of none is the first."""
    for count in range(len(variants) + 1):
        yield from combinations(sorted(variants), count)


def combined(*variants: tuple[str, ...]) -> tuple[str, ...]:
    """The variants of a step whose rows need these."""
    return tuple(sorted({name for own in variants for name in own}))


class PageGroup(msgspec.Struct, frozen=True):
    """Layers that share a page table: what they store there has one window and one stride."""

    window: int | None = None  # tokens to which the layers attend; None: the whole context
    tokens_per_entry: int = 1  # tokens that one entry stands for
    pool: int = 0  # the pool of its pages; groups of a pool have the same kind of entry


class Pages(msgspec.Struct, frozen=True, gc=False):
    """The pages of a sequence in one group of layers, from page number ``first`` on. Earlier pages
    are outside the group's window and were returned to the pool.
    """

    ids: IntLog
    first: int = 0

    @property
    def end(self) -> int:
        """One past the number of the last page."""
        return self.first + len(self.ids)


class ScheduledSeq(msgspec.Struct, frozen=True, gc=False):
    """One row of a step: ``num_scheduled_tokens`` tokens after ``num_computed_tokens``.

    For a prefill row ``token_ids`` is the chunk. For a decode row it is None: the input token is
    the one that its slot drew last, which only the device knows when the step is planned. A decode
    row of several tokens has drafts after that one. The number of accepted drafts is known only on
    the device, so while such rows are in flight ``num_computed_tokens`` is an upper bound.
    """

    request_id: str
    epoch: int
    slot: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    pages: tuple[Pages, ...]  # for each group, from the first page that the row's tokens attend to
    token_ids: np.ndarray | None = None  # int32[num_scheduled_tokens], prefill rows only
    samples: bool = True  # whether the row draws: after its last token; a decode row after each one
    # prompt_logprobs: target_ids[i] is the prompt token that follows token_ids[i], -1 where the
    # chunk's last token is the prompt's last one
    target_ids: np.ndarray | None = None  # int32[num_scheduled_tokens] or None
    pools: bool = False  # whether the row yields the vector of its prompt
    # of a model with state for each sequence: the snapshot that a prefill row starts from (None:
    # its slot's state), and up to ``MAX_SAVES`` pairs, ascending, of a number of the row's tokens
    # and the snapshot in which the state after them is saved
    reads: int | None = None
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def most_drawn(self) -> int:
        """The number of tokens that the row yields if every draft is accepted."""
        if not self.samples:
            return 0
        return self.num_scheduled_tokens if self.token_ids is None else 1


class SlotAdmission(msgspec.Struct, frozen=True, gc=False):
    """Assigns a slot to a request; the executor writes its sampling state before the step runs.

    ``token_ids`` are all tokens known at admission (the prompt, and after a preemption the tokens
    generated so far); the first ``num_prompt_tokens`` are the prompt.
    """

    slot: int
    request: Request
    token_ids: IntLog
    epoch: int = 0  # the number of this admission, as in its rows

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the user's prompt."""
        return len(self.request.prompt_token_ids)


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """The next step for the executor: its rows in order, and its bucket."""

    step_id: int
    bucket: Bucket
    admissions: tuple[SlotAdmission, ...]
    decodes: tuple[ScheduledSeq, ...]
    prefills: tuple[ScheduledSeq, ...]

    @property
    def rows(self) -> tuple[ScheduledSeq, ...]:
        """All rows; row i of the decodes is row i of the batch, prefills start at num_decodes."""
        return self.decodes + self.prefills


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Logprobs of one position under the unmodified distribution.

    ``token_ids``/``logprobs`` start with the chosen token, then the most likely ones in order, and
    end with ``num_named`` tokens that the request names; ``rank`` is the chosen token's rank, 1
    being the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    num_named: int = 0


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """A row's output besides its tokens: made by the executor, and read where a delta is made.

    ``logprobs`` has an entry for each drawn token, if requested, ``prompt_logprobs`` for each of
    ``ScheduledSeq.target_ids``. ``pooled`` float32[D] is set if the row pools. ``taps``:
    [num_scheduled_tokens, W], for each token its activations at ``SamplingParams.taps``, a view of
    what the device has returned.
    """

    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: np.ndarray | None = None
    taps: memoryview = NO_TAPS

    @property
    def is_of_tokens(self) -> bool:
        """True if it has something of the tokens that the row computes, whether it draws or not."""
        return bool(self.prompt_logprobs or self.taps)

    def cut(self, num_known: int, num_computed: int, num_drawn: int) -> RowOutput:
        """Without that of the first ``num_known`` of ``num_computed`` tokens, and with the logprobs
        of the first ``num_drawn`` drawn tokens.
        """
        token_bytes = len(self.taps) // num_computed
        return RowOutput(
            self.logprobs[:num_drawn],
            self.prompt_logprobs[num_known:],
            self.pooled,
            self.taps[num_known * token_bytes :],
        )


NO_OUTPUT = RowOutput()


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """The result of one row. ``token_ids`` is empty for a chunk that does not end its prompt, and
    for a row with an ``error``, which ends only its own request. A decode row has one token, and
    one more for each accepted draft. ``is_request_error``: the error is a ``RequestError``.
    """

    request_id: str
    epoch: int
    token_ids: tuple[int, ...]
    output: RowOutput = NO_OUTPUT
    error: str = ""
    is_request_error: bool = False
    digest: int = 0  # of the input of its draw, in engines with ``Limits.digests``


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """A finished step, matched to sequences by (request_id, epoch), never by slot."""

    step_id: int
    rows: tuple[RowResult, ...]


# Events: the inputs of the scheduler, in the order of time.


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request early: its client disconnected, or its text contains a stop string."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The oldest step in flight has finished."""

    result: StepResult


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """The oldest step in flight raised; its rows' requests end with ``error``."""

    step_id: int
    error: str


class BucketsLoaded(msgspec.Struct, frozen=True, tag=True):
    """Executables were loaded: from now on, steps may have these shapes too."""

    buckets: tuple[Bucket, ...]


class Reset(msgspec.Struct, frozen=True, tag=True):
    """The content of pages is lost, or of other weights; no step is in flight.

    Running sequences return to the queue with their tokens, and no prefix is known any more, but
    those in tiers if it ``keeps_tiers``: they are of the same weights.
    """

    keeps_tiers: bool = False


class Hold(msgspec.Struct, frozen=True, tag=True):
    """This call of the scheduler plans no step, since the device is needed for something else."""


type OfTiers = TierChanged | Saved | Loaded
type Event = Arrive | Abort | StepDone | StepFailed | BucketsLoaded | Reset | Hold | OfTiers


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """New output of one request; ``finish_reason`` is set exactly once, at the end."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    output: RowOutput = NO_OUTPUT  # of what has not been in an earlier event
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the user's stop id that ended the request, if one did
    error: str = ""
    is_request_error: bool = False  # what the request asks for is to blame, not the engine
