"""Property tests: traffic, pool size and chunking change no token, and no page is lost or misused.

``Drive`` checks every invariant after every call, and the fake executor every page that a row reads
or writes, so most of the assertions are there.
"""

import copy
import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.points import Point
from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.steering import Steering
from jaxinfer.core.step import Abort, Arrive, Bucket, Event, Hold, PageGroup, StepFailed
from jaxinfer.core.tiers import CostModel
from jaxinfer.exec.tiers.host import HostTier
from jaxinfer.sched.schedule import ScheduleOutput
from kit.drive import EOS, POINT, Drive, make_limits, make_request
from kit.fake_executor import activations, digest, expected_tokens, salt_digest

NIGHTLY_TRACES = 100_000
# other ones each night, as derandomised ones depend on the loaded modules
RANDOM = settings(max_examples=10_000, derandomize=False, print_blob=True)
COMPUTES = CostModel(0.0, 1e-9, 1.0)  # computing takes less time than restoring
MAX_MODEL_LEN = 48
WINDOWS = ((None,), (None,), (None, 6), (None, 9, 9), (5,), (None, None, 1))
GROUPS = (
    *(tuple(map(PageGroup, windows)) for windows in WINDOWS),
    # window, tokens of an entry, pool
    (PageGroup(), PageGroup(6, 1, 1)),
    (PageGroup(None, 4), PageGroup(6, 1, 1)),
    (PageGroup(), PageGroup(), PageGroup(None, 2, 1), PageGroup(9, 3, 2), PageGroup(5)),
    (PageGroup(7, 2, 1), PageGroup(3)),
)
PAGE_SIZE = 4
STREAM = tuple((7 * i * i + i) % 50 for i in range(MAX_MODEL_LEN))  # prompts are prefixes of it


@dataclass(frozen=True)
class Trace:
    """Requests and aborts with the iterations in which they arrive, and the scheduler's limits."""

    requests: tuple[tuple[int, Request], ...]
    aborts: tuple[tuple[int, str], ...]
    depth: int
    num_pages: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    prefill_first: bool
    groups: tuple[PageGroup, ...]
    query_tokens: int
    num_snapshots: int  # if not 0, the model has state for each sequence
    align: int
    points: tuple[Point, ...]  # if there are any, some requests tap or steer

    def drive(self, **changes: object) -> Drive:
        """A fresh drive with the trace's limits."""
        values = {
            "num_pages": self.num_pages,
            "page_size": PAGE_SIZE,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.enable_prefix_caching,
            "prefill_first": self.prefill_first,
            "groups": self.groups,
            "query_tokens": self.query_tokens,
            "num_snapshots": self.num_snapshots,
            "align": self.align,
            "points": self.points,
        }
        limits = make_limits(**(values | changes))
        return Drive(limits, depth=self.depth)

    def events(self, iteration: int) -> tuple[Event, ...]:
        """The arrivals and aborts of an iteration."""
        arrivals = (Arrive(request) for at, request in self.requests if at == iteration)
        aborts = (Abort(request_id) for at, request_id in self.aborts if at == iteration)
        return (*arrivals, *aborts)

    @property
    def last_iteration(self) -> int:
        """The last iteration with an event."""
        return max(at for at, _ in (*self.requests, *self.aborts))


@st.composite
def traces(draw: st.DrawFn, *, in_order: bool = False) -> Trace:
    """Traces of requests that fit the limits.

    With ``in_order`` all priorities are equal and no request is aborted.
    """
    requests: list[tuple[int, Request]] = []
    iteration = 0
    for i in range(draw(st.integers(1, 8))):
        iteration += draw(st.integers(0, 3))
        prompt = (*STREAM[: draw(st.integers(0, 30))], draw(st.integers(0, 3)))
        requests.append((iteration, _request(draw, i, prompt, in_order)))
    max_num_batched_tokens = draw(st.sampled_from((1, 7, 16, 64)))
    align = draw(st.sampled_from([n for n in (1, 4, 6, 16) if n <= max_num_batched_tokens]))
    groups = draw(st.sampled_from(GROUPS))
    query_tokens = draw(st.sampled_from((1, 1, 2, 5)))
    enable_prefix_caching = draw(st.booleans())
    num_snapshots = (
        draw(st.sampled_from((0, 0, 1, 2, 5, 12)))
        if enable_prefix_caching and query_tokens == 1
        else 0
    )
    limits = make_limits(
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=PAGE_SIZE,
        max_model_len=MAX_MODEL_LEN,
        groups=groups,
        num_pages=(0,) * (1 + max(group.pool for group in groups)),
        query_tokens=query_tokens,
        num_snapshots=num_snapshots,
        align=align,
    )
    largest = max(min(len(r.prompt_token_ids) + r.max_tokens, MAX_MODEL_LEN) for _, r in requests)
    num_pages = tuple(
        1 + needed + draw(st.sampled_from((0, 1, 2, 4, 8, 20)))
        for needed in limits.pages_needed(largest)
    )
    points = (POINT,) if query_tokens == 1 and draw(st.booleans()) else ()
    if points:
        requests = [(at, _with_points(draw, request)) for at, request in requests]
    aborted = [] if in_order else draw(st.lists(st.sampled_from(requests), max_size=2))
    return Trace(
        requests=tuple(requests),
        aborts=tuple((at + draw(st.integers(0, 20)), r.request_id) for at, r in aborted),
        depth=draw(st.integers(1, 3)),
        num_pages=num_pages,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=max_num_batched_tokens,
        groups=groups,
        query_tokens=query_tokens,
        enable_prefix_caching=enable_prefix_caching,
        num_snapshots=num_snapshots,
        align=align,
        prefill_first=draw(st.booleans()),
        points=points,
    )


def _request(draw: st.DrawFn, i: int, prompt: tuple[int, ...], in_order: bool) -> Request:
    pools = draw(st.sampled_from((False, False, False, True)))
    max_tokens = 1 if pools else draw(st.integers(1, 24))
    return make_request(
        f"r{i}",
        prompt,
        arrival=i,
        seed=draw(st.integers(0, 2)),
        max_tokens=max_tokens,
        pools=pools,
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        priority=0 if in_order else draw(st.integers(0, 1)),
        eos_token_ids=draw(st.sampled_from(((), (EOS,)))),
        stop_token_ids=draw(st.sampled_from(((), (3, 11, 19)))),
        cache_salt=draw(st.sampled_from(("", "tenant"))),
        prompt_logprobs=draw(st.sampled_from((None, None, 0))),
    )


def _with_points(draw: st.DrawFn, request: Request) -> Request:
    """The request, which may read activations, and may be steered in one of two ways."""
    if request.pools:
        return request
    taps = draw(st.sampled_from(((), (), ("embed",))))
    steering = draw(st.sampled_from((None, None, Steering(b"", b"a"), Steering(b"", b"b"))))
    sampling = msgspec.structs.replace(request.sampling, taps=taps)
    return msgspec.structs.replace(request, sampling=sampling, steering=steering)


def run(trace: Trace, drive: Drive) -> Drive:
    """Run the whole trace."""
    for iteration in range(trace.last_iteration + 1):
        drive.tick(*trace.events(iteration))
    drive.finish()
    return drive


def check_run(trace: Trace, drive: Drive) -> None:
    """Assert that every request ended once, with the expected tokens, and all pages are free."""
    tokens, endings = drive.tokens(), drive.endings()
    for _, request in trace.requests:
        expected = expected_tokens(request, MAX_MODEL_LEN)
        ending = endings[request.request_id]
        if ending.finish_reason is FinishReason.ABORT:
            assert tokens[request.request_id] == expected[: len(tokens[request.request_id])]
        else:
            assert tokens[request.request_id] == expected
            check_prompt_logprobs(request, drive)
            check_taps(request, drive)
            assert (ending.output.pooled is not None) == request.pools
        cached = {e.num_cached_tokens for e in drive.events if e.request_id == request.request_id}
        assert len(cached) == 1 or ending.finish_reason is FinishReason.ABORT
    assert drive.state.num_free_pages == drive.limits.num_usable_pages
    assert drive.state.num_unfinished == len(drive.state.in_flight) == 0


def check_taps(request: Request, drive: Drive) -> None:
    """Assert the activations of every token but the last one, once and in order."""
    events = (event for event in drive.events if event.request_id == request.request_id)
    found = np.frombuffer(b"".join(event.output.taps for event in events), np.float32).tolist()
    expected, prefix = list[float](), salt_digest(request)
    if request.sampling.taps:
        for token_id in (*request.prompt_token_ids, *drive.tokens()[request.request_id][:-1]):
            prefix = digest(prefix, token_id)
            expected += activations(np.array([prefix], np.int64)).tolist()
    assert found == expected


def check_prompt_logprobs(request: Request, drive: Drive) -> None:
    """Assert one entry for each prompt token but the first, in order."""
    entries = [
        entry
        for event in drive.events
        if event.request_id == request.request_id
        for entry in event.output.prompt_logprobs
    ]
    has_logprobs = request.sampling.prompt_logprobs is not None
    targets = request.prompt_token_ids[1:] if has_logprobs else ()
    assert [entry.token_ids[0] for entry in entries] == list(targets)
    assert [entry.logprobs[0] for entry in entries] == [-1.0 - i for i in range(len(targets))]


@given(traces())
def test_every_schedule_gives_the_same_tokens(trace: Trace) -> None:
    check_run(trace, run(trace, trace.drive()))


@pytest.mark.nightly
@settings(max_examples=NIGHTLY_TRACES)
@given(traces())
def test_every_schedule_gives_the_same_tokens_in_many_traces(trace: Trace) -> None:
    check_run(trace, run(trace, trace.drive()))


@pytest.mark.parametrize("caching", (False, True), ids=("uncached", "cached"))
@pytest.mark.parametrize("depth", (1, 2))
@pytest.mark.parametrize("num_pages", (13, 25, 200), ids=lambda n: f"{n}pages")
@pytest.mark.parametrize("chunk", (16, 64, 512), ids=lambda n: f"chunk{n}")
def test_chunks_pools_depths_and_caching(
    chunk: int, num_pages: int, depth: int, caching: bool
) -> None:
    limits = make_limits(
        max_num_batched_tokens=chunk,
        num_pages=num_pages,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    drive = Drive(limits, depth=depth)
    requests = [
        make_request(f"r{i}", STREAM[: 3 + 3 * i], arrival=i, seed=i % 2, max_tokens=20 - i)
        for i in range(12)
    ]
    for request in requests:
        drive.arrive(request)
    drive.finish()
    assert drive.tokens() == {r.request_id: expected_tokens(r, MAX_MODEL_LEN) for r in requests}


@settings(max_examples=10)
@given(traces())
def test_schedule_is_pure(trace: Trace) -> None:
    drive = trace.drive()
    drive.twice = True
    check_run(trace, run(trace, drive))


@settings(max_examples=25)
@given(traces(), st.integers(1, 30))
def test_pages_may_be_given_up_between_two_steps(trace: Trace, at: int) -> None:
    """No token changes, none is lost, and none is drawn twice."""
    drive, left = trace.drive(), at
    tick = drive.tick

    def counted(*events: Event) -> ScheduleOutput:
        nonlocal left
        left -= 1
        if left == 0:
            drive.give_up_pages()
        return tick(*events)

    drive.tick = counted  # type: ignore[method-assign]
    check_run(trace, run(trace, drive))


@settings(max_examples=25)
@given(traces(in_order=True), st.integers(0, 30))
def test_histories_branch(trace: Trace, at: int) -> None:
    drive = trace.drive()
    for iteration in range(max(at, trace.last_iteration) + 1):
        drive.tick(*trace.events(iteration))
    branch = copy.copy(drive)
    branch.executor = copy.deepcopy(drive.executor)
    branch.plans, branch.events, branch.flying = [], list(drive.events), list(drive.flying)
    branch._indices = [dict(index) for index in drive._indices]
    branch.tick(*(Abort(seq.request_id) for seq in drive.state.running))
    branch.finish()
    drive.finish()
    check_run(trace, drive)


@settings(max_examples=25)
@given(traces(in_order=True), st.integers(0, 30))
def test_a_failed_step_ends_its_own_requests_only(trace: Trace, at: int) -> None:
    drive = trace.drive()
    for iteration in range(max(at, trace.last_iteration) + 1):
        drive.tick(*trace.events(iteration))
    hit: set[str] = set()
    if drive.flying:
        step_id = drive.flying.pop(0).step_id
        plan = drive.state.in_flight[0]
        running = {seq.request_id: seq.epoch for seq in drive.state.running}
        hit = {row.request_id for row in plan.rows if running.get(row.request_id) == row.epoch}
        drive.call(StepFailed(step_id, "the device is on fire"))
    drive.finish()
    for _, request in trace.requests:
        ending = drive.endings()[request.request_id]
        if request.request_id in hit:
            assert (ending.finish_reason, ending.error) == (
                FinishReason.ERROR,
                "the device is on fire",
            )
        else:
            tokens = drive.tokens()[request.request_id]
            assert tokens == expected_tokens(request, MAX_MODEL_LEN)


@settings(max_examples=25)
@given(traces(in_order=True))
def test_no_request_starves(trace: Trace) -> None:
    check_starvation(trace, trace.drive())


@settings(max_examples=25)
@given(traces(in_order=True))
def test_no_request_starves_when_others_are_offloaded(trace: Trace) -> None:
    check_starvation(trace, offloading(trace))


@pytest.mark.nightly
@RANDOM
@given(traces(in_order=True))
def test_no_request_starves_in_many_traces(trace: Trace) -> None:
    check_starvation(trace, trace.drive())


@pytest.mark.nightly
@RANDOM
@given(traces(in_order=True))
def test_no_request_starves_when_others_are_offloaded_in_many_traces(trace: Trace) -> None:
    check_starvation(trace, offloading(trace))


def offloading(trace: Trace) -> Drive:
    """A drive of the trace with a host tier to which preempted sequences are offloaded."""
    drive = trace.drive(enable_prefix_caching=True)

    def host(forms: Forms) -> Connector:
        return HostTier(1 << 16, forms)

    return Drive(drive.limits, trace.depth, connector=host, cost=COMPUTES, offloads=True)


def check_starvation(trace: Trace, drive: Drive) -> None:
    """The bound of ``sched.schedule`` holds, and each step has a row for the first request.

    Steps that are planned while the first request waits for a load do not count.
    """
    planned: dict[str, int] = {}  # number of steps planned when a request ended
    iteration = 0
    first, epoch, num_loading = "", -1, 0
    while iteration <= trace.last_iteration or drive.state.num_unfinished:
        output = drive.tick(*trace.events(iteration))
        iteration += 1
        for event in output.events:
            if event.finish_reason is not None:
                planned[event.request_id] = len(drive.plans) - num_loading
        if not drive.state.num_unfinished:
            continue
        head = drive.state.running[0]
        assert all(head.order < seq.order for seq in drive.state.waiting)
        assert head.epoch == epoch or head.request_id != first, "the first was preempted"
        first, epoch = head.request_id, head.epoch
        if output.step is not None:
            num_loading += head.is_waiting_for_load
            has_row = head.request_id in {row.request_id for row in output.step.rows}
            only_prefills = trace.prefill_first and not output.step.decodes
            all_in_flight = head.num_computed_tokens + 1 == head.max_num_tokens
            assert has_row or only_prefills or all_in_flight or head.is_waiting_for_load
    mixed = Bucket(trace.max_num_seqs, 1, 1)
    chunk = min(
        trace.max_num_batched_tokens,
        max(b.num_prefill_tokens for b in drive.limits.buckets if b.holds(mixed)),
    )
    chunk = chunk // trace.align * trace.align
    most_tokens = [len(r.prompt_token_ids) + r.max_tokens for _, r in trace.requests]
    most_chunks = [cdiv(num_tokens, chunk) for num_tokens in most_tokens]
    bound = sum(most_chunks) if trace.prefill_first else 0
    for (_, request), num_chunks in zip(trace.requests, most_chunks, strict=True):
        bound += num_chunks + request.max_tokens + trace.depth
        if trace.query_tokens > 1:
            near_end = min(request.max_tokens, trace.query_tokens * trace.depth)
            bound += (trace.depth - 1) * near_end
        assert planned[request.request_id] <= bound


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(9, 24)), max_size=8),
    st.integers(1, 2),
    st.sampled_from((1, 4, 8)),
)
def test_few_snapshots_of_prompts_that_share_prefixes(
    arrivals: list[tuple[int, int, int]], num_snapshots: int, align: int
) -> None:
    """Rows of one step start from snapshots and save others, and there are not enough."""
    limits = make_limits(
        max_num_batched_tokens=64, num_pages=100, num_snapshots=num_snapshots, align=align
    )
    drive = Drive(limits)
    requests: list[Request] = []
    for i, (gap, first, length) in enumerate(((9, 0, 24), (0, 0, 24), (9, 1, 24), *arrivals)):
        for _ in range(gap):
            drive.tick()
        prompt = (first // 2, *STREAM[1 : length - 2], first, first)
        requests.append(make_request(f"r{i}", prompt, arrival=i, max_tokens=4))
        drive.call(Arrive(requests[-1]), Hold())
    drive.finish()
    assert drive.tokens() == {r.request_id: expected_tokens(r, 64) for r in requests}


@settings(max_examples=25)
@given(traces(in_order=True))
def test_prefill_first_causes_no_more_preemptions(trace: Trace) -> None:
    batch = dataclasses.replace(trace, requests=tuple((0, r) for _, r in trace.requests))
    mixed = run(batch, batch.drive(prefill_first=False))
    first = run(batch, batch.drive(prefill_first=True))
    check_run(batch, first)
    assert first.tokens() == mixed.tokens()
    assert first.state.num_preemptions <= mixed.state.num_preemptions
