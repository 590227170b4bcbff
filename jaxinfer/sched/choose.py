"""Plans the next step: its rows, their numbers of tokens, and its bucket.

Requests are served in order of (priority, arrival). Every decoding sequence gets a row, then
started prefills continue, then waiting requests are admitted, as far as ``max_num_batched_tokens``
prompt tokens and a bucket allow. Prefill chunks shrink to fit a bucket, to a multiple of
``Limits.align`` tokens; decode rows are never dropped. A row with prompt logprobs needs a bucket
that scores, and the bucket of a step has exactly the variants that its rows need. With
``prefill_first`` there are also steps without the decodes (``_only_prefills``).
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np

from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Bucket, ScheduledSeq, SlotAdmission, StepPlan, combined
from jaxinfer.sched.admit import admit, all_fit, chunk_tokens, with_page_hashes
from jaxinfer.sched.pages import extend_pages, have, num_missing_pages, release_passed
from jaxinfer.sched.sequence import Sequence
from jaxinfer.sched.state import Draft

NO_BUCKET = Bucket(0)


def choose_step(draft: Draft) -> StepPlan | None:
    """Plan one step and count its tokens as computed; None if no row can run."""
    preempted = draft.has_windows and _first_prefill_gets_pages(draft)
    only_prefills = _only_prefills(draft)
    decodes, preempted = ([], preempted) if only_prefills else _decode_rows(draft, preempted)
    query_tokens = _most_query_tokens(decodes, draft.limits)
    budget = Budget(draft, len(decodes), query_tokens, _variants(draft, decodes))
    prefills: list[ScheduledSeq] = []
    admissions: list[SlotAdmission] = []
    if len(decodes) < len(draft.running):
        prefills, admissions = _continued_prefills(draft, budget)
    # After a preemption no request is admitted in the same step, as pages are scarce.
    if draft.waiting and not preempted:
        new_prefills, new_admissions = _new_prefills(draft, budget)
        prefills += new_prefills
        admissions += new_admissions
    if only_prefills and not prefills:  # no waiting request can be admitted
        decodes, _ = _decode_rows(draft, preempted)
        query_tokens = _most_query_tokens(decodes, draft.limits)
        budget.variants = _variants(draft, decodes)
    if not decodes and not prefills:
        prefilling = [seq for seq in draft.running.values() if seq.is_prefilling]
        if any(seq.is_waiting_for_load for seq in prefilling):
            return None
        if not draft.in_flight and prefilling:
            # prefills wait for each other's pages: preempt the last one
            draft.preempt_last()
            return choose_step(draft)
        return None
    step_id, draft.next_step_id = draft.next_step_id, draft.next_step_id + 1
    size = Bucket(
        len(decodes), budget.used, len(prefills), budget.scores, query_tokens, budget.variants
    )
    bucket = next(bucket for bucket in draft.buckets if bucket.holds(size))  # the smallest
    plan = StepPlan(step_id, bucket, tuple(admissions), tuple(decodes), tuple(prefills))
    draft.in_flight = (*draft.in_flight, plan)
    return plan


class Budget:
    """The remaining prompt tokens of a step with ``num_decodes`` rows of up to ``query_tokens``."""

    def __init__(
        self, draft: Draft, num_decodes: int, query_tokens: int, variants: tuple[str, ...] = ()
    ) -> None:
        self._buckets = draft.buckets
        self._largest = NO_BUCKET  # memo of ``_largest_bucket``
        self._limit = draft.limits.max_num_batched_tokens
        self._num_decodes = num_decodes
        self._query_tokens = query_tokens
        self._num_prefills = 0
        self.used = 0
        self.scores = False  # whether a row needs a bucket that scores
        self.variants = variants  # that rows need

    def tokens_for(self, seq: Sequence) -> int:
        """The largest prefill chunk for ``seq``; 0 or less if no bucket has a row for it."""
        scores, variants = self.scores or seq.scores, combined(self.variants, seq.variants)
        bucket = self._largest
        fits = scores <= bucket.scores and variants == bucket.variants
        if bucket.num_prefills <= self._num_prefills or not fits:
            bucket = self._largest_bucket(scores, variants)
            if (scores, variants) == (self.scores, self.variants):
                self._largest = bucket
        return min(bucket.num_prefill_tokens, self._limit) - self.used

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Count a prefill row of ``num_tokens``; ``seq`` is as it was before the step."""
        self._num_prefills += 1
        self.used += num_tokens
        self.scores = self.scores or seq.scores
        self.variants = combined(self.variants, seq.variants)

    def _largest_bucket(self, scores: bool, variants: tuple[str, ...]) -> Bucket:
        """The bucket with most prefill tokens that has the rows so far and one more prefill."""
        rows = self._num_decodes, 0, self._num_prefills + 1
        size = Bucket(*rows, scores, self._query_tokens, variants)
        fitting = (bucket for bucket in self._buckets if bucket.holds(size))
        return max(fitting, key=attrgetter("num_prefill_tokens"), default=NO_BUCKET)


def _only_prefills(draft: Draft) -> bool:
    """True if this step has no decode rows, because of ``prefill_first``.

    This is so while prompts are left to compute and the whole batch fits. Decoding the first rows
    early gains nothing, as the last row's decode steps follow anyway, and a mixed step costs more
    than a prefill (Qwen3-4B on an H200: 8,192 prompt tokens take 134 ms with 256 decode rows and
    128.5 ms without; the 256 decodes alone take 13.7 ms). A batch that does not fit is planned as
    without ``prefill_first``: waiting requests need decoding rows to end, mixed steps read the
    weights only once, and there are no more preemptions than without it.
    """
    if not draft.limits.prefill_first:
        return False
    prompts_left = draft.waiting or any(seq.is_prefilling for seq in draft.running.values())
    return bool(prompts_left) and all_fit(draft)


def _first_prefill_gets_pages(draft: Draft) -> bool:
    """Take pages for the first sequence, if it prefills; True if others were preempted for them.

    Others may share pages that have left its windows. It would wait for them while they decode.
    """
    first, preempted = next(iter(draft.running.values()), None), False
    if first is None or not first.is_prefilling or first.is_waiting_for_load:
        return False
    limits = draft.limits
    end = _chunk_end(first, limits.max_num_batched_tokens, limits)
    while True:
        first = _with_pages_of_chunk(draft, first, limits.max_num_batched_tokens)
        if len(draft.running) == 1 or not any(num_missing_pages(first.pages, end, limits)):
            return preempted
        draft.preempt_last()
        preempted = True


def _decode_rows(draft: Draft, preempted: bool) -> tuple[list[ScheduledSeq], bool]:
    """A row for every decoding sequence, in order, and whether a sequence was ``preempted``.

    A sequence gets no further row if its tokens or drafts in flight may reach its last position.
    When no page is left, the last sequence in order is preempted. Rows that exist by then belong to
    earlier sequences, so they remain valid.
    """
    limits, running, pages = draft.limits, draft.running, draft.pages
    page_size, has_windows = limits.page_size, draft.has_windows
    rows: list[ScheduledSeq] = []
    for request_id, seq in tuple(running.items()):
        if preempted and request_id not in running:
            break  # this sequence and all later ones are preempted
        position = seq.num_computed_tokens
        if position < seq.num_prefill_tokens or position + 1 >= seq.max_num_tokens:
            continue
        held, num_tokens = seq.pages, 1
        if limits.query_tokens > 1:
            num_tokens = _num_query_tokens(seq, limits)
        if has_windows:
            held = release_passed(pages, held, seq.first_needed(limits.query_tokens), limits)
        end = position + num_tokens
        begins_page = -position % page_size < num_tokens
        if begins_page and any(missing := num_missing_pages(held, end, limits)):
            if held is not seq.pages:  # a preemption must not release the same pages again
                running[request_id] = seq = msgspec.structs.replace(seq, pages=held)
            while request_id in running and not have(draft.pools, missing):
                draft.preempt_last()
                preempted = True
            if request_id not in running:
                break
            held = extend_pages(pages, held, end, limits)
        saves: tuple[tuple[int, int], ...] = ()
        if limits.saves_answers and end % limits.save_step == 0:
            seq, saves = _with_saved_answer(draft, seq, end)
        rows.append(
            ScheduledSeq(request_id, seq.epoch, seq.slot, position, num_tokens, held, saves=saves)
        )
        running[request_id] = msgspec.structs.replace(
            seq,
            pages=held,
            num_computed_tokens=end,
            num_in_flight_tokens=seq.num_in_flight_tokens + num_tokens,
        )
    return rows, preempted


def _with_saved_answer(
    draft: Draft, seq: Sequence, end: int
) -> tuple[Sequence, tuple[tuple[int, int], ...]]:
    """``seq``, which decodes up to a border, and the snapshot of its state there, if a row is left.

    It replaces the one before (``Sequence.tail``), so that a sequence has one of its answer: when
    the step is reported, or at once if no row is free.
    """
    if not draft.snapshots.free and seq.tail is not None:
        draft.forget_snapshot(seq.tail)
    snapshot = draft.take_snapshot()
    if snapshot is None:
        return seq, ()
    return msgspec.structs.replace(seq, saving=end), ((1, snapshot),)


def _num_query_tokens(seq: Sequence, limits: Limits) -> int:
    """Tokens of a decode row of ``seq``, drafts included.

    Drafts do not pass its last position. A row with extras has no drafts, as an executable after
    the step draws one token again; nor has a constrained one, as its masks are for one token each.
    """
    if seq.request.has_extras:
        return 1
    return min(limits.query_tokens, seq.max_num_tokens - 1 - seq.num_computed_tokens)


def _most_query_tokens(decodes: list[ScheduledSeq], limits: Limits) -> int:
    """The most tokens of a decode row."""
    if limits.query_tokens == 1:
        return 1
    return max([row.num_scheduled_tokens for row in decodes], default=1)


def _variants(draft: Draft, decodes: list[ScheduledSeq]) -> tuple[str, ...]:
    """The variants that these rows need."""
    if not draft.limits.variants:
        return ()
    return combined(*[draft.running[row.request_id].variants for row in decodes])


def _continued_prefills(
    draft: Draft, budget: Budget
) -> tuple[list[ScheduledSeq], list[SlotAdmission]]:
    """Rows of prompts that have started, or whose prefix has been restored; the latter's slots are
    written now.
    """
    rows: list[ScheduledSeq] = []
    admissions: list[SlotAdmission] = []
    for request_id, seq in tuple(draft.running.items()):
        if seq.is_prefilling and not seq.is_waiting_for_load:
            max_chunk = budget.tokens_for(seq)
            if _chunk_end(seq, max_chunk, draft.limits) <= seq.num_computed_tokens:
                break
            if draft.has_windows:
                seq = _with_pages_of_chunk(draft, seq, max_chunk)
                end = _chunk_end(seq, max_chunk, draft.limits)
                if any(num_missing_pages(seq.pages, end, draft.limits)):
                    break  # wait until other sequences return pages
            if seq.is_new:
                admissions.append(seq.admission)
            row, draft.running[request_id] = _prefill_row(draft, seq, max_chunk)
            budget.add(seq, row.num_scheduled_tokens)
            rows.append(row)
    return rows, admissions


def _new_prefills(draft: Draft, budget: Budget) -> tuple[list[ScheduledSeq], list[SlotAdmission]]:
    """Rows of waiting requests. One that restores a prefix gets none yet, and blocks no other."""
    rows: list[ScheduledSeq] = []
    started: list[Sequence] = []
    admissions: list[SlotAdmission] = []
    blocked: Sequence | None = None
    for head in draft.waiting:
        if (max_chunk := budget.tokens_for(head)) <= 0:
            break
        hashed = with_page_hashes(draft, head)
        if (seq := admit(draft, hashed, max_chunk)) is None:
            blocked = hashed
            break
        if seq.is_waiting_for_load:
            started.append(seq)
            continue
        admissions.append(seq.admission)
        row, after = _prefill_row(draft, seq, max_chunk)
        budget.add(seq, row.num_scheduled_tokens)
        rows.append(row)
        started.append(after)
    if started:
        draft.start(started)
    if blocked is not None and blocked is not draft.waiting[0]:
        draft.waiting = (blocked, *draft.waiting[1:])  # keep its page hashes
    return rows, admissions


def _chunk_end(seq: Sequence, max_chunk: int, limits: Limits) -> int:
    """The end of the next chunk of up to ``max_chunk`` tokens."""
    num_left = seq.num_prefill_tokens - seq.num_computed_tokens
    return seq.num_computed_tokens + chunk_tokens(num_left, max_chunk, limits)


def _with_pages_of_chunk(draft: Draft, seq: Sequence, max_chunk: int) -> Sequence:
    """``seq`` without pages outside its next chunk's windows, and with new pages for the chunk.

    The new pages are missing if not enough are free.
    """
    limits, pages = draft.limits, draft.pages
    end = _chunk_end(seq, max_chunk, limits)
    held = release_passed(pages, seq.pages, seq.first_needed(limits.query_tokens), limits)
    if have(draft.pools, num_missing_pages(held, end, limits)):
        held = extend_pages(pages, held, end, limits)
    seq = draft.running[seq.request_id] = msgspec.structs.replace(seq, pages=held)
    return seq


def _prefill_row(draft: Draft, seq: Sequence, max_chunk: int) -> tuple[ScheduledSeq, Sequence]:
    """A row for the next chunk of up to ``max_chunk`` tokens, and the sequence after it."""
    start, end = seq.num_computed_tokens, _chunk_end(seq, max_chunk, draft.limits)
    ends, pools = end == seq.num_prefill_tokens, seq.request.pools
    samples = ends and not pools
    seq, saves = _with_saves(draft, seq, end) if seq.borders else (seq, ())
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
        reads=seq.reads,
        saves=saves,
    )
    seq = msgspec.structs.replace(
        seq,
        num_computed_tokens=end,
        num_in_flight_tokens=seq.num_in_flight_tokens + samples,
        is_new=False,
        reads=None,
    )
    return row, seq


def _with_saves(
    draft: Draft, seq: Sequence, end: int
) -> tuple[Sequence, tuple[tuple[int, int], ...]]:
    """``seq`` without the borders up to ``end``, and the snapshots that are saved there."""
    borders, saves, saving = seq.borders, list[tuple[int, int]](), seq.saving
    while borders and borders[0] <= end:
        snapshot = draft.take_snapshot()
        if snapshot is not None:
            saves.append((borders[0] - seq.num_computed_tokens, snapshot))
            saving = borders[0] if len(borders) == 1 else saving
        borders = borders[1:]
    return msgspec.structs.replace(seq, borders=borders, saving=saving), tuple(saves)


def _target_ids(seq: Sequence, start: int, end: int) -> np.ndarray | None:
    """The prompt token after each position in [start, end); -1 past the prompt's end.

    None without prompt logprobs, if no prompt token is left, or if the logprobs of all of them were
    delivered before a preemption.
    """
    last = min(end, len(seq.request.prompt_token_ids) - 1)  # position of the last target
    if seq.request.sampling.prompt_logprobs is None or last <= max(start, seq.num_delivered):
        return None
    targets = np.full(end - start, -1, np.int32)
    targets[: last - start] = seq.token_ids.array()[start + 1 : last + 1]
    return targets
