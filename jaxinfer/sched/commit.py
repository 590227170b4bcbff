"""Applies a finished step: new tokens, ended sequences, pages that can be shared.

Owns: matching results to sequences by (request_id, epoch), and the conditions that end a sequence.
"""

from __future__ import annotations

import msgspec

from jaxinfer.core.errors import EngineError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import NO_OUTPUT, RowResult, ScheduledSeq, StepResult, TokenEvent
from jaxinfer.sched.prefix import following_page_hashes, group_keys
from jaxinfer.sched.sequence import Sequence
from jaxinfer.sched.state import Draft


def commit_step(draft: Draft, result: StepResult) -> None:
    """Apply the oldest step's result; rows of ended or preempted sequences are dropped.

    Raises ``EngineError`` if the result belongs to another step or lacks one of its rows.
    """
    plan = draft.pop_in_flight(result.step_id)
    results = {row.request_id: row for row in result.rows}
    for row in plan.rows:
        seq = draft.running.get(row.request_id)
        if seq is None or seq.epoch != row.epoch:
            continue
        found = results.get(row.request_id)
        if found is not None and found.epoch == row.epoch and found.error:
            draft.end(
                row.request_id,
                FinishReason.ERROR,
                found.error,
                is_request_error=found.is_request_error,
            )
            continue
        if (
            found is None
            or found.epoch != row.epoch
            or bool(found.token_ids) != row.samples
            or (found.output.pooled is not None) != row.pools
        ):
            raise EngineError(
                f"the result of step {result.step_id} has no fitting row for request "
                f"{row.request_id!r} of epoch {row.epoch}; report every row of the step"
            )
        _commit_row(draft, seq, row, found)


def fail_step(draft: Draft, step_id: int, error: str) -> None:
    """End every request with a row in the oldest step; the others continue."""
    for row in draft.pop_in_flight(step_id).rows:
        seq = draft.running.get(row.request_id)
        if seq is not None and seq.epoch == row.epoch:
            draft.end(row.request_id, FinishReason.ERROR, error)


def finish_reason(seq: Sequence, token_ids: IntLog) -> tuple[FinishReason | None, int | None]:
    """The reason why the last of ``token_ids`` ends the sequence, and the user's stop id if it did.

    The length limit applies even before ``min_tokens``. A token that is both the model's eos and
    one of the user's stop ids counts as eos, as in vLLM.
    """
    request = seq.request
    stop_token_ids = request.sampling.stop_token_ids
    if request.eos_token_ids or stop_token_ids:
        token_id = token_ids[-1]
        num_generated = len(token_ids) - len(request.prompt_token_ids)
        if num_generated >= request.sampling.min_tokens:
            if token_id in request.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in stop_token_ids:
                return FinishReason.STOP, token_id
    if len(token_ids) >= seq.max_num_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _commit_row(draft: Draft, seq: Sequence, row: ScheduledSeq, found: RowResult) -> None:
    drawn, output, num_delivered = found.token_ids, found.output, seq.num_delivered
    reason = FinishReason.STOP if row.pools else None
    token_ids, stop_token_id = seq.token_ids, None
    # drafts of the row that were not accepted
    num_refused = row.num_scheduled_tokens - len(drawn) if row.token_ids is None else 0
    for number, token_id in enumerate(drawn, 1):
        token_ids = token_ids.append(token_id)
        reason, stop_token_id = finish_reason(seq, token_ids)
        if reason is not None:
            drawn = drawn[:number]
            break
    known = row.num_computed_tokens + row.num_scheduled_tokens
    if output is not NO_OUTPUT:
        num_known = max(0, num_delivered - row.num_computed_tokens)
        if output.is_of_tokens:
            num_delivered = max(num_delivered, known)
        output = output.cut(num_known, row.num_scheduled_tokens, len(drawn))
    seq = msgspec.structs.replace(
        seq,
        token_ids=token_ids,
        num_computed_tokens=seq.num_computed_tokens - num_refused,
        num_in_flight_tokens=seq.num_in_flight_tokens - len(found.token_ids) - num_refused,
        num_delivered=num_delivered,
    )
    seq = _register_pages(draft, seq, known if row.token_ids is not None else len(token_ids) - 1)
    for count, snapshot in row.saves:
        border = row.num_computed_tokens + count
        page_hash = seq.page_hashes[border // draft.limits.page_size - 1]
        before = draft.snapshots
        draft.snapshots = before.register(snapshot, page_hash)
        if border == seq.saving:
            seq = msgspec.structs.replace(seq, saving=None)
        if row.token_ids is None:
            if seq.tail is not None and seq.tail != page_hash:
                draft.forget_snapshot(seq.tail)
            is_own = page_hash not in before.by_hash  # else it is another sequence's to keep
            seq = msgspec.structs.replace(seq, tail=page_hash if is_own else None)
    if drawn or output.is_of_tokens or reason is not None:
        draft.events.append(
            TokenEvent(
                row.request_id,
                drawn,
                output,
                seq.num_cached_tokens or 0,
                reason,
                stop_token_id,
            )
        )
    if reason is None:
        draft.running[row.request_id] = seq
    else:
        draft.remove(seq)


def _register_pages(draft: Draft, seq: Sequence, num_computed_tokens: int) -> Sequence:
    """Register the pages that ``num_computed_tokens`` fill, so that later requests share them."""
    limits = draft.limits
    num_pages = num_computed_tokens // limits.page_size
    if num_pages <= seq.num_registered_pages or not limits.enable_prefix_caching:
        return seq
    added = following_page_hashes(
        seq.page_hashes, seq.request.cache_root, seq.token_ids, num_pages, limits.page_size
    )
    page_hashes = (*seq.page_hashes, *added)
    for group, pages in enumerate(seq.pages):
        registered = seq.num_registered_pages // limits.groups[group].tokens_per_entry
        first = max(registered, pages.first)  # returned pages cannot be shared
        if keys := group_keys(page_hashes[:num_pages], first, group, limits):
            ids = pages.ids.array()[first - pages.first :][: len(keys)].tolist()
            draft.pages[group].register(ids, keys)
    return msgspec.structs.replace(seq, page_hashes=page_hashes, num_registered_pages=num_pages)
