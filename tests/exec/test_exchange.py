"""The exchange memory of several GPUs, on a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.exec.run import cuda_driver, executor
from jaxinfer.exec.run.exchange import Exchange
from jaxinfer.exec.step.batch import ALIGN, PEERS, BatchLayout, GroupTable, PageGroup
from jaxinfer.exec.step.sampling import NOT_FINITE
from kit.engines import run, tiny_engine
from pallas_kernels.lib.exchange import lost_word


class _Driver:
    """Two devices of host memory; ``able`` are the pairs of which one may write to the other."""

    def __init__(self, able: tuple[tuple[int, int], ...] = ((0, 1), (1, 0))) -> None:
        self.able, self.enabled, self.memory = able, list[int](), dict[int, np.ndarray]()

    def cuDeviceCanAccessPeer(self, found: Any, device: int, peer: int) -> int:
        found._obj.value = (device, peer) in self.able
        return 0

    def cuCtxEnablePeerAccess(self, context: Any, flags: Any) -> int:
        del context
        self.enabled.append(flags.value)
        return 0 if len(self.enabled) == 1 else cuda_driver.PEER_ACCESS_ALREADY_ENABLED

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        memory = np.ones(size.value, np.uint8)
        address._obj.value = memory.ctypes.data
        self.memory[memory.ctypes.data] = memory
        return 0

    def cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> int:
        self.memory[address.value][: size.value] = value.value
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    def __getattr__(self, name: str) -> Any:  # the others succeed
        return lambda *args: 0


def test_each_device_has_memory_that_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    exchange = Exchange((0, 1))
    assert len(driver.enabled) == 2
    assert all(not memory.any() for memory in driver.memory.values())
    layout = BatchLayout(Bucket(1), (GroupTable(3, PageGroup()),), 4, 16, num_peers=2)
    batch = np.zeros(layout.size, np.int32)
    exchange.put_into(batch)
    peers = layout.split(batch).peers
    assert peers.base is batch and (peers == batch[PEERS : PEERS + 4]).all() and PEERS == 2 * ALIGN
    assert peers.view(np.uint64).tolist() == list(driver.memory)

    exchange.check()
    lost = 4 * lost_word(2)
    list(driver.memory.values())[1][lost] = 1
    with pytest.raises(EngineError, match=r"device 1 has waited .* of \[0, 1\], which did not"):
        exchange.check()


def test_devices_that_are_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: _Driver(able=((0, 1),)))
    with pytest.raises(EngineError, match="device 1 cannot write to the memory of device 0 .*NCCL"):
        Exchange((0, 1))


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: None)
    with pytest.raises(EngineError, match="install NVIDIA's driver"):
        Exchange((0, 1))


def test_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are NaN, so tokens are ``NOT_FINITE``: then the exchange is asked."""

    class Lost:
        def put_into(self, batch: np.ndarray) -> None:
            del batch

        def check(self) -> None:
            raise EngineError("device 0 has waited")

    monkeypatch.setattr(Exchange, "of_program", classmethod(lambda cls, program: Lost()))
    engine = tiny_engine()
    tokens = [SamplingParams(max_tokens=2, temperature=0)]
    run(engine, [(5, 6, 7)], tokens)  # nothing is asked while logits are finite
    monkeypatch.setattr(
        executor.Executor, "_read", lambda self, number, ids: np.full(ids.shape, NOT_FINITE)
    )
    with pytest.raises(EngineError, match="the device failed in step .*device 0 has waited"):
        run(engine, [(5, 6, 8)], tokens)
