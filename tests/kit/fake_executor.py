"""An executor without a model: tokens are a function of (seed, prefix), pages hold prefix digests.

It runs a plan as the device would, in launch order, and checks on every row that the pages of its
context hold exactly the right prefix, and with snapshots that the layer state that a row starts
from is of exactly the tokens before it. Any schedule must therefore give the same tokens, and a
page or snapshot shared or reused wrongly is an error at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request
from jaxinfer.core.step import (
    MAX_SAVES,
    NO_TAPS,
    TAPS,
    Bucket,
    PageGroup,
    RowOutput,
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
    """The digest of an empty prefix; pages are shared only between requests of one salt that are
    steered in the same way.
    """
    salt = sum((i + 1) * ord(c) for i, c in enumerate(request.cache_salt))
    return salt if request.steering is None else digest(salt, request.steering.digest[0])


def activations(prefixes: np.ndarray) -> np.ndarray:  # int64[tokens] -> float32[tokens]
    """The activations of tokens at the only point, from the digests of the prefixes they end."""
    return (prefixes % 1000).astype(np.float32)


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
    """The output of ``request`` generated alone, by the rules of ending."""
    if request.pools:
        return []
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


@dataclass(eq=False)
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

    def contents(self, group: int, last_tokens: np.ndarray) -> np.ndarray:
        """The entries that a group of layers writes, by the position of their last tokens."""
        return np.frombuffer(self.prefixes, np.int64)[last_tokens] ^ group


def guess(request: Request, prefix: int, num_generated: int) -> int:
    """A draft of the token after ``prefix``, right two times in three."""
    token_id = draw(request, prefix, num_generated)
    return token_id if hash((prefix, "guess")) % 3 else (token_id + 1) % VOCAB


class FakeExecutor:
    """Holds slots and a shadow of the pages.

    The shadow maps the place of an entry in its pool to the digest of the prefix that ends with the
    entry's last token, changed by the group of layers that wrote it. A decode row of several tokens
    guesses those behind the first; the scheduler does not know where such a row is, only a bound,
    until it hears how many guesses were right.
    """

    def __init__(
        self,
        page_size: int,
        groups: tuple[PageGroup, ...] = (PageGroup(),),
        num_snapshots: int = 0,
        align: int = 1,
    ) -> None:
        self.page_size = page_size
        self.groups = groups
        self.num_snapshots = num_snapshots
        self.align = align
        self.states: dict[int, int] = {}  # slot -> digest of the tokens that its state is of
        self.snapshots: dict[int, int] = {}  # likewise, of each row
        self.drafts: dict[int, list[int]] = {}  # of the row of each slot, in the step that runs
        self.slots: dict[int, Slot] = {}
        # of each pool, by page * page_size + offset
        self.stores = [np.zeros(0, np.int64) for _ in {group.pool for group in groups}]

    def run(self, plan: StepPlan, hashed_pages: Sequence[frozenset[int]] = ()) -> StepResult:
        """Run a step, which must not write to ``hashed_pages`` (of each pool)."""
        for admission in plan.admissions:
            assert list(admission.token_ids)[: admission.num_prompt_tokens] == list(
                admission.request.prompt_token_ids
            )
            self.slots[admission.slot] = Slot(admission.request, list(admission.token_ids))
        self._check_shape(plan)
        self._check_saves(plan)
        # a layer first appends every row's KV, then attends
        written = [place for row in plan.rows for place in self._write(row, hashed_pages)]
        assert len(set(written)) == len(written), "two rows write to one place"
        return StepResult(plan.step_id, tuple(self._attend(row) for row in plan.rows))

    def _check_saves(self, plan: StepPlan) -> None:
        """A step saves each snapshot once, at multiples of pages and of ``align``, and none that a
        row of the step starts from: a layer computes the rows in any order.
        """
        saves = [snapshot for row in plan.rows for _, snapshot in row.saves]
        reads = [row.reads for row in plan.prefills if row.reads is not None]
        assert len(set(saves)) == len(saves) and {*saves, *reads} <= set(range(self.num_snapshots))
        assert not set(saves) & set(reads), f"snapshots {set(saves) & set(reads)} are overwritten"
        for row in plan.decodes:
            assert row.reads is None and [count for count, _ in row.saves] in ([], [1])
        first = {admission.slot for admission in plan.admissions}
        for row in plan.prefills:
            assert row.reads is None or row.slot in first
            counts = [count for count, _ in row.saves]
            assert counts == sorted(set(counts)) and len(counts) <= MAX_SAVES
            assert all(0 < count <= row.num_scheduled_tokens for count in counts)
            borders = [row.num_computed_tokens + count for count in counts]
            assert not any(border % self.page_size for border in borders)
            ends = (row.num_computed_tokens, *borders)
            if not (row.samples or row.pools):
                ends = (*ends, row.num_computed_tokens + row.num_scheduled_tokens)
            assert not any(end % self.align for end in ends), f"{ends} are not aligned"

    def _check_shape(self, plan: StepPlan) -> None:
        prefill_tokens = sum(row.num_scheduled_tokens for row in plan.prefills)
        query_tokens = max((row.num_scheduled_tokens for row in plan.decodes), default=1)
        requests = [self.slots[row.slot].request for row in plan.rows]
        taps = any(one.sampling.taps or one.steering is not None for one in requests)
        variants = (TAPS,) if taps else ()
        rows = (len(plan.decodes), prefill_tokens, len(plan.prefills))
        size = Bucket(*rows, False, query_tokens, variants)
        assert plan.bucket.holds(size)
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"two rows of one slot: {slots}"
        for row in plan.decodes:
            assert row.token_ids is None and row.samples and row.num_scheduled_tokens >= 1
        for row in plan.prefills:
            assert row.token_ids is not None and len(row.token_ids) == row.num_scheduled_tokens > 0

    def _write(self, row: ScheduledSeq, hashed_pages: Sequence[frozenset[int]]) -> list[int]:
        """Write the row's entries; returns numbers of their places in all pools."""
        slot, start = self.slots[row.slot], self._start(row)
        assert slot.request.request_id == row.request_id
        end = start + row.num_scheduled_tokens
        prefixes = np.array(slot.prefixes[start:end], np.int64)
        if row.token_ids is None:
            assert start <= row.num_computed_tokens, "the scheduler plans for less than there is"
            self.drafts[row.slot] = self._guessed(slot, row.num_scheduled_tokens - 1)
            prefixes = list(prefixes)
            for token_id in self.drafts[row.slot]:
                prefixes.append(digest(int(prefixes[-1]), token_id))
            prefixes = np.array(prefixes, np.int64)
        else:
            assert row.token_ids.tolist() == slot.token_ids[start:end]
            assert (row.samples or row.pools) == (end == len(slot.token_ids))
            assert not (row.samples and row.pools)
        written: list[int] = []
        for group, own in enumerate(self.groups):
            ends, places = self._entries(row, group, start, end)
            if hashed_pages:
                hashed = hashed_pages[own.pool].intersection((places // self.page_size).tolist())
                assert not hashed, f"pages {hashed} are written but hashed"
            self.stores[own.pool][places] = prefixes[ends - start] ^ group
            written += (places * len(self.stores) + own.pool).tolist()
        return written

    def _start(self, row: ScheduledSeq) -> int:
        """The position of a row's first token: a decode row's is that of the slot's last token."""
        if row.token_ids is not None:
            return row.num_computed_tokens
        return len(self.slots[row.slot].token_ids) - 1

    def _guessed(self, slot: Slot, count: int) -> list[int]:
        prefix, guesses = slot.prefixes[-1], list[int]()
        for _ in range(count):
            num_known = len(slot.token_ids) + len(guesses)
            num_generated = num_known - len(slot.request.prompt_token_ids)
            guesses.append(guess(slot.request, prefix, num_generated))
            prefix = digest(prefix, guesses[-1])
        return guesses

    def _attend(self, row: ScheduledSeq) -> RowResult:
        slot, start = self.slots[row.slot], self._start(row)
        end = start + (row.num_scheduled_tokens if row.token_ids is not None else 1)
        if start and self.num_snapshots:
            state = self.states[row.slot] if row.reads is None else self.snapshots[row.reads]
            assert state == slot.prefixes[start - 1], (
                f"request {row.request_id!r} goes on at {start} from the state of other tokens"
            )
        self.states[row.slot] = slot.prefixes[end - 1]
        for count, snapshot in row.saves:
            self.snapshots[snapshot] = slot.prefixes[start + count - 1]
        for group, own in enumerate(self.groups):
            first = 0 if own.window is None else max(0, start + 1 - own.window)
            first_page = first // (self.page_size * own.tokens_per_entry)
            assert row.pages[group].first <= first_page, "its pages have gone back"
            self._read(row, group, first, end)
        read = activations(np.array(slot.prefixes[start:end], np.int64))
        taps = memoryview(read.tobytes()) if slot.request.sampling.taps else NO_TAPS
        token_ids: list[int] = []
        drafts = [] if row.token_ids is not None else self.drafts[row.slot]
        while row.samples:
            num_generated = len(slot.token_ids) - len(slot.request.prompt_token_ids)
            token_ids.append(self._draw(slot, num_generated))
            slot.append(token_ids[-1])
            if len(token_ids) > len(drafts) or drafts[len(token_ids) - 1] != token_ids[-1]:
                break
            for group in range(len(self.groups)):  # the accepted draft's own page
                self._read(row, group, len(slot.token_ids) - 1, len(slot.token_ids))
        return RowResult(
            row.request_id,
            row.epoch,
            tuple(token_ids),
            RowOutput(
                self._logprobs(slot.request, token_ids),
                self._prompt_logprobs(row),
                np.array([slot.prefixes[-1] % 1000], np.float32) if row.pools else None,
                taps,
            ),
        )

    def _draw(self, slot: Slot, num_generated: int) -> int:
        """The next token of a sequence."""
        return draw(slot.request, slot.prefixes[-1], num_generated)

    def _logprobs(self, request: Request, token_ids: list[int]) -> tuple[TokenLogprobs, ...]:
        if (num_listed := request.sampling.logprobs) is None:
            return ()
        listed = [(token_id, *range(num_listed)) for token_id in token_ids]
        return tuple(TokenLogprobs(ids, (-1.0,) * len(ids), 1) for ids in listed)

    def _read(self, row: ScheduledSeq, group: int, first: int, end: int) -> None:
        """Check the entries that end at the tokens at [first, end)."""
        ends, places = self._entries(row, group, first, end)
        found = self.stores[self.groups[group].pool][places]
        wrong = ends[found != self.slots[row.slot].contents(group, ends)]
        assert not len(wrong), (
            f"request {row.request_id!r} reads another prefix at position {wrong[0]}"
        )

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

    def _entries(
        self, row: ScheduledSeq, group: int, start: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The last tokens of the row's entries that end at [start, end), and their places."""
        own, pages, ends = self.groups[group], row.pages[group], np.arange(start, end)
        if (each := own.tokens_per_entry) > 1:
            ends = ends[ends % each == each - 1]
        entries = ends // each
        page_ids = pages.ids.array()[entries // self.page_size - pages.first]
        assert page_ids.min(initial=1) > 0, "page 0 is the padding sink"
        places = page_ids * self.page_size + entries % self.page_size
        store = self.stores[own.pool]
        if missing := max(0, places.max(initial=-1) + 1 - len(store)):
            more = max(missing, len(store))  # not a copy for each page
            self.stores[own.pool] = np.append(store, np.zeros(more, np.int64))
        return ends, places


class FakeDevice:
    """A ``StepExecutor`` over ``FakeExecutor``: a step runs when it is launched."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.make_state()

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing: nothing is kept."""

    def free_state(self) -> None:
        """Lose all pages, slots and snapshots."""
        del self.fake

    def make_state(self) -> None:
        """Begin with empty ones."""
        limits = self._limits
        sizes = limits.page_size, limits.groups, limits.num_snapshots, limits.align
        self.fake = FakeExecutor(*sizes)

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the step."""
        return self.fake.run(plan)

    def collect(self, step: StepResult) -> StepResult:
        """Its result."""
        return step
