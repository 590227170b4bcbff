"""An executor without a model: tokens are a function of (seed, prefix), pages hold prefix digests.

It runs a plan as the device would, in launch order, and checks on every row that the pages of its
context hold exactly the right prefix. Any schedule must therefore give the same tokens, and a page
shared or reused wrongly is an error at once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.core.config import Limits
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
    """Names a prefix: of ints only, so it is the same in every process."""
    return hash((parent, token_id))


def salt_digest(request: Request) -> int:
    """What a prefix starts from; pages are shared only between requests of one salt."""
    return sum((i + 1) * ord(c) for i, c in enumerate(request.cache_salt))


def draw(request: Request, prefix: int, num_generated: int) -> int:
    """The token after ``prefix``; as on the device, stop ids are masked until ``min_tokens``, and
    at temperature 0 the seed does not count.
    """
    seed = 0 if request.sampling.greedy else request.seed
    token_id = hash((seed, prefix)) % VOCAB
    if num_generated < request.sampling.min_tokens:
        while token_id in request.stop_ids:
            token_id = (token_id + 1) % VOCAB
    return token_id


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """The output of ``request``, generated alone and plainly, by the rules of ending."""
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
    # prefixes[i] covers token_ids[: i + 1]
    prefixes: array[int] = field(default_factory=lambda: array("q"))

    def __post_init__(self) -> None:
        tokens, self.token_ids = self.token_ids, []
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        parent = self.prefixes[-1] if self.prefixes else salt_digest(self.request)
        self.prefixes.append(digest(parent, token_id))
        self.token_ids.append(token_id)

    def contents(self, group: int, start: int, end: int) -> np.ndarray:
        """What the layers of a group leave in a page for the tokens at [start, end)."""
        return np.frombuffer(self.prefixes, np.int64)[start:end] ^ group


class FakeExecutor:
    """Holds slots and a shadow of the pages: the place of a token in the pool -> the digest of the
    prefix that it ends, told apart by the group of layers that wrote it.
    """

    def __init__(self, page_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.page_size = page_size
        self.windows = windows
        self.slots: dict[int, Slot] = {}
        self.store = np.zeros(0, np.int64)  # by page * page_size + offset

    def run(self, plan: StepPlan, hashed_pages: frozenset[int] = frozenset()) -> StepResult:
        """Run a step; ``hashed_pages`` are those that nobody may write to."""
        for admission in plan.admissions:
            assert list(admission.token_ids)[: admission.num_prompt_tokens] == list(
                admission.request.prompt_token_ids
            )
            self.slots[admission.slot] = Slot(admission.request, list(admission.token_ids))
        self._check_shape(plan)
        # a layer first appends every row's KV, then attends
        written = [place for row in plan.rows for place in self._write(row, hashed_pages)]
        assert len(set(written)) == len(written), "two rows write to one place"
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

    def _write(self, row: ScheduledSeq, hashed_pages: frozenset[int]) -> list[int]:
        """Write the row's tokens; returns their places."""
        slot, start = self.slots[row.slot], row.num_computed_tokens
        assert slot.request.request_id == row.request_id
        end = start + row.num_scheduled_tokens
        if row.token_ids is None:
            assert end == len(slot.token_ids), "a decode row reads the slot's last token"
        else:
            assert row.token_ids.tolist() == slot.token_ids[start:end]
            assert row.samples == (end == len(slot.token_ids))
        written: list[int] = []
        for group in range(len(self.windows)):
            places = self._places(row, group, start, end)
            hashed = hashed_pages.intersection((places // self.page_size).tolist())
            assert not hashed, f"pages {hashed} are written but hashed"
            self.store[places] = slot.contents(group, start, end)
            written += places.tolist()
        return written

    def _attend(self, row: ScheduledSeq) -> RowResult:
        slot, end = self.slots[row.slot], row.num_computed_tokens + row.num_scheduled_tokens
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.num_computed_tokens + 1 - window)
            assert row.pages[group].first == first // self.page_size, "as the device expects"
            found = self.store[self._places(row, group, first, end)]
            wrong = np.flatnonzero(found != slot.contents(group, first, end))
            assert not len(wrong), (
                f"request {row.request_id!r} reads another prefix at position {first + wrong[0]}"
            )
        token_id = logprobs = None
        if row.samples:
            num_generated = end - len(slot.request.prompt_token_ids)
            token_id = draw(slot.request, slot.prefixes[end - 1], num_generated)
            slot.append(token_id)
            if (num_listed := slot.request.sampling.logprobs) is not None:
                listed = (token_id, *range(num_listed))
                logprobs = TokenLogprobs(listed, (-1.0,) * len(listed), 1)
        prompt_logprobs = self._prompt_logprobs(row)
        return RowResult(row.request_id, row.epoch, token_id, logprobs, prompt_logprobs)

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

    def _places(self, row: ScheduledSeq, group: int, start: int, end: int) -> np.ndarray:
        """Where the row's tokens at [start, end) are in the pool."""
        pages, positions = row.pages[group], np.arange(start, end)
        page_ids = pages.ids.array()[positions // self.page_size - pages.first]
        assert page_ids.min(initial=1) > 0, "page 0 is the padding sink"
        places = page_ids * self.page_size + positions % self.page_size
        if missing := max(0, places.max(initial=-1) + 1 - len(self.store)):
            self.store = np.append(self.store, np.zeros(missing, np.int64))
        return places


class FakeDevice:
    """A ``StepExecutor`` over ``FakeExecutor``: a step runs when it is launched."""

    def __init__(self, limits: Limits) -> None:
        self.fake = FakeExecutor(limits.page_size, limits.windows)

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the step."""
        return self.fake.run(plan)

    def collect(self, step: StepResult) -> StepResult:
        """Its result."""
        return step
