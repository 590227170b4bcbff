"""Copies by streams of a GPU, with a stand-in of CUDA's driver; and the memory that they need."""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.connector import UnitForm
from jaxinfer.core.errors import EngineError
from jaxinfer.core.tiers import key_in
from jaxinfer.exec.run import cuda_driver
from jaxinfer.exec.run.copy_stream import NOT_READY, CudaCopyStream, HostCopy
from jaxinfer.exec.tiers import locked_memory
from jaxinfer.exec.tiers.device_mover import memory_of, merged
from jaxinfer.exec.tiers.host import HostTier


class Driver:
    """A fake of libcuda with one stream: what is queued is done by ``run``, or by waiting."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.queue = fails, list[Any]()
        self.recorded: dict[int, bool] = {}  # by event: whether it has been reached
        self.num_events = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            return 2 if name == self.fails else getattr(self, f"_{name}", lambda *_: 0)(*args)

        return call

    def _cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        self.queue.append((to.value, source.value, size.value))
        return 0

    def _cuMemcpyDtoHAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        self.queue.append((to.value, source.value, size.value))
        return 0

    def _cuEventCreate(self, made: Any, flags: int) -> int:
        self.num_events += 1
        ctypes.cast(made, ctypes.POINTER(ctypes.c_void_p))[0] = self.num_events
        return 0

    def _cuEventRecord(self, event: Any, stream: Any) -> int:
        self.recorded[event.value] = False
        self.queue.append(event.value)
        return 0

    def _cuEventQuery(self, event: Any) -> int:
        return 0 if self.recorded[event.value] else NOT_READY

    def _cuStreamSynchronize(self, stream: Any) -> int:
        self.run()
        return 0

    def run(self) -> None:
        for one in self.queue:
            if isinstance(one, int):
                self.recorded[one] = True
            else:
                ctypes.memmove(*one)
        self.queue.clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: made)
    return made


def test_an_event_is_done_when_its_copies_are(driver: Driver) -> None:
    stream = CudaCopyStream(0)
    device, host = np.zeros(8, np.uint8), np.arange(8, dtype=np.uint8)
    start = device.ctypes.data
    source = host.ctypes.data
    event = stream.to_device([HostCopy(start, source, 4), HostCopy(start + 4, source + 4, 4)])
    assert not event.is_done and not device.any()
    driver.run()
    assert event.is_done and device.tolist() == host.tolist()
    back = np.zeros(8, np.uint8)
    second = stream.to_host([HostCopy(start, back.ctypes.data, back.nbytes)])
    assert driver.num_events == 1  # the first one is used again
    assert event.is_done and not second.is_done  # and still tells what it told
    stream.wait()
    assert second.is_done and back.tolist() == host.tolist()


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuMemcpyHtoDAsync_v2", "cuEventRecord"])
def test_a_driver_that_copies_nothing(call: str, driver: Driver) -> None:
    driver.fails = call
    with pytest.raises(EngineError, match=r"between the host and device 0 \(its error 2\)"):
        CudaCopyStream(0).to_device([HostCopy(0, 0, 1)])


def test_a_failed_copy_is_an_error_of_its_event(driver: Driver) -> None:
    event = CudaCopyStream(0).to_device([])
    driver.fails = "cuEventQuery"
    with pytest.raises(EngineError, match="start the engine again"):
        print(event.is_done)


def copies_of(*pairs: tuple[int, np.ndarray]) -> list[HostCopy]:
    hosts, sizes = memory_of([content for _, content in pairs])
    return merged(np.array([device for device, _ in pairs], np.int64), hosts, sizes)


def test_units_that_follow_each_other_are_one_copy() -> None:
    form = UnitForm((((4,), np.dtype(np.float32)), ((3,), np.dtype(np.int8))))
    memory = np.zeros(3 * form.num_bytes, np.uint8)
    one, two, _, apart = (*memory.reshape(3, -1), form.new())
    assert copies_of((100, one), (119, two)) == [HostCopy(100, memory.ctypes.data, 38)]
    for others in ([(100, one), (119, apart)], [(100, one), (150, two)], [(100, two), (119, one)]):
        each = [HostCopy(device, unit.ctypes.data, 19) for device, unit in others]
        assert copies_of(*others) == each
    assert not copies_of()


def test_a_tier_grows_as_its_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_memory, "PIECE_BYTES", 64)
    form, go, sizes = UnitForm((((40,), np.dtype(np.uint8)),)), threading.Event(), list[int]()

    def allocate(size: int) -> np.ndarray:
        go.wait(5)
        sizes.append(size)
        return np.zeros(size, np.uint8)

    memory = locked_memory.LockedMemory(3 * 40 + 10, 40, allocate)
    tier = HostTier(202, {0: form}, memory)
    keys = [key_in(0, bytes([i]) * 16) for i in range(4)]
    assert tier.reserve(0, keys[0]) is None and not tier.num_bytes
    go.set()
    memory._thread.join()  # pyright: ignore[reportPrivateUsage]
    assert tier.num_bytes == 120
    assert all([tier.reserve(0, key) is not None for key in keys[:3]])
    assert tier.reserve(0, keys[3]) is None  # none is saved yet
    assert sizes == [40, 40, 40, 10]
    tier.close()


def test_memory_that_the_system_does_not_lock(caplog: pytest.LogCaptureFixture) -> None:
    def allocate(size: int) -> np.ndarray:
        raise EngineError("no memory")

    memory = locked_memory.LockedMemory(1 << 31, 1, allocate)
    memory.close()
    assert memory.taken() == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "the host tier has 0.0 of 2.0 GiB: no memory"


def test_large_memory_is_made_before_it_is_locked(driver: Driver) -> None:
    size, registered = 3 << 20, list[tuple[int, int]]()

    def register(address: Any, length: Any, flags: int) -> int:
        registered.append((address.value, length.value))
        assert flags == cuda_driver.PORTABLE | cuda_driver.MAPPED
        return 0

    driver._cuMemHostRegister_v2 = register  # type: ignore[attr-defined]
    memory, other = (cuda_driver.registered_memory(0, size) for _ in range(2))
    memory[:], other[:] = 7, 8
    assert memory.sum() == 7 * size and other.sum() == 8 * size
    assert registered == [(one.ctypes.data, size) for one in (memory, other)]
    assert abs(memory.ctypes.data - other.ctypes.data) > size  # apart, not next to each other


def test_large_memory_that_the_driver_does_not_lock(driver: Driver) -> None:
    driver.fails = "cuMemHostRegister_v2"
    with pytest.raises(EngineError, match=r"locks no 4096 bytes .* \(its error 2\); free some"):
        cuda_driver.registered_memory(0, 4096)
