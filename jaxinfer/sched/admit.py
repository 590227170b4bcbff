"""Refuses or queues a request on arrival, and later admits it to a slot and pages.

At admission a sequence takes the pages of all its known tokens, or in a group with a window the
largest number that it will hold at once. A prefill therefore waits for memory later only if pages
that it returned are still shared. Pages for drawn tokens are taken as decoding reaches them
(``choose``). No request overtakes the head of the queue, so a long prompt cannot starve.
"""

from __future__ import annotations

import msgspec

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import PageGroup, Pages, TokenEvent
from jaxinfer.sched.pages import have
from jaxinfer.sched.prefix import PrefixHit, following_page_hashes, longest_hit
from jaxinfer.sched.sequence import Sequence
from jaxinfer.sched.state import Draft
from jaxinfer.sched.tiers import IN_TIER, Continued, continued_in_tiers, restoring_of

WATERMARK = 100  # at admission 1 of 100 pages stays free, as running sequences will need more


def arrive(draft: Draft, request: Request) -> None:
    """Queue a request; one that can never fit is refused by an event."""
    if request.request_id in draft.orders:
        draft.duplicates.append(request.request_id)
        return
    token_ids = IntLog(request.prompt_token_ids)
    num_prompt_tokens = len(token_ids)
    if error := refusal(num_prompt_tokens, request.max_tokens, draft.limits):
        event = TokenEvent(
            request.request_id,
            finish_reason=FinishReason.ERROR,
            error=error,
            is_request_error=True,
        )
        draft.events.append(event)
        return
    seq = Sequence(
        request=request,
        order=(request.priority, request.arrival, request.request_id),
        token_ids=token_ids,
        max_num_tokens=min(num_prompt_tokens + request.max_tokens, draft.limits.max_model_len),
    )
    draft.orders[request.request_id] = seq.order
    draft.enqueue(seq)


def refusal(num_prompt_tokens: int, max_tokens: int, limits: Limits) -> str:
    """The reason why a request of this size can never be served, or an empty string."""
    if not num_prompt_tokens:
        return "the prompt is empty; send at least one token"
    room = 0 if limits.pooling else 1  # for an output
    if num_prompt_tokens + room > limits.max_model_len:
        longest = limits.max_model_len - room
        output = f", which leaves no room for an output within max_model_len {limits.max_model_len}"
        # clients match the first sentence, which is the same in OpenAI's API and vLLM
        return (
            f"This model's maximum context length is {limits.max_model_len} tokens. However, the "
            f"prompt has {num_prompt_tokens} tokens{output if room else ''}; shorten the prompt to "
            f"at most {longest} tokens or raise max_model_len"
        )
    num_tokens = min(num_prompt_tokens + max_tokens, limits.max_model_len)
    if (pool := limits.full_pool(num_tokens)) is not None:
        return (
            f"prompt and max_tokens may reach {num_tokens} tokens, which need "
            f"{limits.pages_needed(num_tokens)[pool]} pages of {limits.page_size}, but the pool "
            f"has {limits.num_pages[pool] - 1}; lower max_tokens, shorten the prompt or raise "
            "num_pages"
        )
    return ""


def with_page_hashes(draft: Draft, seq: Sequence) -> Sequence:
    """``seq`` with the hashes of the pages it might reuse; they are kept while it waits.

    If a group has no window, the hashes end with the first one that neither the pool nor a tier
    has: later pages cannot be reused. Their hashes are computed when their tokens have been: then
    the device is busy with the next step, whereas now it may be idle until this one is planned.

    At least one token must be computed to have logits to draw from. Prompt logprobs and taps need
    every prompt token to be computed, so nothing is reused (as in vLLM).
    """
    limits, known = draft.limits, seq.page_hashes
    num_pages = _num_reusable_pages(seq, limits)
    # without a window, a prefix needs its first pages; the keys of group 0 are plain hashes
    chained = limits.groups[0] == PageGroup(pool=limits.groups[0].pool)
    on_device, in_tiers = draft.pages[0].page_by_hash, draft.moves.keys

    def ends(page_hash: bytes) -> bool:
        return chained and page_hash not in on_device and page_hash not in in_tiers

    if num_pages <= len(known) or (known and ends(known[-1])):
        return seq
    page_hashes = list(known)
    for page_hash in following_page_hashes(
        known, seq.request.cache_root, seq.token_ids, num_pages, limits.page_size
    ):
        page_hashes.append(page_hash)
        if ends(page_hash):
            break
    return msgspec.structs.replace(seq, page_hashes=tuple(page_hashes))


def admit(draft: Draft, seq: Sequence, max_chunk: int) -> Sequence | None:
    """``seq``, the head of the queue, with a slot and its pages; None while it must wait.

    ``max_chunk``: the tokens of its first chunk, at most. The caller moves it to running
    (``Draft.start``). If no sequence runs, every page is free and the head is always admitted.
    """
    limits = draft.limits
    if not draft.free_slots:
        return None
    reusable = seq.page_hashes[: _num_reusable_pages(seq, limits)]
    hit = longest_hit(draft.pages, draft.snapshots, reusable, limits)
    if not chunk_tokens(len(seq.token_ids) - hit.num_pages * limits.page_size, max_chunk, limits):
        return None
    if found := continued_in_tiers(draft, seq, reusable, hit):
        if not _takes_pages(draft, seq, found.hit):
            return None
        if admitted := _restoring(draft, seq, reusable, hit, found):
            return admitted
    if not _takes_pages(draft, seq, hit):
        return None
    num_cached_tokens = hit.num_pages * limits.page_size
    reads: int | None = None
    if limits.num_snapshots and hit.num_pages:
        reads, draft.snapshots = draft.snapshots.use(reusable[hit.num_pages - 1])
        draft.restored.add(reads)
    return msgspec.structs.replace(
        _placed(draft, seq, hit, _own_pages(draft, seq, hit)),
        num_computed_tokens=num_cached_tokens,
        num_registered_pages=hit.num_pages,
        num_cached_tokens=(
            num_cached_tokens if seq.num_cached_tokens is None else seq.num_cached_tokens
        ),
        reads=reads,
    )


def _restoring(
    draft: Draft, seq: Sequence, reusable: tuple[bytes, ...], hit: PrefixHit, found: Continued
) -> Sequence | None:
    """``seq`` with a slot and its pages, for which a load is ordered.

    None if no row is left for a snapshot: then it is computed.
    """
    limits, end = draft.limits, found.hit.num_pages
    reads: int | None = None
    if limits.num_snapshots and found.state_key is None:
        reads, draft.snapshots = draft.snapshots.use(reusable[end - 1])
        draft.restored.add(reads)
    elif found.state_key is not None and not draft.has_row_for_snapshot:
        return None
    pages = _own_pages(draft, seq, found.hit)
    placed = _placed(draft, seq, found.hit, pages)
    ids = [own.ids[: len(known)] for own, known in zip(pages, found.hit.ids, strict=True)]
    own = restoring_of(placed.epoch, found, reusable, ids, draft)
    return msgspec.structs.replace(
        placed,
        num_computed_tokens=end * limits.page_size,
        num_registered_pages=hit.num_pages,
        restoring=own,
        reads=reads,
    )


def _takes_pages(draft: Draft, seq: Sequence, hit: PrefixHit) -> bool:
    """True if enough pages are free for the known tokens of ``seq``, which shares those of ``hit``.

    If it is the only one with a slot it may take them all.
    """
    limits = draft.limits
    num_new = _num_new_pages(seq, hit, limits)
    idle = len(draft.free_slots) == draft.num_slots
    shared = [[page for page in ids if page != IN_TIER] for ids in hit.ids]
    triples = zip(draft.pages, shared, num_new, strict=True)
    needed = limits.of_pools(count + pool.num_cached_among(ids) for pool, ids, count in triples)
    return have(draft.pools, needed if idle else _with_watermark(needed, limits))


def _own_pages(draft: Draft, seq: Sequence, hit: PrefixHit) -> tuple[Pages, ...]:
    """The pages of ``seq`` in each group: those of ``hit``, with new ones where it has none."""
    limits = draft.limits
    num_new = _num_new_pages(seq, hit, limits)
    for group, ids in enumerate(hit.ids):
        draft.pages[group].share([page for page in ids if page != IN_TIER], group)
    owned: list[Pages] = []
    for group, (ids, count) in enumerate(zip(hit.ids, num_new, strict=True)):
        new = iter(draft.pages[group].take(count, group))
        known = [next(new) if page == IN_TIER else page for page in ids]
        first = limits.first_page(hit.num_pages * limits.page_size, limits.groups[group])
        owned.append(Pages(IntLog([*known, *new]), first))
    return tuple(owned)


def _placed(draft: Draft, seq: Sequence, hit: PrefixHit, pages: tuple[Pages, ...]) -> Sequence:
    """``seq`` with these pages, a slot and an epoch."""
    limits = draft.limits
    epoch, draft.next_epoch = draft.next_epoch, draft.next_epoch + 1
    return msgspec.structs.replace(
        seq,
        epoch=epoch,
        slot=draft.free_slots.pop(),
        pages=pages,
        num_prefill_tokens=len(seq.token_ids),
        borders=_borders(seq, hit, limits) if limits.num_snapshots else (),
        is_new=True,
    )


def chunk_tokens(num_left: int, max_chunk: int, limits: Limits) -> int:
    """The tokens of the next chunk of a prefill with ``num_left`` tokens; 0: too few are allowed.

    A chunk that does not end the prefill has a multiple of ``Limits.align``: so the state there is
    the same, whatever was cached or computed together.
    """
    return num_left if num_left <= max_chunk else max_chunk // limits.align * limits.align


def all_fit(draft: Draft) -> bool:
    """True if all waiting and running sequences fit together, each with its longest output.

    If so, no sequence will be preempted, and the head of the queue is admitted at once. Pages that
    might be shared are counted for each of their owners.
    """
    limits, waiting = draft.limits, draft.waiting
    if len(waiting) > len(draft.free_slots):
        return False
    needed = [0] * len(draft.pools)
    for seq in (*waiting, *draft.running.values()):
        held = limits.of_pools(len(pages.ids) for pages in seq.pages)
        for pool, count in enumerate(limits.pages_needed(seq.max_num_tokens)):
            needed[pool] += count - held[pool]
    if waiting:
        head = _with_watermark(limits.pages_needed(len(waiting[0].token_ids)), limits)
        needed = [max(pair) for pair in zip(needed, head, strict=True)]
    return have(draft.pools, needed)


def _num_new_pages(seq: Sequence, hit: PrefixHit, limits: Limits) -> list[int]:
    """Unshared pages that a sequence takes at admission, in each group."""
    num_tokens, counts = len(seq.token_ids), list[int]()
    for ids, group in zip(hit.ids, limits.groups, strict=True):
        first = limits.first_page(hit.num_pages * limits.page_size, group)
        whole = cdiv(num_tokens, limits.tokens_per_page(group)) - first
        num_shared = len(ids) - ids.count(IN_TIER)
        counts.append(min(whole, limits.most_pages(group)) - num_shared)
    return counts


def _borders(seq: Sequence, hit: PrefixHit, limits: Limits) -> tuple[int, ...]:
    """The page borders whose state a prefill saves in snapshots, in tokens: at most ``MAX_SAVES``.

    The first is the end of the pages that the pool knows, if it has no snapshot: another prompt had
    this beginning, so a third may have it (the branching point of SGLang's and TensorRT-LLM's
    caches). The second is the prompt's last border: the same prompt, or one that continues it, can
    start from there.
    """
    last = _num_whole_pages(len(seq.token_ids) - 1, limits)
    ends = {num_pages for num_pages in (hit.num_known, last) if num_pages > hit.num_pages}
    return tuple(sorted(num_pages * limits.page_size for num_pages in ends))


def _with_watermark(counts: list[int], limits: Limits) -> list[int]:
    """Counts for each pool, and the pages that stay free at admission."""
    pairs = zip(counts, limits.num_pages, strict=True)
    return [count + (size - 1) // WATERMARK for count, size in pairs]


def _num_whole_pages(num_tokens: int, limits: Limits) -> int:
    """Pages of ``page_size`` tokens up to the last border at which a prefix of them can end."""
    return num_tokens // limits.page_size // limits.reuse_step * limits.reuse_step


def _num_reusable_pages(seq: Sequence, limits: Limits) -> int:
    if not (limits.enable_prefix_caching and seq.request.sampling.reuses_prefix):
        return 0
    return _num_whole_pages(len(seq.token_ids) - 1, limits)
