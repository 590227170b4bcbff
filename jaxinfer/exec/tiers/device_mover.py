"""``DeviceMover``: units of a GPU, packed into blocks on the device and copied by own streams.

A page is a piece of every layer's arrays: 72 pieces of 32 KB in Qwen3-4B. Copies of such pieces
take longer than their bytes do, so a call packs the pages of a save into one block, from which each
unit is one copy, and another unpacks the blocks of a load (``unit_calls``). The copy engines work
beside the steps. No fence is needed: a save is copied when the host has seen that its block is
there, and a load is unpacked by a call that is queued when the host has seen that its copy has
ended. Units that follow each other in host memory are one copy; those of a prefix were saved with
the last page first, so a block of a load takes its units in the order of their addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import batched, islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.core.connector import Content, Forms, Unit
from jaxinfer.core.tiers import DIGEST_SIZE, TierUnit
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.tier_memory import NUM_TIER_BLOCKS, TIER_BLOCK_BYTES
from jaxinfer.exec.run.copy_stream import CopyEvent, CopyStream, HostCopy
from jaxinfer.exec.run.device_arrays import DeviceArrays
from jaxinfer.exec.tiers.locked_memory import Allocate
from jaxinfer.exec.tiers.mover import SINK, Pools
from jaxinfer.exec.tiers.unit_calls import AddressedCalls, UnitCalls
from pallas_kernels.units.layout import WORD

MAX_WIDTH = 256  # units of a block
MEASURED_BLOCKS = 16  # of a long load, whose copies overlap
_SINK_UNIT = TierUnit(bytes(DIGEST_SIZE), SINK)


MakeCalls = Callable[[Program, DeviceArrays, Pools, Mapping[int | None, int], int], UnitCalls]


def block_sizes(pools: Pools) -> tuple[dict[int | None, int], int]:
    """The units of a block of each pool, and the bytes of the largest block."""
    sizes = {pool: pools.form(pool).num_bytes for pool in pools.indices}
    widths = {
        pool: max(1, min(MAX_WIDTH, TIER_BLOCK_BYTES // size)) for pool, size in sizes.items()
    }
    return widths, max(widths[pool] * size for pool, size in sizes.items())


class DeviceMover:
    """A ``PageMover`` with calls for each pool, a ring of blocks and two streams."""

    def __init__(
        self,
        program: Program,
        arrays: DeviceArrays,
        streams: tuple[CopyStream, CopyStream],
        allocate: Allocate,
        make_calls: MakeCalls = AddressedCalls,
    ) -> None:
        """``streams``: of saves and of loads. ``allocate``: see ``locked_memory``."""
        self.arrays, self._allocate = arrays, allocate
        self._saves, self._loads = streams
        self._measured: np.ndarray | None = None  # a unit that ``copy_to_sink`` copies
        self.pools = Pools(program)
        self.forms: Forms = self.pools.forms
        self.widths, block_bytes = block_sizes(self.pools)
        self._placement = program.placement
        self._block_words = block_bytes // WORD.itemsize
        self._calls = make_calls(program, arrays, self.pools, self.widths, self._block_words)
        self._ring: list[Block] = []

    def gather(self, units: Sequence[TierUnit]) -> DeviceSaving:
        """See ``PageMover``."""
        made = DeviceSaving(self._saves)
        for pool, own in self.pools.split(units).items():
            size = self.pools.form(pool).num_bytes
            for some in batched(own, self.widths[pool]):
                rows = self._rows(pool, [units[i].place for i in some])
                made.keys += [units[i].key for i in some]
                made.parts.append(Packed(len(some), size, self._calls.pack(pool, rows)))
        return made

    def gathered_bytes(self, units: Sequence[TierUnit]) -> int:
        """See ``PageMover``."""
        return self.pools.padded_bytes(units, self.widths)

    def load(self, units: Sequence[Unit], places: Sequence[TierUnit]) -> DeviceLoading:
        """See ``PageMover``."""
        parts = deque[Part]()
        for pool, own in self.pools.split(units).items():
            for some in batched(own, self.widths[pool]):
                contents = [units[i].content for i in some]
                parts.append(Part(pool, contents, [places[i].place for i in some]))
        loading = DeviceLoading(self, parts)
        loading.advance()
        return loading

    def settle(self) -> None:
        """See ``PageMover``."""
        self._saves.wait()
        self._loads.wait()
        self._ring.clear()
        self._calls.settle()

    def copied(self, part: Part) -> Block | None:
        """The block into which a part is being copied; None while all are in use."""
        if not self._ring:
            words, count = self._block_words, NUM_TIER_BLOCKS
            zeros = [np.zeros(words, WORD) for _ in range(count)]  # a CPU keeps them as they are
            made = [self._placement.put(own) for own in zeros]
            self._ring = [Block(array) for array in jax.block_until_ready(made)]
        block = next((one for one in self._ring if one.is_free), None)
        if block is None:
            return None
        hosts, sizes = memory_of(part.contents)
        order = hosts.argsort()
        devices = block.address + self.pools.form(part.pool).num_bytes * np.arange(len(order))
        block.rows = self._rows(part.pool, [part.places[i] for i in order.tolist()])
        block.event = self._loads.to_device(merged(devices, hosts[order], sizes[order]))
        block.is_taken = True
        return block

    def unpack(self, part: Part, block: Block) -> None:
        """Queue the call that writes a part to its places."""
        block.reader = self._calls.unpack(part.pool, block.rows, block.array)
        block.is_taken = False

    def _rows(self, pool: int | None, places: Sequence[int]) -> np.ndarray:
        """The rows of a call: see ``UnitCalls``."""
        rows = self.pools.rows(pool, places, self.widths[pool])
        return np.concatenate([np.asarray([len(places)], np.int32), rows])

    @property
    def most_measured(self) -> int:
        """The units of a long load, for ``copy_to_sink``."""
        (pool,) = self.pools.split([_SINK_UNIT])
        return MEASURED_BLOCKS * self.widths[pool]

    def copy_to_sink(self, count: int) -> None:
        """Load units to the page for padding, to measure the time that it takes."""
        if self._measured is None:
            self._measured = self._allocate(self.forms[0].num_bytes)
        unit = Unit(0, _SINK_UNIT.key, self._measured)
        loading = self.load([unit] * count, [_SINK_UNIT] * count)
        while not loading.advance():
            pass
        jax.block_until_ready(self.arrays.state)


class Part(NamedTuple):
    """Units that are loaded by one block."""

    pool: int | None
    contents: list[Content]
    places: list[int]


class Block:
    """Memory on the device for the units of one copy."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array  # int32[words]
        self.address: int = array.unsafe_buffer_pointer()
        self.rows = np.zeros(1, np.int32)  # to which its units are written: see ``UnitCalls``
        self.event: CopyEvent | None = None  # of the copy into it
        self.reader: jax.Array | None = None  # a result of the call that reads it
        self.is_taken = False  # for a copy that has not been unpacked

    @property
    def is_free(self) -> bool:
        """True if it may be overwritten."""
        if self.is_taken or (self.event is not None and not self.event.is_done):
            return False
        return self.reader is None or _is_ready(self.reader)


class DeviceLoading:
    """See ``Loading``."""

    def __init__(self, mover: DeviceMover, parts: deque[Part]) -> None:
        self._mover, self._parts = mover, parts
        self._copied = deque[tuple[Part, Block]]()  # in the order of their copies

    def advance(self) -> bool:
        """See ``Loading``."""
        while self._copied and (event := self._copied[0][1].event) and event.is_done:
            self._mover.unpack(*self._copied.popleft())
        while self._parts and (block := self._mover.copied(self._parts[0])) is not None:
            self._copied.append((self._parts.popleft(), block))
        return not self._parts and not self._copied

    def drop(self) -> None:
        """See ``Loading``: copies that have begun end in their blocks."""
        self._parts.clear()
        for _, block in self._copied:
            block.is_taken = False
        self._copied.clear()


class Packed(NamedTuple):
    """A block of ``count`` units on the device."""

    count: int
    size: int  # bytes of a unit
    block: jax.Array  # int32[width, size / 4]


class DeviceSaving:
    """See ``Saving``. The blocks live until they have been copied."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self.keys: list[bytes] = []
        self.parts: list[Packed] = []
        self._event: CopyEvent | None = None

    @property
    def is_ready(self) -> bool:
        """See ``Saving``."""
        return all([_is_ready(part.block) for part in self.parts])

    def copy_to(self, memory: Sequence[Content | None]) -> None:
        """See ``Saving``."""
        found, copies = iter(memory), list[HostCopy]()
        for part in self.parts:
            own = enumerate(islice(found, part.count))
            pairs = [(i, content) for i, content in own if content is not None]
            hosts, sizes = memory_of([content for _, content in pairs])
            places = np.array([i for i, _ in pairs], np.int64)
            devices = part.block.unsafe_buffer_pointer() + part.size * places
            copies += merged(devices, hosts, sizes)
        self._event = self._stream.to_host(copies)

    @property
    def is_copied(self) -> bool:
        """See ``Saving``."""
        return self._event is not None and self._event.is_done


def _is_ready(array: Any) -> bool:
    return bool(array.is_ready())


def memory_of(contents: Sequence[Content]) -> tuple[np.ndarray, np.ndarray]:  # int64[units] each
    """The addresses and the sizes of units in host memory."""
    addresses = [content.ctypes.data for content in contents]
    return np.array(addresses, np.int64), np.array([content.nbytes for content in contents])


def merged(
    devices: np.ndarray,  # int64[copies]: addresses on the device
    hosts: np.ndarray,  # int64[copies]: addresses in host memory
    sizes: np.ndarray,  # int64[copies]: bytes
) -> list[HostCopy]:
    """Copies, those that follow each other on both sides as one."""
    follows = (devices[:-1] + sizes[:-1] == devices[1:]) & (hosts[:-1] + sizes[:-1] == hosts[1:])
    starts = np.flatnonzero(np.append([True][: len(sizes)], ~follows))
    sums = np.add.reduceat(sizes, starts) if len(starts) else sizes
    columns = devices[starts], hosts[starts], sums
    return [HostCopy(*row) for row in zip(*(one.tolist() for one in columns), strict=True)]
