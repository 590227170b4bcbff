"""Records of tiers: memory outside the device in which layer state is kept beyond the page pools.

A *unit* is the content of one page of a group of layers, or one saved state of a sequence. Its key
is the chained hash of the tokens that it ends with (``sched.prefix``), with the number of its group
behind it unless that is 0. So a key names a group, and the salt and weights that the hash covers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

DIGEST_SIZE = 16  # bytes; 128 bits make a chance collision of contents irrelevant
MAX_SAVING_CALLS = 2  # in flight: beside the saves of these only what must be saved is saved
CERTAIN = 0.6  # of the time to compute: a prefix is restored if that takes less
SNAPSHOTS = 255  # the group of units that are saved states; groups of pages have lower numbers


def key_in(group: int, page_hash: bytes) -> bytes:
    """The key of a page of a group, or of a saved state, whose last page has this hash."""
    return page_hash + bytes((group,)) if group else page_hash


def group_of(key: bytes) -> int:
    """The group of a key: that of a page, or ``SNAPSHOTS``."""
    return key[DIGEST_SIZE] if len(key) > DIGEST_SIZE else 0


class TierUnit(msgspec.Struct, frozen=True, gc=False):
    """A unit and its place on the device: a page of its group's pool, or a row of states."""

    key: bytes
    place: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """Units that are brought from a tier to their places, for one admission of a sequence."""

    ticket: int  # unique among admissions
    units: tuple[TierUnit, ...]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of the units."""
        return tuple([unit.key for unit in self.units])


class TierOrders(msgspec.Struct, frozen=True):
    """Copies that one call of the scheduler orders, all queued before its step, if it plans one.

    Saves are before loads and before the step, which may write to a place that is saved. The places
    of a load belong to its sequence until ``Loaded`` or the call that has its ticket in
    ``dropped``: then nothing may be written to them any more.
    """

    saves: tuple[TierUnit, ...] = ()
    loads: tuple[Load, ...] = ()
    dropped: tuple[int, ...] = ()


NO_ORDERS = TierOrders()


class CostModel(msgspec.Struct, frozen=True):
    """The seconds of steps and copies, by straight lines that a start has fitted.

    ``step_seconds`` and ``token_seconds``: of a step, and of each prompt token in it.
    ``load_seconds`` and ``bytes_per_second``: of a load, and of the units that are restored, from
    the tier to the device's pages.
    A request does not compute its first tokens while the others are copied: of 16,384 tokens of
    Qwen3-4B this took 167 ms, and 162 to restore all (an H200, whose blocks are unpacked between
    two steps); a CPU copies and computes with the same cores.
    """

    step_seconds: float = 0.0
    token_seconds: float = 1.0
    bytes_per_second: float = 1e9
    load_seconds: float = 0.0

    def computing(self, num_tokens: int, chunk: int) -> float:
        """Seconds to compute so many prompt tokens, ``chunk`` at a time."""
        return -(-num_tokens // chunk) * self.step_seconds + num_tokens * self.token_seconds

    def restoring(self, num_bytes: int, unsaved_bytes: int = 0, num_steps: int = 0) -> float:
        """Seconds to restore so many bytes, and for the step that computes the rest of the prompt.

        ``unsaved_bytes`` are saved before, as fast as bytes are restored. ``num_steps``: of others,
        for which the load waits.
        """
        copying = (num_bytes + unsaved_bytes) / self.bytes_per_second
        return self.load_seconds + copying + (1 + num_steps) * self.step_seconds

    def restores(self, seconds: float, num_tokens: int, chunk: int) -> bool:
        """True if so many seconds (``restoring``) are less than to compute the tokens for certain.

        On an H200 (240 to 16,368 tokens of Qwen3-4B) loads took 0.8 to 1.31 times the seconds of
        this model, and 1,024 tokens twice: 19 ms, where computing them took 16.
        """
        return seconds < CERTAIN * self.computing(num_tokens, chunk)


class SaveAhead(msgspec.Struct, frozen=True):
    """The pages and states that are saved before they are evicted, while nothing else is copied.

    ``share``: of each pool's pages and of the rows of states, those that are evicted next.
    ``most_bytes``: of one call, or one unit; the next ones follow when these have been saved.
    ``beside_decodes``: also while sequences decode. A GPU copies beside its steps; a CPU does so
    with the cores that compute them.
    """

    share: float = 1.0
    most_bytes: int = 1 << 62
    beside_decodes: bool = True


class TierPolicy(msgspec.Struct, frozen=True, dict=True):  # a dict for cached properties
    """The scheduler's settings of tiers; a constant of an engine."""

    cost: CostModel = CostModel()
    unit_bytes: tuple[int, ...] = ()  # of a page of each group
    unit_pools: tuple[int, ...] = ()  # the pool of each group's pages
    state_bytes: int = 0  # of a saved state
    # of one call of the scheduler, besides offloads and what its step and loads overwrite
    most_save_bytes: int = 1 << 62
    # pages are saved while less than this share of a pool is free without losing a prefix
    watermark: float = 0.25
    ahead: SaveAhead | None = None  # None: no more than that is saved before it is evicted
    # whether all units of a preempted sequence are saved before their places are returned, and
    # restored whatever that costs (preemption "offload")
    offloads: bool = False

    @cached_property
    def pool_bytes(self) -> tuple[int, ...]:
        """The bytes of a page of each pool."""
        sizes = dict(zip(self.unit_pools, self.unit_bytes, strict=True))
        return tuple(sizes[pool] for pool in sorted(sizes))

    def num_bytes(self, keys: Iterable[bytes]) -> int:
        """The bytes of the units with these keys."""
        groups = map(group_of, keys)
        return sum(self.state_bytes if g == SNAPSHOTS else self.unit_bytes[g] for g in groups)


class TierStats(msgspec.Struct, frozen=True, gc=False):
    """Counters of tiers since the start, and present values."""

    num_saved: int = 0  # units
    num_restored: int = 0
    num_failed: int = 0  # units that could not be loaded, and were computed again
    num_dropped: int = 0  # units that no tier had space or time for
    saved_bytes: int = 0
    restored_bytes: int = 0
    save_seconds: float = 0.0  # of copies from the device to the tier
    restore_seconds: float = 0.0  # from the order to load until the units are on the device
    host_bytes: int = 0  # present values: bytes of units in each tier, and its size
    host_size: int = 0
    disk_bytes: int = 0
    disk_size: int = 0
    bytes_per_second: float = 0.0  # the cost model: see ``CostModel``
    step_seconds: float = 0.0
    token_seconds: float = 0.0


# Events: see ``core.step``


class TierChanged(msgspec.Struct, frozen=True, tag=True):
    """Units with these keys can be loaded from now on, or not any more."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The saves of so many calls have ended, the oldest ones. What the tiers keep of them is in
    ``TierChanged``.
    """

    count: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A load has ended: a step planned now finds its units, unless some have ``failed``."""

    ticket: int
    failed: tuple[bytes, ...] = ()
