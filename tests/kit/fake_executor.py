"""An executor without a model: tokens are a function of (seed, prefix), pages hold prefix digests.

It runs a plan as the device would, in launch order, and checks for every row that the pages of its
context hold exactly the right prefix. Any schedule must therefore give the same tokens, and a
wrongly shared or reused page is an error at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from jaxinfer.core.request import Request
from jaxinfer.core.step import (
    RowResult,
    ScheduledSeq,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB = 50


def digest(parent: int, token_id: int) -> int:
    """A prefix's digest, made of ints only, so it is the same in every process."""
    return hash((parent, token_id))


def salt_digest(request: Request) -> int:
    """The digest before the first token; pages are shared only between requests with one salt."""
    return sum((i + 1) * ord(c) for i, c in enumerate(request.cache_salt))


def draw(request: Request, prefix: int, num_generated: int) -> int:
    """The token after ``prefix``; stop ids are masked until ``min_tokens``, as on the device."""
    token_id = hash((request.seed, prefix)) % VOCAB
    if num_generated < request.sampling.min_tokens:
        while token_id in request.stop_ids:
            token_id = (token_id + 1) % VOCAB
    return token_id


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """The output of ``request`` generated alone, by the rules of ending."""
    prefix = salt_digest(request)
    for token_id in request.prompt_token_ids:
        prefix = digest(prefix, token_id)
    out: list[int] = []
    while len(out) < min(request.max_tokens, max_model_len - len(request.prompt_token_ids)):
        out.append(draw(request, prefix, len(out)))
        prefix = digest(prefix, out[-1])
        if out[-1] in request.stop_ids and len(out) >= request.sampling.min_tokens:
            break
    return out


@dataclass
class Slot:
    """A row of the device's sequence table."""

    request: Request
    token_ids: list[int]
    prefixes: list[int] = field(default_factory=list)  # prefixes[i] covers token_ids[: i + 1]

    def __post_init__(self) -> None:
        tokens, self.token_ids = self.token_ids, []
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        parent = self.prefixes[-1] if self.prefixes else salt_digest(self.request)
        self.prefixes.append(digest(parent, token_id))
        self.token_ids.append(token_id)


class FakeExecutor:
    """Holds slots and a shadow of the pages.

    The shadow maps (page, offset) to the group of layers that wrote the entry, and to the digest of
    the prefix that ends there.
    """

    def __init__(self, page_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.page_size = page_size
        self.windows = windows
        self.slots: dict[int, Slot] = {}
        self.store: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, plan: StepPlan, hashed_pages: frozenset[int] = frozenset()) -> StepResult:
        """Run a step; ``hashed_pages`` must not be written."""
        for admission in plan.admissions:
            assert list(admission.token_ids)[: admission.num_prompt_tokens] == list(
                admission.request.prompt_token_ids
            )
            self.slots[admission.slot] = Slot(admission.request, list(admission.token_ids))
        self._check_shape(plan)
        written: set[tuple[int, int]] = set()
        for row in plan.rows:  # a layer first appends every row's KV, then runs attention
            self._write(row, written, hashed_pages)
        return StepResult(plan.step_id, tuple(self._attend(row) for row in plan.rows))

    def _check_shape(self, plan: StepPlan) -> None:
        prefill_tokens = sum(row.num_scheduled_tokens for row in plan.prefills)
        assert plan.bucket.fits(len(plan.decodes), prefill_tokens, len(plan.prefills))
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"two rows of one slot: {slots}"
        for row in plan.decodes:
            assert row.token_ids is None and row.samples and row.num_scheduled_tokens == 1
        for row in plan.prefills:
            assert row.token_ids is not None and len(row.token_ids) == row.num_scheduled_tokens > 0

    def _write(
        self, row: ScheduledSeq, written: set[tuple[int, int]], hashed_pages: frozenset[int]
    ) -> None:
        slot, start = self.slots[row.slot], row.num_computed_tokens
        assert slot.request.request_id == row.request_id
        end = start + row.num_scheduled_tokens
        if row.token_ids is None:
            assert end == len(slot.token_ids), "a decode row reads the slot's last token"
        else:
            assert row.token_ids.tolist() == slot.token_ids[start:end]
            assert row.samples == (end == len(slot.token_ids))
        for group, position in product(range(len(self.windows)), range(start, end)):
            place = self._place(row, group, position)
            assert place not in written, f"two rows write to {place}"
            assert place[0] not in hashed_pages, f"{place} is written but hashed"
            written.add(place)
            self.store[place] = group, slot.prefixes[position]

    def _attend(self, row: ScheduledSeq) -> RowResult:
        slot, end = self.slots[row.slot], row.num_computed_tokens + row.num_scheduled_tokens
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.num_computed_tokens + 1 - window)
            assert row.pages[group].first == first // self.page_size, "as the device expects"
            for position in range(first, end):
                found = self.store.get(self._place(row, group, position))
                assert found == (group, slot.prefixes[position]), (
                    f"request {row.request_id!r} reads another prefix at position {position}"
                )
        token_id = None
        if row.samples:
            num_generated = end - len(slot.request.prompt_token_ids)
            token_id = draw(slot.request, slot.prefixes[end - 1], num_generated)
            slot.append(token_id)
        return RowResult(row.request_id, row.epoch, token_id, None, self._prompt_logprobs(row))

    def _prompt_logprobs(self, row: ScheduledSeq) -> tuple[TokenLogprobs, ...]:
        if row.target_ids is None:
            return ()
        slot, start = self.slots[row.slot], row.num_computed_tokens
        num_prompt_tokens = len(slot.request.prompt_token_ids)
        for position, target in enumerate(row.target_ids.tolist(), start + 1):
            known = position < num_prompt_tokens
            assert target == (slot.token_ids[position] if known else -1)
        targets = [target for target in row.target_ids.tolist() if target >= 0]
        assert targets, "a row without a target asks for no prompt logprobs"
        return tuple(
            TokenLogprobs((target,), (-float(start + i + 1),), 1)
            for i, target in enumerate(targets)
        )

    def _place(self, row: ScheduledSeq, group: int, position: int) -> tuple[int, int]:
        pages = row.pages[group]
        page = pages.ids[position // self.page_size - pages.first]
        assert page > 0, "page 0 is the padding sink"
        return page, position % self.page_size
