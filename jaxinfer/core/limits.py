"""The limits of an engine, which its settings and its device amount to (``exec.compile.sizes``)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from math import lcm

import msgspec

from jaxinfer.core.points import Point
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket, PageGroup, combined
from jaxinfer.core.structured import DEFAULT_FORM_LIMITS, FormLimits

MAX_STEPS_IN_FLIGHT = 3  # while a step is planned, that step included


class Limits(msgspec.Struct, frozen=True, dict=True):  # a dict for cached properties
    """The limits that the scheduler keeps to; part of its state.

    A page has ``page_size`` entries in every group, so a page of entries that stand for several
    tokens covers more context: kernels know one size of pages, and an entry is never in two.
    """

    num_pages: tuple[int, ...]  # of each pool; page 0 is the padding sink
    page_size: int  # entries of a page
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    buckets: tuple[Bucket, ...]
    enable_prefix_caching: bool = True
    prefill_first: bool = False
    groups: tuple[PageGroup, ...] = (PageGroup(),)
    pooling: str = ""  # of hidden states, one of ``core.pooling.KINDS``; empty: tokens are drawn
    # rows behind the slots for copies of their layer state (``sched.snapshots``); 0 for models
    # without such state. A model with it has prefix caching only with snapshots
    num_snapshots: int = 0
    # tokens: chunks of a prompt end at multiples of it, or with the prompt (``LayerState.align``)
    align: int = 1
    points: tuple[Point, ...] = ()  # that requests may read and steer
    form: FormLimits = DEFAULT_FORM_LIMITS  # of structured outputs
    digests: bool = False  # whether rows have digests (``exec.calls.digest``)

    @cached_property  # used for each step
    def query_tokens(self) -> int:
        """The most tokens of a decode row: the last token drawn, then drafts."""
        return max([bucket.query_tokens for bucket in self.buckets], default=1)

    @cached_property  # used for each step
    def variants(self) -> tuple[str, ...]:
        """The variants that buckets have, each of which requests may need."""
        return combined(*(bucket.variants for bucket in self.buckets))

    @property
    def num_state_rows(self) -> int:
        """Rows of an array with an entry for each sequence: slots, the padding sink, snapshots."""
        return self.max_num_seqs + 1 + self.num_snapshots

    @property
    def num_usable_pages(self) -> int:
        """Pages of all pools that sequences can own: all but the padding sinks."""
        return sum(self.num_pages) - len(self.num_pages)

    @property
    def reuse_step(self) -> int:
        """Pages of ``page_size`` tokens by which prefixes grow that all groups can reuse."""
        tokens = self.page_size * lcm(*[group.tokens_per_entry for group in self.groups])
        return lcm(tokens, self.align) // self.page_size

    @cached_property  # used for each row
    def save_step(self) -> int:
        """Tokens between the borders at which states of sequences are saved; 0 if none are."""
        return self.page_size * self.reuse_step if self.num_snapshots else 0

    @cached_property  # used for each row
    def saves_answers(self) -> bool:
        """True if there are snapshots for the answer of every sequence besides those of prompts."""
        return 0 < 2 * self.max_num_seqs <= self.num_snapshots

    def tokens_per_page(self, group: PageGroup) -> int:
        """Tokens of context that a page of a group covers."""
        return self.page_size * group.tokens_per_entry

    def first_page(self, position: int, group: PageGroup) -> int:
        """The first page of a group to which the token at ``position``, or a later one, attends."""
        if group.window is None:
            return 0
        return max(0, position + 1 - group.window) // self.tokens_per_page(group)

    def of_pools(self, counts: Iterable[int]) -> list[int]:
        """The sums for each pool of counts for each group."""
        sums = [0] * len(self.num_pages)
        for group, count in zip(self.groups, counts, strict=False):
            sums[group.pool] += count
        return sums

    def most_pages(self, group: PageGroup, *, prefills: bool = True) -> int:
        """The most pages that a sequence owns in a group. With a window they are pages for the
        window and for one chunk of a prompt, or for the drafts of the steps in flight. Without
        ``prefills``: the most that it owns while it decodes.
        """
        tokens_per_page = self.tokens_per_page(group)
        whole = cdiv(self.max_model_len, tokens_per_page)
        if group.window is None:
            return whole
        chunk = self.max_num_batched_tokens if prefills else 0
        # pages for a snapshot stay until its step ends: see ``sched.state.Sequence.saving``
        new = max(chunk, self.save_step + MAX_STEPS_IN_FLIGHT * self.query_tokens)
        span = group.window - 1 + min(new, self.max_model_len)
        return min(cdiv(span, tokens_per_page) + 1, whole)

    def longest_context(self) -> int:
        """Tokens of the longest sequence that all pages together hold, up to ``max_model_len``."""
        fitting = bisect_left(
            range(1, cdiv(self.max_model_len, self.page_size) + 1),
            True,
            key=lambda pages: self.full_pool(pages * self.page_size) is not None,
        )
        return min(fitting * self.page_size, self.max_model_len)

    def full_pool(self, num_tokens: int) -> int | None:
        """A pool without the pages that a sequence of ``num_tokens`` may own; None if all have."""
        pairs = zip(self.pages_needed(num_tokens), self.num_pages, strict=True)
        return next((pool for pool, (needed, size) in enumerate(pairs) if needed >= size), None)

    def pages_needed(self, num_tokens: int) -> list[int]:
        """The most pages that a sequence of ``num_tokens`` tokens owns in each pool."""
        return self.of_pools(
            min(cdiv(num_tokens, self.tokens_per_page(group)), self.most_pages(group))
            for group in self.groups
        )
