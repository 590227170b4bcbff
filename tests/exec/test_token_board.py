"""Tokens in memory that a GPU shares: whose they are, and when they are there."""

from __future__ import annotations

import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import EngineError
from jaxinfer.core.request import SamplingParams
from jaxinfer.exec.run import cuda_driver, token_board
from jaxinfer.exec.run.token_board import STEPS, TokenBoard
from kit.engines import run, tiny_engine

TOKENS = (5, 0, 2**31 - 1)


class _Running:
    """An array whose step has not ended."""

    size = len(TOKENS)

    def is_ready(self) -> bool:
        return False


def _board() -> tuple[TokenBoard, np.ndarray]:
    memory = np.zeros((STEPS, 4), np.int64)
    return TokenBoard(memory), memory


def _write(place: tuple[int, int, int], tokens: tuple[int, ...]) -> None:
    """As the device does, at an address."""
    low, high, number = place
    address = (high << 32) | (low & 0xFFFFFFFF)
    entries = (ctypes.c_int64 * len(tokens)).from_address(address)
    entries[:] = [number << 32 | token for token in tokens]


def test_steps_in_flight_have_places_of_their_own() -> None:
    board, memory = _board()
    places = [board.next_place() for _ in range(STEPS)]
    for index, place in enumerate(places):
        _write(place, tuple(token - index * (token > 9) for token in TOKENS))
    for index, place in enumerate(places):
        found = board.read(place[-1], _Running())  # type: ignore[arg-type]
        assert found.dtype == np.int32
        assert found.tolist() == [token - index * (token > 9) for token in TOKENS]
    assert not memory[:, 3].any()


def test_waits_for_every_row() -> None:
    board, _ = _board()
    old = [board.next_place() for _ in range(STEPS)][0]
    _write(old, (1, 1, 1))  # of the step that had the place before
    place = board.next_place()
    assert place[:2] == old[:2]
    found: list[list[int]] = []
    reader = threading.Thread(
        target=lambda: found.append(board.read(place[-1], _Running()).tolist()),  # type: ignore[arg-type]
        daemon=True,
    )
    reader.start()
    _write(place, TOKENS[:2])
    time.sleep(0.05)
    assert not found
    _write(place, TOKENS)
    reader.join(10)
    assert found == [list(TOKENS)]


def test_an_ended_step_that_wrote_nothing_there_is_read_from_its_array() -> None:
    board, _ = _board()
    number = board.next_place()[-1]
    assert board.read(number, jnp.array(TOKENS, jnp.int32)).tolist() == list(TOKENS)


def test_numbers_are_positive_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is what memory holds at first."""
    monkeypatch.setattr(token_board, "LAST_NUMBER", 6)
    board, _ = _board()
    numbers = [board.next_place()[-1] for _ in range(8)]
    assert numbers == [1, 2, 3, 4, 5, 6, 1, 2]


def test_none_without_cuda() -> None:
    assert TokenBoard.of_device(jax.devices("cpu")[0], 4) is None


def test_an_engine_with_a_board_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA writes nothing there, so all of it is read from arrays."""
    sampling = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    usual = run(tiny_engine(), prompts, sampling)
    board, memory = _board()
    monkeypatch.setattr(TokenBoard, "of_device", lambda device, rows: board)
    found = run(tiny_engine(), prompts, sampling)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in usual]
    assert board.next_place()[-1] > 9  # a step has taken the others
    assert not memory.any()


class _Driver:
    """libcuda, as far as it is asked; ``fails`` names the call that does."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[str]()
        self.memory = ctypes.create_string_buffer(b"x" * 4096, 4096)

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> int:
            self.calls.append(name)
            if name == "cuMemHostAlloc" and name != self.fails:
                target = ctypes.cast(args[0], ctypes.POINTER(ctypes.c_void_p))  # type: ignore[arg-type]
                target[0] = ctypes.addressof(self.memory)
            return 2 if name == self.fails else 0

        return call


def test_shared_memory_is_zeroed_and_the_context_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = _Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    found = cuda_driver.shared_zeros(0, (4, 16))
    assert found is not None
    assert found.shape == (4, 16) and not found.any()
    assert found.ctypes.data == ctypes.addressof(driver.memory)
    assert driver.memory.raw[: 4 * 16 * 8] == bytes(4 * 16 * 8)
    assert driver.memory.raw[4 * 16 * 8 :] == b"x" * (4096 - 4 * 16 * 8)
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


@pytest.mark.parametrize("fails", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemHostAlloc"])
def test_a_driver_that_gives_none(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(fails)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    with pytest.raises(EngineError, match=r"share \(its error 2\); free some"):
        cuda_driver.shared_zeros(0, (4, 16))
    pushed = driver.calls.count("cuCtxPushCurrent_v2")
    assert driver.calls.count("cuCtxPopCurrent_v2") == pushed
