"""Random traces of an engine with tiers: conversations, pools that hold little more than one.

A trace is a function of its seed. Its limits have every kind of layer state; its connectors are
small, slow and fail; requests are aborted, steps fail, and the engine sleeps. In half of the traces
preempted sequences are offloaded, and in half of these and of the others answers are long, so that
many are preempted. In two thirds few pages are saved before the step that overwrites them. In three
quarters pages are saved before they are evicted, while nothing else is copied.
"""

from __future__ import annotations

import random

from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason, Request
from jaxinfer.core.step import Abort, Arrive, PageGroup, StepFailed
from jaxinfer.core.tiers import CostModel, SaveAhead
from jaxinfer.exec.tiers.chain import Chain
from jaxinfer.exec.tiers.host import HostTier
from jaxinfer.sched.saves import has_saves
from kit.drive import Drive, make_limits, make_request
from kit.fake_executor import expected_tokens
from kit.fake_tiers import Unreliable
from kit.recorded_calls import check_replay

MAX_MODEL_LEN = 48
PAGE_SIZE = 4
PAGE_BYTES = 8 * PAGE_SIZE
# window, tokens of an entry, pool
GROUPS = (
    (PageGroup(),),
    (PageGroup(), PageGroup()),
    (PageGroup(), PageGroup(6)),
    (PageGroup(5),),
    (PageGroup(), PageGroup(9), PageGroup(9)),
    (PageGroup(), PageGroup(6, 1, 1)),
    (PageGroup(None, 4), PageGroup(6, 1, 1)),
    (PageGroup(), PageGroup(), PageGroup(None, 2, 1), PageGroup(9, 3, 2), PageGroup(5)),
)
RESTORES = CostModel()  # takes less time than computing
COMPUTES = CostModel(0.0, 1e-9, 1.0)
MOST_CALLS = 500  # of an idle engine, for all pages


class TierTrace:
    """One trace; ``run`` raises ``AssertionError`` if something is wrong."""

    def __init__(self, seed: int, *, reliable: bool = False) -> None:
        draw = self._draw = random.Random(seed)
        self._reliable, self._has_pressure = reliable, seed % 4 > 1
        requests = [self._request(i) for i in range(draw.randint(6, 10))]
        self.requests = {request.request_id: request for request in requests}
        self.limits = self._limits()
        self.cost = draw.choice((RESTORES,) * 8 + (COMPUTES,))
        self._sizes = draw.choice((4, 15, 100, 100)), draw.choice((0, 0, 9, 60))
        self._slowness = draw.choice((0, 0, 1, 4, 15))
        self._failures = 0.0 if reliable else draw.choice((0.0, 0.0, 0.0, 0.2))
        self._ahead = draw.choice((None, *[self._save_ahead(draw) for _ in range(3)]))
        depth = draw.randint(1, 3)
        self.drive = Drive(
            self.limits,
            depth=depth,
            twice=seed % 25 == 0,
            connector=self._connector,
            cost=self.cost,
            offloads=seed % 2 == 1,
            most_save_bytes=(1 << 62, 2 * PAGE_BYTES, 0)[seed % 3],
            watermark=draw.choice((0.0, 0.25)),
            ahead=self._ahead,
            num_looks=draw.choice((0, 0, 1, 3)),
            most_saving_bytes=draw.choice((1 << 62, 4 * PAGE_BYTES, 0)),
            recorded=[] if seed % 25 == 0 else None,
        )

    def run(self) -> None:
        """Run the trace and check tokens, events, pages and what the tiers hold."""
        draw, drive = self._draw, self.drive
        disturbed = set[str]()
        for request in self.requests.values():
            drive.tick(Arrive(request))
            for _ in range(draw.choice((0, 3, 7, 10))):
                drive.tick()
            if not self._reliable:
                disturbed |= self._disturb()
        drive.finish()
        tokens, endings = drive.tokens(), drive.endings()
        for name, request in self.requests.items():
            expected = expected_tokens(request, MAX_MODEL_LEN)
            if name in disturbed and endings[name].finish_reason is not FinishReason.LENGTH:
                found = tokens.get(name, [])
                assert found == expected[: len(found)]
            else:
                assert tokens[name] == expected, f"{name}: {tokens[name]}, expected {expected}"
        assert drive.state.num_free_pages == drive.limits.num_usable_pages
        assert drive.state.num_unfinished == len(drive.state.in_flight) == 0
        self._check_tiers()
        if drive.recorded:
            check_replay(drive.recorded, drive.state)

    def _disturb(self) -> set[str]:
        """Perhaps an abort, a failed step, or sleep; returns the requests that it may end."""
        draw, drive = self._draw, self.drive
        match draw.choice(("", "", "", "", "abort", "fail", "sleep", "clear")):
            case "abort":
                name = draw.choice([*self.requests])
                drive.tick(Abort(name))
                return {name}
            case "fail" if drive.flying:
                plan = drive.state.in_flight[0]
                drive.flying.pop(0)
                drive.call(StepFailed(plan.step_id, "the device is on fire"))
                return {row.request_id for row in plan.rows}
            case "sleep":
                drive.give_up_pages()
            case "clear":
                drive.give_up_pages(keeps_tiers=False)
        return set()

    def _check_tiers(self) -> None:
        """The scheduler knows the keys that the connector has, and no load is left."""
        drive = self.drive
        assert drive.tiers is not None
        for _ in range(10):
            drive.call()
        for _ in range(MOST_CALLS):
            if not has_saves(drive.state):
                break
            drive.call()
        assert not has_saves(drive.state), "an idle engine never ends saving"
        assert not drive.tiers.num_held
        self._check_saved_ahead()
        keys = list(drive.state.tier_keys)
        assert sorted(self.connector.match(keys)) == sorted(keys)
        hosts = [self.host, *([] if self.lower is None else [self.lower])]
        there = {key for one in hosts for key in one.keys}
        # the scheduler forgets a unit that could not be loaded
        assert {*keys} == there or (self._failures and {*keys} <= there)
        for one in hosts:
            assert not one.num_pinned, "a load is left"

    def _check_saved_ahead(self) -> None:
        """All pages that are evicted next have been saved, and a tier that lost none has them."""
        state, drive = self.drive.state, self.drive
        if self._ahead is None or self._failures or drive.tiers is None:
            return
        has_lost = drive.num_lost or drive.tiers.stats().num_dropped
        for pool, size in zip(state.pools, state.limits.num_pages, strict=True):
            assert pool.num_cached == pool.num_offered or not pool.offers(
                int(size * self._ahead.share)
            )
            log = enumerate(pool.cached)
            offered = [
                pool.hash_by_page[page]
                for position, page in log
                if pool.cached_head <= position < pool.offered_head
                and pool.stamps[page] == position
            ]
            assert has_lost or all(key in state.tier_keys for key in offered)

    @staticmethod
    def _save_ahead(draw: random.Random) -> SaveAhead:
        share, most = draw.choice((0.5, 1.0, 1.0)), draw.choice((1, 3, 1 << 40)) * PAGE_BYTES
        return SaveAhead(share, most, draw.random() < 0.7)

    def _connector(self, forms: Forms) -> Connector:
        size = max(form.num_bytes for form in forms.values())
        upper, lower = self._sizes
        self.host, self.lower = HostTier(upper * size, forms), None
        self.connector: Connector = self.host
        if lower:
            self.lower = HostTier(lower * size, forms)
            self.connector = Chain(self.host, self.lower)
        return Unreliable(self.connector, upper, self._slowness, self._failures)

    def _limits(self) -> Limits:
        draw = self._draw
        chunk = draw.choice((9, 20, 64))
        groups = draw.choice(GROUPS)
        query_tokens = draw.choice((1, 1, 1, 3))
        values = {
            "page_size": PAGE_SIZE,
            "max_num_seqs": 4 if self._has_pressure else draw.choice((1, 1, 2, 4)),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": chunk,
            "prefill_first": draw.random() < 0.2,
            "groups": groups,
            "query_tokens": query_tokens,
            "num_snapshots": draw.choice((0, 0, 0, 1, 3, 8)) if query_tokens == 1 else 0,
            "align": draw.choice([n for n in (1, 1, 1, 4, 6) if n <= chunk]),
        }
        num_pools = 1 + max(group.pool for group in groups)
        limits = make_limits(**values, num_pages=(0,) * num_pools)
        needed = limits.pages_needed(MAX_MODEL_LEN)
        num_pages = tuple(1 + count + draw.choice((0, 0, 1, 4)) for count in needed)
        return make_limits(**values, num_pages=num_pages)

    def _request(self, number: int) -> Request:
        """A turn of one of three conversations: its prompts have the same beginning."""
        draw = self._draw
        conversation = draw.choice((0, 0, 0, 1, 2))
        length = draw.choice((13, 26, 38, 40))
        prompt = [(7 * i * i + i + conversation * (i > 8)) % 50 for i in range(length)]
        pools = draw.random() < 0.1
        return make_request(
            f"r{number}",
            prompt,
            arrival=number,
            seed=draw.randint(0, 1),
            max_tokens=1 if pools else draw.randint(1, 24 if self._has_pressure else 4),
            pools=pools,
            priority=0 if self._reliable else int(draw.random() < 0.2),
            cache_salt=draw.choice(("",) * 9 + ("tenant",)),
            prompt_logprobs=draw.choice((None,) * 19 + (0,)),
        )
