"""The scheduler with tiers: random traces, and what is saved, restored and computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Abort, PageGroup, StepPlan
from jaxinfer.core.tiers import SNAPSHOTS, CostModel, SaveAhead, TierChanged, TierPolicy, group_of
from jaxinfer.exec.tiers.host import HostTier
from jaxinfer.sched.saves import has_saves
from kit.drive import Drive, make_limits, make_request
from kit.fake_executor import expected_tokens
from kit.fake_tiers import Unreliable
from kit.tier_traces import COMPUTES, PAGE_SIZE, TierTrace

DAILY, NIGHTLY = 150, 100_000
PAGE_BYTES = 32
PROMPT = tuple(range(40))  # 9 pages that can be reused, and a token
OTHER = tuple(49 - i for i in range(40))


def test_tiers_change_no_token() -> None:
    found = Counter[str]()
    for seed in range(DAILY):
        found += run(seed)
    # the traces do what they are for
    assert found["restored"] > DAILY // 2 and found["failed"] > 2, found
    assert found["ahead"] > DAILY // 2, found


@pytest.mark.nightly
def test_tiers_change_no_token_in_many_traces() -> None:
    for seed in range(DAILY, DAILY + NIGHTLY):
        run(seed)


def run(seed: int) -> Counter[str]:
    """Run the trace of a seed; what its tiers have done."""
    trace = TierTrace(seed)
    try:
        trace.run()
    except Exception as error:
        error.add_note(f"the trace of seed {seed}")
        raise
    assert trace.drive.tiers is not None
    stats = trace.drive.tiers.stats()
    return Counter(
        restored=stats.num_restored,
        saved=stats.num_saved,
        failed=stats.num_failed,
        ahead=trace.drive.num_ahead,
    )


def drive(slowness: int = 0, failures: float = 0.0, **changes: Any) -> Drive:
    """A drive whose pool holds one long request, and a host tier that holds all."""
    cost, offloads = changes.pop("cost", CostModel()), changes.pop("offloads", False)
    most = changes.pop("most_save_bytes", 1 << 62)
    names = ("ahead", "watermark")
    of_drive = {name: changes.pop(name) for name in names if name in changes}

    def connector(forms: Forms) -> Connector:
        return Unreliable(HostTier(1 << 18, forms), 1, slowness, failures)

    values = {"num_pages": 12, "max_model_len": 48, "max_num_batched_tokens": 16} | changes
    return Drive(
        make_limits(**values),
        connector=connector,
        cost=cost,
        offloads=offloads,
        most_save_bytes=most,
        **of_drive,
    )


def idle(one: Drive) -> int:
    """Calls without events until nothing is left to be saved; returns the saved units."""
    count = 0
    while has_saves(one.state):
        one.tick()
        count += len(one.last.orders.saves)
    return count


def answer(one: Drive, prompt: tuple[int, ...]) -> int:
    """Run a prompt alone; returns how many of its tokens were reused."""
    name = f"r{len(one.endings())}"
    request = make_request(name, prompt, arrival=len(one.endings()), max_tokens=3)
    one.arrive(request)
    one.finish()
    assert one.tokens()[name] == expected_tokens(request, one.limits.max_model_len)
    return one.endings()[name].num_cached_tokens


def computed(plans: list[StepPlan], request_id: str) -> list[tuple[int, int]]:
    """The chunks of a request's prompt."""
    rows = [row for plan in plans for row in plan.prefills if row.request_id == request_id]
    return [
        (row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens)
        for row in rows
    ]


def test_a_prefix_that_was_evicted_is_restored() -> None:
    one = drive()
    assert [answer(one, prompt) for prompt in (PROMPT, OTHER, PROMPT)] == [0, 0, 36]
    assert computed(one.plans, "r2") == [(36, 40)]
    assert one.state.num_restored_tokens <= 36


def test_pages_are_saved_once_and_below_the_watermark() -> None:
    """Only a quarter of the pool is saved before it is needed; nothing is saved again."""
    one = drive(num_pages=41)
    answer(one, PROMPT)
    assert not one.state.tier_keys
    for seed in range(4):
        answer(one, tuple((7 * i + seed) % 50 for i in range(40)))
    pool, stats = one.state.pools[0], one.tiers.stats()  # type: ignore[union-attr]
    assert pool.num_fresh + pool.num_offered >= 10
    assert stats.num_saved == len(one.state.tier_keys) > 0 == stats.num_dropped


def test_every_kind_of_unit_is_saved_and_restored() -> None:
    groups = (PageGroup(), PageGroup(6, 1, 1), PageGroup(None, 2))
    values = {"groups": groups, "num_snapshots": 1, "max_model_len": 43}
    needed = make_limits(**values, num_pages=(0, 0)).pages_needed(43)
    one = drive(**values, num_pages=tuple(1 + count for count in needed))
    assert [answer(one, prompt) for prompt in (PROMPT, OTHER, PROMPT)] == [0, 0, 32]
    assert {group_of(key) for key in one.state.tier_keys} == {0, 1, 2, SNAPSHOTS}


def test_others_are_admitted_and_decode_while_the_head_restores() -> None:
    one = drive(slowness=1000, num_pages=25)
    for prompt in (PROMPT, OTHER, tuple(reversed(PROMPT)), PROMPT[::2] + OTHER[::2]):
        answer(one, prompt)
    requests = [
        make_request("long", PROMPT, arrival=10, max_tokens=3),
        make_request("short", (1, 1, 1), arrival=11, max_tokens=3),
    ]
    one.arrive(*requests)
    while "short" not in one.endings():
        one.tick()
        head = one.state.running[0]
        assert head.request_id == "long" and head.restoring is not None
        assert not computed(one.plans, "long"), "it has no row"
    one.finish()
    assert one.endings()["long"].num_cached_tokens == 36
    for request in requests:
        assert one.tokens()[request.request_id] == expected_tokens(request, 48)


def test_the_snapshot_that_a_restored_request_starts_from_is_kept() -> None:
    """The device has the state, a tier the pages: others save states until they are loaded."""
    one = drive(slowness=1000, num_pages=25, num_snapshots=3)
    for prompt in (PROMPT, OTHER, tuple(reversed(PROMPT))):
        answer(one, prompt)
    one.arrive(make_request("long", PROMPT, arrival=10, max_tokens=3))
    (long,) = one.state.running
    assert long.restoring is not None and long.restoring.row is None and long.reads is not None
    for i in range(3):
        one.arrive(make_request(f"short{i}", (i,) * 9, arrival=11 + i, max_tokens=1))
        for _ in range(5):
            one.tick()
    assert len(one.endings()) == 6, "the short ones have ended"
    one.finish()
    assert one.endings()["long"].num_cached_tokens == 36


def test_a_failed_load_is_computed_and_is_not_tried_again() -> None:
    one = drive(failures=1.0)
    assert [answer(one, prompt) for prompt in (PROMPT, OTHER, PROMPT)] == [0, 0, 0]
    assert computed(one.plans, "r2") == [(0, 16), (16, 32), (32, 40)]
    assert one.tiers.stats().num_failed > 0  # type: ignore[union-attr]


def test_a_request_that_ends_while_it_restores_frees_its_load() -> None:
    one = drive(slowness=50)
    for prompt in (PROMPT, OTHER):
        answer(one, prompt)
    one.arrive(make_request("long", PROMPT, arrival=10, max_tokens=3))
    assert one.state.running[0].restoring is not None
    one.tick(Abort("long"))
    assert one.state.num_free_pages == one.limits.num_usable_pages
    assert not one.tiers.num_held  # type: ignore[union-attr]
    assert answer(one, PROMPT) == 36


@pytest.mark.parametrize(
    ("copying", "computing", "expected"),
    [
        (1.0, 1e9, [(36, 40)]),  # restored
        (1e9, 1.0, [(0, 16), (16, 32), (32, 40)]),  # computed
        (1.0, 1.0, [(0, 16), (16, 32), (32, 40)]),  # as long
        (1.0, 1.6, [(0, 16), (16, 32), (32, 40)]),  # less, but not for certain
        (1.0, 1.75, [(36, 40)]),
    ],
)
def test_costs_decide(copying: float, computing: float, expected: list[tuple[int, int]]) -> None:
    """``copying`` and ``computing``: the time of a page."""
    cost = CostModel(0.0, computing / 4, PAGE_BYTES / copying)
    one = drive(cost=cost, slowness=1, ahead=SaveAhead())
    for prompt in (PROMPT, OTHER, PROMPT):
        answer(one, prompt)
        idle(one)
    assert computed(one.plans, "r2") == expected


# As fitted to Qwen3-4B in bfloat16 on an H200
H200 = CostModel(0.0042, 9.6e-6, 51.6e9, 0.0014)
TOKEN_BYTES = 147_456
# tokens: whether their prefix is restored by an engine that has been idle, by one on which others
# decode, and by one that saves the pages of a prompt of the same length first
CHOICES = {
    256: (False, False, False),
    512: (False, False, False),
    1024: (False, False, False),
    2048: (True, False, False),
    4096: (True, False, False),
    16384: (True, True, True),
}


@pytest.mark.parametrize("length", CHOICES)
def test_a_restore_takes_less_time_than_to_compute(length: int) -> None:
    """The choices with the costs of an H200; all bytes are fewer by the same factor."""
    scale = 8 / TOKEN_BYTES  # a digest in place of a token's keys and values
    cost = replace(H200, bytes_per_second=H200.bytes_per_second * scale)
    sizes = {"max_model_len": length + 32, "page_size": 16, "max_num_batched_tokens": 8192}
    found: list[bool] = []
    for state in ("idle", "beside others", "unsaved"):
        ahead = None if state == "unsaved" else SaveAhead()
        num_pages = length // 16 + 1 + 16
        one = drive(cost=cost, num_pages=num_pages, watermark=0.0, ahead=ahead, **sizes)
        prompts = [tuple((i * i + 7 * i + first) % 50 for i in range(length)) for first in (0, 1)]
        for number, prompt in enumerate(prompts):
            one.arrive(make_request(f"{number}", prompt, max_tokens=1))
            one.finish()
            idle(one)
        if state == "beside others":
            one.arrive(make_request("other", (1, 2, 3), arrival=5, max_tokens=16))
            for _ in range(3):
                one.tick()
        one.arrive(make_request("again", prompts[0], arrival=10, max_tokens=1))
        again = next(seq for seq in one.state.running if seq.request_id == "again")
        found.append(again.restoring is not None)
    assert tuple(found) == CHOICES[length]


def test_a_restore_waits_for_saves_in_flight_only_if_it_needs_some() -> None:
    """Where all pages that it overwrites are saved, it begins at once."""
    seconds = {
        unsaved: H200.restoring(4096 * TOKEN_BYTES, unsaved) for unsaved in (0, 4096 * TOKEN_BYTES)
    }
    assert seconds[0] == pytest.approx(0.0014 + 4096 * TOKEN_BYTES / 51.6e9 + 0.0042)
    assert seconds[4096 * TOKEN_BYTES] == pytest.approx(seconds[0] + 4096 * TOKEN_BYTES / 51.6e9)
    assert H200.restoring(0, 0, 2) == pytest.approx(0.0014 + 3 * 0.0042)


@pytest.mark.parametrize("offloads", [True, False], ids=["offload", "recompute"])
def test_a_preempted_sequence_is_offloaded_and_restored(offloads: bool) -> None:
    """All of its full pages come back, though to compute them takes less time."""
    one = drive(num_pages=14, max_model_len=48, cost=COMPUTES, offloads=offloads)
    requests = [
        make_request("first", PROMPT[:20], arrival=0, max_tokens=28),
        make_request("last", OTHER[:18], arrival=1, max_tokens=20),
    ]
    one.arrive(*requests)
    one.finish()
    for request in requests:
        assert one.tokens()[request.request_id] == expected_tokens(request, 48)
    rows = [row for plan in one.plans for row in plan.rows if row.request_id == "last"]
    epochs = {row.epoch: 0 for row in rows}
    for row in rows:
        epochs[row.epoch] += row.num_scheduled_tokens if row.token_ids is not None else 0
    assert one.state.num_preemptions == 1 and len(epochs) == 2
    prompt, again = epochs.values()
    assert prompt == 18
    assert (again <= PAGE_SIZE + one.depth) == offloads, "computed again, without its full pages"
    assert (one.tiers.stats().num_restored > 0) == offloads  # type: ignore[union-attr]


def test_every_page_of_a_preempted_sequence_is_saved() -> None:
    """However few units one call saves besides."""
    one = drive(num_pages=14, cost=COMPUTES, offloads=True, most_save_bytes=0)
    one.arrive(
        make_request("first", PROMPT[:20], arrival=0, max_tokens=28),
        make_request("last", OTHER[:18], arrival=1, max_tokens=20),
    )
    while not one.state.num_preemptions:
        one.tick()
    saved = [unit.key for unit in one.last.orders.saves]
    one.finish()
    assert len(saved) >= 18 // PAGE_SIZE and all(key in one.state.tier_keys for key in saved)


@pytest.mark.parametrize("most_save_bytes", [0, PAGE_SIZE * 8, 1 << 62])
def test_a_prompt_that_takes_all_pages_loses_none(most_save_bytes: int) -> None:
    """It takes them when it is admitted, and writes to them step by step: each is saved before."""
    one = drive(num_pages=12, max_num_batched_tokens=8, most_save_bytes=most_save_bytes)
    first, second = tuple(range(100, 141)), tuple(range(200, 241))
    assert answer(one, first) == answer(one, second) == 0
    assert answer(one, first) == answer(one, second) == 40, "loads overwrite pages as steps do"
    assert not one.state.evicted or most_save_bytes == 0


def test_an_idle_engine_saves_pages_in_the_order_of_eviction() -> None:
    """A block at a time, those that were released first before others, and each once."""
    one = drive(num_pages=25, watermark=0.0, ahead=SaveAhead(1.0, 3 * PAGE_BYTES, False))
    one.recorded = []
    assert answer(one, PROMPT) == answer(one, OTHER) == 0
    idle(one)
    blocks = [[unit.place for unit in output.orders.saves] for _, _, output in one.recorded]
    pool = one.state.pools[0]
    assert [page for block in blocks for page in block] == list(pool.cached)
    assert len(pool.cached) == 20 == len(one.state.tier_keys)
    assert all(len(block) <= 3 for block in blocks) and not idle(one)
    # the pages that a later prompt takes are saved: it is restored at once, and saves nothing
    answer(one, tuple(reversed(PROMPT)))
    idle(one)
    saved = one.tiers.stats().num_saved  # type: ignore[union-attr]
    one.arrive(make_request("again", PROMPT, arrival=10, max_tokens=1))
    assert one.last.orders.loads and not one.last.orders.saves and not one.state.held_loads
    assert one.tiers.stats().num_saved == saved  # type: ignore[union-attr]
    one.finish()
    assert one.endings()["again"].num_cached_tokens == 36


def test_a_load_waits_for_pages_that_were_not_saved_ahead() -> None:
    one = drive(watermark=0.0, most_save_bytes=3 * PAGE_BYTES)
    for prompt in (PROMPT, OTHER):
        answer(one, prompt)
    assert not idle(one)
    one.arrive(make_request("again", PROMPT, arrival=10, max_tokens=1))
    assert one.state.held_loads and one.last.orders.saves


def test_a_share_of_the_pool_is_saved_ahead() -> None:
    one = drive(num_pages=41, watermark=0.0, ahead=SaveAhead(0.5))
    for seed in range(4):
        answer(one, tuple((7 * i + seed) % 50 for i in range(40)))
    idle(one)
    pool = one.state.pools[0]
    assert pool.num_fresh + pool.num_offered >= 20 >= pool.num_offered < pool.num_cached


@pytest.mark.parametrize("beside", [True, False])
def test_pages_are_saved_ahead_beside_decodes_but_not_beside_prompts(beside: bool) -> None:
    one = drive(num_pages=49, watermark=0.0, ahead=SaveAhead(1.0, 2 * PAGE_BYTES, beside))
    answer(one, PROMPT)
    one.arrive(make_request("long", OTHER, arrival=10, max_tokens=8))
    assert one.last.step is not None and one.last.step.prefills
    ordered: list[bool] = []
    while one.state.num_unfinished:
        is_alone = not any(plan.prefills for plan in one.state.in_flight)
        one.tick()
        prompts = any(plan.prefills for plan in one.state.in_flight)
        if one.last.orders.saves and one.state.num_unfinished:
            assert beside and not prompts and len(one.state.saving) == 1
        ordered.append(bool(one.last.orders.saves) and is_alone and bool(one.state.running))
    assert any(ordered) == beside
    assert idle(one) > 0


def test_a_page_that_a_tier_has_lost_is_saved_again_when_it_is_evicted() -> None:
    """It was saved ahead, and replaced before the device evicted it."""
    one = drive(num_pages=12, watermark=0.0, ahead=SaveAhead())
    answer(one, PROMPT)
    idle(one)
    keys = tuple(one.state.tier_keys)
    assert len(keys) == 10
    one.tiers.clear(weights_changed=False)  # type: ignore[union-attr]
    one.call(TierChanged((), keys))
    assert answer(one, OTHER) == 0 and answer(one, PROMPT) == 36


def test_bytes_of_the_pages_of_pools() -> None:
    assert TierPolicy(unit_bytes=(3, 5, 3), unit_pools=(1, 0, 1)).pool_bytes == (5, 3)


def test_loads_add_no_steps_to_the_bound() -> None:
    """That of ``sched.schedule``: a request that waits for a load takes no rows of others."""
    for seed in range(20):
        trace = TierTrace(seed, reliable=True)
        trace.run()
        limits, bound = trace.limits, 0
        mixed = (b for b in limits.buckets if b.num_decodes and b.num_prefills)
        chunk = max(b.num_prefill_tokens for b in mixed) // limits.align * limits.align
        for request in trace.requests.values():
            tokens = len(request.prompt_token_ids) + request.max_tokens
            bound += cdiv(tokens, chunk) + request.max_tokens + trace.drive.depth
        assert len(trace.drive.plans) <= bound
