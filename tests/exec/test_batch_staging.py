"""Staging buffers are not overwritten before the step that reads them has ended."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import SamplingParams
from jaxinfer.exec.compile.memory_plan import NUM_BUFFERS
from jaxinfer.exec.run import cuda_driver
from jaxinfer.exec.run.batch_staging import BatchStaging
from jaxinfer.exec.run.executor import Executor
from jaxinfer.nn.placement import default_placement
from kit.engines import copy_to_cpu, run, tiny_engine


class _Result:
    """The result of a step; it records a wait for it."""

    def __init__(self, name: str, waited_for: list[str]) -> None:
        self._name, self._waited_for = name, waited_for

    def block_until_ready(self) -> _Result:
        self._waited_for.append(self._name)
        return self


def _batch(first: int, size: int = 4) -> np.ndarray:
    return np.arange(first, first + size, dtype=np.int32)


def test_a_buffer_is_overwritten_when_the_step_that_read_it_has_ended() -> None:
    staging, waited_for = BatchStaging([copy_to_cpu], default_placement()), list[str]()
    filled = []
    for number in range(NUM_BUFFERS):
        filled.append(staging.copy_in(_batch(10 * number)))
        staging.read_by(_Result(str(number), waited_for), filled[-1])  # type: ignore[arg-type]
    addresses = [one.unsafe_buffer_pointer() for one in filled]
    assert [(ctypes.c_int32 * 4).from_address(x)[0] for x in addresses] == [0, 10, 20]
    assert len(set(addresses)) == NUM_BUFFERS and not waited_for

    again = staging.copy_in(_batch(90))
    assert waited_for == ["0"]
    assert again.unsafe_buffer_pointer() == addresses[0]
    held = (ctypes.c_int32 * 4).from_address(addresses[0])
    assert list(held) == [90, 91, 92, 93]
    staging.read_by(_Result("3", waited_for), again)  # type: ignore[arg-type]
    other = staging.copy_in(_batch(7, size=5))  # another size has other buffers
    assert other.size == 5 and waited_for == ["0"]
    assert (ctypes.c_int32 * 5).from_address(other.unsafe_buffer_pointer())[4] == 11


def test_staging_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5), (4,) * 20]
    requests = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True) for i in range(3)]
    expected = run(tiny_engine(), prompts, requests)
    copied: list[int] = []

    def copy(pair: tuple[int, np.ndarray]) -> None:
        copied.append(pair[1].size)
        copy_to_cpu(pair)

    original = Executor.__init__

    def with_staging(self: Executor, *args: Any) -> None:
        original(self, *args)
        self._staging = BatchStaging([copy], default_placement())

    monkeypatch.setattr(Executor, "__init__", with_staging)
    assert run(tiny_engine(), prompts, requests) == expected
    assert len(copied) > 3


class _Driver:
    """A driver whose calls all fail."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 100


def test_a_driver_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", _Driver)
    with pytest.raises(EngineError, match=r"makes no stream on device 1 \(its error 100\)"):
        cuda_driver.copies_to(1, wait=True)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: None)
    assert cuda_driver.copies_to(0, wait=True) is None
