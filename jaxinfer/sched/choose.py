"""The next step: which sequences get a row, of how many tokens, in which bucket.

Owns: the policy. First come, first served by (priority, arrival): every decoding sequence gets its
row, then prefills under way continue, then waiting requests are admitted, as far as
``max_num_batched_tokens`` prompt tokens and a bucket allow. Prefills shrink to a bucket, decodes
are never dropped for one. A row that asks for prompt logprobs needs a bucket that scores. With
``prefill_first`` there are also steps without the decodes (``_prefills_alone``).
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np

from jaxinfer.core.config import Limits
from jaxinfer.core.step import Bucket, ScheduledSeq, SlotAdmission, StepPlan
from jaxinfer.sched.admit import admit, fits_whole, with_page_hashes
from jaxinfer.sched.state import Draft, Sequence
from jaxinfer.sched.windows import extended, num_missing, without_passed

NO_BUCKET = Bucket(0)


def choose_step(draft: Draft) -> StepPlan | None:
    """Plan one step and count its tokens as computed; None when nothing can run."""
    alone = _prefills_alone(draft)
    decodes, preempted = ([], False) if alone else _decode_rows(draft)
    prefills: list[ScheduledSeq] = []
    query_tokens = max([row.num_scheduled_tokens for row in decodes], default=1)
    budget = Budget(draft, len(decodes), query_tokens)
    if len(decodes) < len(draft.running):
        prefills = _continued_prefills(draft, budget)
    admissions: tuple[SlotAdmission, ...] = ()
    # After a preemption nobody is admitted in the same step: the pages were needed.
    if draft.waiting and not preempted:
        new_prefills, admissions = _new_prefills(draft, budget)
        prefills += new_prefills
    if alone and not prefills:  # no request that waits can be admitted
        decodes, _ = _decode_rows(draft)
        query_tokens = max([row.num_scheduled_tokens for row in decodes], default=1)
    if not decodes and not prefills:
        if not draft.in_flight and any(seq.is_prefilling for seq in draft.running.values()):
            # prompts that wait for each other's pages: the last gives its own up
            draft.preempt_last()
            return choose_step(draft)
        return None
    step_id, draft.next_step_id = draft.next_step_id, draft.next_step_id + 1
    size = (len(decodes), budget.used, len(prefills))
    bucket = smallest_bucket(draft.buckets, *size, scores=budget.scores, query_tokens=query_tokens)
    plan = StepPlan(step_id, bucket, admissions, tuple(decodes), tuple(prefills))
    draft.in_flight = (*draft.in_flight, plan)
    return plan


def smallest_bucket(
    buckets: tuple[Bucket, ...],
    decodes: int,
    prefill_tokens: int,
    prefills: int,
    *,
    scores: bool = False,
    query_tokens: int = 1,
) -> Bucket:
    """The first of ``buckets``, which are sorted by size, that holds the step."""
    size = (decodes, prefill_tokens, prefills)
    for bucket in buckets:
        if bucket.fits(*size, scores=scores, query_tokens=query_tokens):
            return bucket
    raise AssertionError("a step is only built as large as its bucket")


class Budget:
    """Prompt tokens that a step with ``num_decodes`` decodes, of ``query_tokens`` at most, may
    still take.
    """

    def __init__(self, draft: Draft, num_decodes: int, query_tokens: int = 1) -> None:
        self._buckets = draft.buckets
        self._widest = NO_BUCKET  # of those that have one more prefill row, and score if need be
        self._limit = draft.limits.max_num_batched_tokens
        self._num_decodes = num_decodes
        self._query_tokens = query_tokens
        self._num_prefills = 0
        self.used = 0
        self.scores = False  # whether a row asks for prompt logprobs

    def left_for(self, seq: Sequence) -> int:
        """Tokens that a prefill row of ``seq`` could have; 0 or less if no bucket has the row."""
        scores = self.scores or seq.scores
        widest = self._widest
        if widest.num_prefills <= self._num_prefills or scores > widest.scores:
            widest = self._widest_left(scores=scores)
            if scores == self.scores:
                self._widest = widest
        return min(widest.num_prefill_tokens, self._limit) - self.used

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Count one more prefill row, of ``seq`` before the step."""
        self._num_prefills += 1
        self.used += num_tokens
        self.scores = self.scores or seq.scores

    def _widest_left(self, *, scores: bool) -> Bucket:
        fitting = (
            bucket
            for bucket in self._buckets
            if bucket.fits(
                self._num_decodes,
                0,
                self._num_prefills + 1,
                scores=scores,
                query_tokens=self._query_tokens,
            )
        )
        return max(fitting, key=attrgetter("num_prefill_tokens"), default=NO_BUCKET)


def _prefills_alone(draft: Draft) -> bool:
    """Whether the decodes wait for this step, as ``prefill_first`` asks for a batch.

    They do while prompts are left to compute and the batch fits whole: it gains nothing by decoding
    its first rows early, for the last row's steps are still to come, and each mixed step costs more
    than a prefill (with Qwen3-4B on an H200 134 ms beside 8,192 prompt tokens, without 128.5 ms,
    and 256 decodes alone take 13.7 ms). A batch that does not fit is planned as without
    ``prefill_first``: mixed steps then decode towards the end of rows that others wait for, reading
    the weights only once, and nobody is preempted more often.
    """
    if not draft.limits.prefill_first:
        return False
    if not draft.waiting and not any(seq.is_prefilling for seq in draft.running.values()):
        return False
    return fits_whole(draft)


def _decode_rows(draft: Draft) -> tuple[list[ScheduledSeq], bool]:
    """A row for every decoding sequence, oldest first, and whether one was preempted for it.

    A sequence whose tokens in flight will reach its last position gets no further row, nor does one
    whose drafts in flight may. When no page is left, the sequence last in order gives its pages up;
    rows already made are of earlier ones, so they stand.
    """
    limits, running, pages = draft.limits, draft.running, draft.pages
    page_size, has_windows = limits.page_size, any(limits.windows)
    rows: list[ScheduledSeq] = []
    preempted = False
    for request_id, seq in tuple(running.items()):
        if preempted and request_id not in running:
            break  # it and everybody after it
        position = seq.num_computed_tokens
        if position < seq.num_prefill_tokens or position + 1 >= seq.max_num_tokens:
            continue
        held, num_tokens = seq.pages, 1
        if limits.query_tokens > 1:
            num_tokens = _num_query_tokens(seq, limits)
        if has_windows:
            held = without_passed(pages, held, seq.surely_computed(limits.query_tokens), limits)
        end = position + num_tokens
        begins_page = -position % page_size < num_tokens
        if begins_page and (missing := num_missing(held, end, limits)):
            if held is not seq.pages:  # what went back must not go back twice
                running[request_id] = seq = msgspec.structs.replace(seq, pages=held)
            while pages.num_free < missing and request_id in running:
                draft.preempt_last()
                preempted = True
            if request_id not in running:
                break
            held = extended(pages, held, end, limits)
        rows.append(ScheduledSeq(request_id, seq.epoch, seq.slot, position, num_tokens, held))
        running[request_id] = msgspec.structs.replace(
            seq,
            pages=held,
            num_computed_tokens=end,
            num_in_flight_tokens=seq.num_in_flight_tokens + num_tokens,
        )
    return rows, preempted


def _num_query_tokens(seq: Sequence, limits: Limits) -> int:
    """Tokens of a decode row of ``seq``. Drafts stay within its last position; a row with extras
    has none, since an executable behind the step draws its one token again.
    """
    if seq.request.sampling.needs_extras:
        return 1
    return min(limits.query_tokens, seq.max_num_tokens - 1 - seq.num_computed_tokens)


def _continued_prefills(draft: Draft, budget: Budget) -> list[ScheduledSeq]:
    rows: list[ScheduledSeq] = []
    for request_id, seq in tuple(draft.running.items()):
        if seq.is_prefilling:
            if (most := budget.left_for(seq)) <= 0:
                break
            if any(draft.limits.windows):
                seq = _with_pages_of_chunk(draft, seq, most)
                if num_missing(seq.pages, _chunk_end(seq, most), draft.limits):
                    break  # until others give theirs back
            row, draft.running[request_id] = _prefill_row(draft, seq, most)
            budget.add(seq, row.num_scheduled_tokens)
            rows.append(row)
    return rows


def _new_prefills(
    draft: Draft, budget: Budget
) -> tuple[list[ScheduledSeq], tuple[SlotAdmission, ...]]:
    rows: list[ScheduledSeq] = []
    started: list[Sequence] = []
    admissions: list[SlotAdmission] = []
    blocked: Sequence | None = None
    for head in draft.waiting:
        if (most := budget.left_for(head)) <= 0:
            break
        hashed = with_page_hashes(draft, head)
        if (admitted := admit(draft, hashed)) is None:
            blocked = hashed
            break
        seq, admission = admitted
        admissions.append(admission)
        row, after = _prefill_row(draft, seq, most)
        budget.add(seq, row.num_scheduled_tokens)
        rows.append(row)
        started.append(after)
    if started:
        draft.start(started)
    if blocked is not None and blocked is not draft.waiting[0]:
        draft.waiting = (blocked, *draft.waiting[1:])  # remembers its hashes
    return rows, tuple(admissions)


def _chunk_end(seq: Sequence, most: int) -> int:
    """Where a chunk of at most ``most`` tokens ends: no later than at the next border."""
    end = seq.borders[0] if seq.borders else seq.num_prefill_tokens
    return min(seq.num_computed_tokens + most, end)


def _with_pages_of_chunk(draft: Draft, seq: Sequence, most: int) -> Sequence:
    """``seq`` without the pages that its next chunk does not look at, and with those that it fills,
    if there are so many.
    """
    limits, pages, end = draft.limits, draft.pages, _chunk_end(seq, most)
    held = without_passed(pages, seq.pages, seq.num_computed_tokens, limits)
    if num_missing(held, end, limits) <= pages.num_free:
        held = extended(pages, held, end, limits)
    seq = draft.running[seq.request_id] = msgspec.structs.replace(seq, pages=held)
    return seq


def _prefill_row(draft: Draft, seq: Sequence, most: int) -> tuple[ScheduledSeq, Sequence]:
    """The next chunk of at most ``most`` tokens, and the sequence with it counted as computed."""
    start, end = seq.num_computed_tokens, _chunk_end(seq, most)
    ends, pools = end == seq.num_prefill_tokens, seq.request.pools
    samples = ends and not pools
    at_border = seq.borders[:1] == (end,)
    row = ScheduledSeq(
        seq.request_id,
        seq.epoch,
        seq.slot,
        start,
        end - start,
        seq.pages,
        token_ids=seq.token_ids.array()[start:end],
        samples=samples,
        target_ids=_target_ids(seq, start, end),
        pools=ends and pools,
        snapshot=draft.snapshots.take(draft.pages.knows) if at_border else None,
    )
    return row, msgspec.structs.replace(
        seq,
        num_computed_tokens=end,
        num_in_flight_tokens=seq.num_in_flight_tokens + samples,
        borders=seq.borders[1:] if at_border else seq.borders,
    )


def _target_ids(seq: Sequence, start: int, end: int) -> np.ndarray | None:
    """The prompt token after each of [start, end), -1 past the prompt's end.

    None when nobody asked for prompt logprobs, no prompt token is left, or a preempted sequence has
    delivered all of these.
    """
    last = min(end, len(seq.request.prompt_token_ids) - 1)  # position of the last target
    if seq.request.sampling.prompt_logprobs is None or last <= max(start, seq.num_prompt_logprobs):
        return None
    targets = np.full(end - start, -1, np.int32)
    targets[: last - start] = seq.token_ids.array()[start + 1 : last + 1]
    return targets
