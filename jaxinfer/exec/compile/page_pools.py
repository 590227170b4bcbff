"""The sizes of the page pools: how a number of pages is divided among kinds of entries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import PageGroup

# With shorter sequences windows would have most of the pages, with longer ones so few that short
# requests wait. If a group without a window and one of 1,024 tokens have pools of equal pages,
# 20,000 become 12,822 and 7,178: enough for 72 % of the sequences of 1,024 tokens that would fit if
# pages were divided for them, and for 68 % of those of 16,384.
TYPICAL_TOKENS = 2048


def split_pages(limits: Limits, num_pages: int) -> tuple[int, ...]:
    """The pages of each pool, of ``num_pages`` in all; padding pages are included.

    The pools hold the same context, as much as fits if its sequences are of ``TYPICAL_TOKENS``, or
    longer if there are ``max_num_seqs``: the longer they are, the fewer pages a window needs for
    each token. Pages that are left go to the first pools. No pool gets more than all sequences at
    full length can fill. A single pool gets all pages.
    """
    caps = most_pages(limits)
    spread = range(limits.max_num_seqs * cdiv(limits.max_model_len, limits.page_size) + 1)
    fitting = bisect_right(spread, num_pages, key=lambda pages: sum(_pages_for(limits, pages)))
    sizes = _pages_for(limits, max(0, fitting - 1))
    for pool, cap in enumerate(caps):
        sizes[pool] += min(num_pages - sum(sizes), cap - sizes[pool])
    return tuple(sizes)


def most_pages(limits: Limits) -> tuple[int, ...]:
    """The pages of each pool with which every sequence can have its full length."""
    needed = limits.pages_needed(limits.max_model_len)
    return tuple(1 + limits.max_num_seqs * count for count in needed)


def fewest_pages(limits: Limits, least: Sequence[int]) -> int:
    """The smallest number that ``split_pages`` divides into at least ``least`` for each pool."""

    def suffices(num_pages: int) -> bool:
        pairs = zip(split_pages(limits, num_pages), least, strict=True)
        return all(size >= own for size, own in pairs)

    enough = sum(least)  # unless the division has more than ``least`` for another pool
    return enough + bisect_left(range(enough, sum(most_pages(limits))), True, key=suffices)


def _pages_for(limits: Limits, context: int) -> list[int]:
    """The pages of each pool for decoding sequences that together have ``context`` pages of tokens.

    Groups with a window have pages for one chunk of a prompt in addition.
    """
    num_seqs = cdiv(context * limits.page_size, min(TYPICAL_TOKENS, limits.max_model_len))
    num_seqs = max(1, min(num_seqs, limits.max_num_seqs))
    short, num_longer = divmod(context, num_seqs)

    def count(group: PageGroup) -> int:
        most = limits.most_pages(group, prefills=False)
        chunk = limits.most_pages(group) - most
        shorter, longer, whole = (
            cdiv(pages, group.tokens_per_entry) for pages in (short, short + 1, context)
        )
        decodes = (num_seqs - num_longer) * min(shorter, most)
        return decodes + num_longer * min(longer, most) + min(whole, chunk)

    return [1 + count for count in limits.of_pools(map(count, limits.groups))]
