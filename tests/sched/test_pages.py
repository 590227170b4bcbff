"""The page pool takes fresh pages first, then the least recently released, leaves before roots."""

import numpy as np
import pytest

from jaxinfer.core.intlog import IntLog
from jaxinfer.core.tiers import TierUnit
from jaxinfer.sched.pages import PagePool, PageWriter, new_pool
from jaxinfer.sched.prefix import following_page_hashes


def array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def cached_pool(*chains: tuple[int, ...], num_pages: int = 9) -> PagePool:
    """A pool without fresh pages in which the chains were used, hashed and released in order."""
    writer = PageWriter(new_pool(num_pages), [0])
    writer.take(num_pages - 1)
    for chain in chains:
        writer.register(chain, [bytes([page]) for page in chain])
    for chain in chains:
        writer.release(array(*chain))
    return writer.finish()


def test_fresh_pages_are_taken_first() -> None:
    writer = PageWriter(cached_pool((1, 2, 3)), [0])
    writer.release(array(7, 8))
    assert sorted(writer.take(2)) == [7, 8]
    assert writer.num_free == 3


def test_evicts_least_recently_released_and_leaves_first() -> None:
    writer = PageWriter(cached_pool((1, 2, 3), (4, 5)), [0])
    assert writer.take(5) == [3, 2, 1, 5, 4]
    assert writer.lookup([b"\1", b"\2"]) == []


def test_sharing_protects_and_renews() -> None:
    writer = PageWriter(cached_pool((1, 2, 3), (4, 5)), [0])
    writer.share([1, 2])
    assert writer.num_free == 3
    writer.release(array(1, 2))
    assert writer.take(5) == [3, 5, 4, 2, 1]


def test_a_page_lives_until_its_last_owner_leaves() -> None:
    writer = PageWriter(cached_pool((1, 2)), [0])
    writer.share([1])
    writer.share([1])
    assert writer.num_cached_among([1, 2]) == 1
    writer.release(array(1))
    assert writer.num_free == 1
    writer.release(array(1))
    assert writer.num_free == 2


@pytest.mark.parametrize("num_offered", [0, 1, 3, 5])
def test_pages_that_are_taken_without_having_been_offered(num_offered: int) -> None:
    """``next_unsaved`` says so before they are taken; stale entries of the log do not count."""
    for count in range(9):
        writer = PageWriter(cached_pool((1, 2, 3), (4, 5)), [0])
        writer.share([1, 2])
        writer.release(array(1, 2))
        writer.release(array(7, 8))
        offered = {unit.place for unit in writer.offer(99, num_offered)}
        fresh, units = writer.next_unsaved(count)
        taken = writer.take(min(count, writer.num_free))
        assert fresh == taken[: len(fresh)] and {*fresh} <= {7, 8}
        unsaved = [page for page in taken[len(fresh) :] if page not in offered]
        assert units == [TierUnit(bytes([page]), page) for page in unsaved]


def test_eviction_passes_many_stale_entries() -> None:
    """There are more of them than it looks at together."""
    writer = PageWriter(cached_pool(tuple(range(1, 151)), num_pages=151), [0])
    writer.share([*range(1, 101)])
    writer.release(array(*range(1, 101)))
    order = [*range(150, 100, -1), *range(100, 0, -1)]
    assert [unit.place for unit in writer.offer(99, 60)] == order[:60]
    assert writer.take(40) + writer.take(110) == order
    assert [len(change.units) for change in writer.index_changes] == [40, 110]
    assert not writer.has(bytes([1])) and not writer.num_free


def test_lookup_stops_at_the_first_gap() -> None:
    writer = PageWriter(cached_pool((1, 2, 3)), [0])
    assert writer.lookup([b"\1", b"\2", b"?", b"\3"]) == [1, 2]


def test_a_hash_stays_with_its_first_page() -> None:
    writer = PageWriter(cached_pool((1,)), [0])
    writer.register([2], [b"\1"])
    assert writer.lookup([b"\1"]) == [1]
    writer.release(array(2))
    assert writer.take(1) == [2], "a page without a hash is fresh"


def test_finished_pools_are_values() -> None:
    pool = cached_pool((1, 2, 3))
    writer = PageWriter(pool, [0])
    writer.share([1])
    writer.take(2)
    writer.finish()
    again = PageWriter(pool, [0])
    assert again.num_free == 3
    assert again.lookup([b"\1", b"\2", b"\3"]) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        pool.stamps[0] = 1


def test_logs_stay_short() -> None:
    pool = cached_pool((1, 2, 3))
    for _ in range(100):
        writer = PageWriter(pool, [0])
        writer.share([1, 2])
        writer.release(array(1, 2))
        writer.release(array(*writer.take(1)))
        pool = writer.finish()
    assert len(pool.cached) <= 2 * 9 + 2
    assert len(pool.fresh) <= 2 * 9 + 2
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("salt", "tokens", "same"),
    [
        ("", (1, 2, 3, 4), (True, True)),
        ("", (1, 2, 9, 4), (True, False)),
        ("", (9, 2, 3, 4), (False, False)),
        ("tenant", (1, 2, 3, 4), (False, False)),
    ],
    ids=("equal", "second-differs", "first-differs", "salted"),
)
def test_page_hashes_depend_on_the_whole_prefix(
    salt: str, tokens: tuple[int, ...], same: tuple[bool, bool]
) -> None:
    base = following_page_hashes((), b"", IntLog((1, 2, 3, 4)), 2, 2)
    other = following_page_hashes((), salt.encode(), IntLog(tokens), 2, 2)
    assert tuple(a == b for a, b in zip(base, other, strict=True)) == same


def test_extended_page_hashes_equal_those_made_at_once() -> None:
    log = IntLog(range(10))
    every = tuple(following_page_hashes((), b"s", log, 5, 2))
    assert tuple(following_page_hashes(every[:2], b"s", log, 5, 2)) == every[2:]
    assert not tuple(following_page_hashes(every[:2], b"s", log, 1, 2))
