"""Names the first array that is wrong, after a replay has drawn another token than its recording.

The pages of the sequence are compared with those that prompt steps compute from its tokens, array
by array. Rounding differs between decode and prompt steps, so a deviation counts from a share of
the array's largest value on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from jaxinfer.core.limits import Limits
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Arrive, Event, Pages, ScheduledSeq, StepDone
from jaxinfer.engine.record.check import Found, StepRunner
from jaxinfer.sched.schedule import initial_state, schedule

# shares of the largest value, of float32 and of smaller kinds
FLOAT32_SHARE, SMALL_SHARE = 1e-3, 0.1


# the group of an array of a layer, and its values [number of pages, page_size, ...]
type PageContents = tuple[int, np.ndarray[Any, Any]]


class PageRunner(StepRunner, Protocol):
    """A ``StepRunner`` whose pages can be read and emptied."""

    def read_pages(self, ids: Sequence[Sequence[int]]) -> Mapping[str, PageContents]:
        """The contents of pages of each group, by the names of the layers' arrays, in order."""
        ...

    def free_state(self) -> None:
        """Free pages and slots."""
        ...

    def make_state(self) -> None:
        """Make empty ones."""
        ...


def locate(found: Found, runner: PageRunner) -> str:
    """A sentence on the first array that deviates. No step is in flight; all pages are lost."""
    row, limits = found.row, found.state.limits
    seq = next((seq for seq in found.state.running if seq.epoch == row.epoch), None)
    if seq is None:
        return "the sequence had ended or lost its pages before this result, so no array is named"
    end = min(row.num_computed_tokens + row.num_scheduled_tokens, len(seq.token_ids))
    end = min(end, limits.max_model_len - 1)
    held = runner.read_pages([pages.ids for pages in row.pages])
    runner.free_state()
    runner.make_state()
    request = replace(
        seq.request,
        prompt_token_ids=seq.token_ids[:end],
        sampling=SamplingParams(max_tokens=1, temperature=0),
        max_tokens=1,
        constraint=None,
    )
    pages = _prefilled(runner, limits, (Arrive(request),))
    made = runner.read_pages([own.ids for own in pages])
    for name, contents in held.items():
        own, other = row.pages[contents[0]], pages[contents[0]]
        text = _deviation(contents, made[name], (own, other), end, limits)
        if text:
            return f"{name} deviates in {text}"
    return (
        "here the pages of the sequence have what prompt steps compute from its tokens, so the "
        "recorded run was wrong, or the steps differ after the last layer with pages"
    )


def _prefilled(runner: StepRunner, limits: Limits, events: tuple[Event, ...]) -> tuple[Pages, ...]:
    """Run the only request to its end; returns its pages."""
    state, last = initial_state(limits), None
    while True:
        state, output = schedule(state, events)
        if output.step is None:
            break
        last: ScheduledSeq | None = output.step.rows[0]
        events = (StepDone(runner.collect(runner.launch(output.step))),)
    assert last is not None, "the request fits, as it did before"
    return last.pages


def _deviation(
    held: PageContents, made: PageContents, pages: tuple[Pages, Pages], end: int, limits: Limits
) -> str:
    """The first page whose values deviate; empty if none does."""
    (group_number, values), others = held, made[1]
    group = limits.groups[group_number]
    size, stride = limits.page_size, group.tokens_per_entry
    first = max(pages[0].first, pages[1].first)
    for number in range(first, min(pages[0].end, pages[1].end)):
        count = min(size, end // stride - number * size)
        if count <= 0:
            break
        one = _floats(values[number - pages[0].first, :count])
        other = _floats(others[number - pages[1].first, :count])
        share = FLOAT32_SHARE if values.dtype.itemsize == 4 else SMALL_SHARE
        largest = float(np.abs(one - other).max())
        if not largest <= share * max(float(np.abs(other).max()), 1e-6):
            tokens = number * size * stride
            return (
                f"page {pages[0].ids[number - pages[0].first]}, tokens {tokens} to "
                f"{tokens + count * stride - 1}, by {largest:.3g}"
            )
    return ""


def _floats(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return values.astype(np.float64)
