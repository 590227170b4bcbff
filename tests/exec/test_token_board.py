"""The token board: tokens are matched by the number of their call, and read when complete."""

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
from jaxinfer.exec.run.token_board import NUM_CALLS, TokenBoard
from kit.engines import run, tiny_engine

TOKENS = (5, 0, 2**31 - 1)


class _Running:
    """An array whose step has not ended."""

    size = len(TOKENS)

    def is_ready(self) -> bool:
        return False


def _board() -> tuple[TokenBoard, np.ndarray]:
    memory = np.zeros((NUM_CALLS, 4), np.int64)
    return TokenBoard(memory), memory


def _write(place: tuple[int, int, int], tokens: tuple[int, ...]) -> None:
    """Write to the address of a place, as the device does."""
    low, high, number = place
    address = (high << 32) | (low & 0xFFFFFFFF)
    entries = (ctypes.c_int64 * len(tokens)).from_address(address)
    entries[:] = [number << 32 | token for token in tokens]


def test_steps_in_flight_have_different_places() -> None:
    board, memory = _board()
    places = [board.next_place() for _ in range(NUM_CALLS)]
    for index, place in enumerate(places):
        _write(place, tuple(token - index * (token > 9) for token in TOKENS))
    for index, place in enumerate(places):
        found = board.read(place[-1], _Running())  # type: ignore[arg-type]
        assert found.dtype == np.int32
        assert found.tolist() == [token - index * (token > 9) for token in TOKENS]
    assert not memory[:, 3].any()


def test_waits_for_every_row() -> None:
    board, _ = _board()
    old = [board.next_place() for _ in range(NUM_CALLS)][0]
    _write(old, (1, 1, 1))  # the call that used the same address before
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


def test_a_finished_call_that_did_not_publish_is_read_from_its_result() -> None:
    board, _ = _board()
    number = board.next_place()[-1]
    assert board.read(number, jnp.array(TOKENS, jnp.int32)).tolist() == list(TOKENS)


def test_numbers_are_positive_and_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial memory holds 0, so 0 is no number."""
    monkeypatch.setattr(token_board, "MAX_NUMBER", 6)
    board, _ = _board()
    numbers = [board.next_place()[-1] for _ in range(8)]
    assert numbers == [1, 2, 3, 4, 5, 6, 1, 2]


def test_none_without_cuda() -> None:
    assert TokenBoard.of_device(jax.devices("cpu")[0], 4) is None


def test_an_engine_with_a_board_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is published, so all tokens are read from results."""
    sampling = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    usual = run(tiny_engine(), prompts, sampling)
    board, memory = _board()
    monkeypatch.setattr(TokenBoard, "of_device", lambda device, rows: board)
    found = run(tiny_engine(), prompts, sampling)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in usual]
    assert board.next_place()[-1] > 9  # the steps have used the earlier numbers
    assert not memory.any()


class _Driver:
    """A fake of libcuda; ``fails`` is the name of the call that fails."""

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


def test_shared_memory_is_zeroed_and_the_context_is_popped(
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
def test_a_driver_that_cannot_allocate(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(fails)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    with pytest.raises(EngineError, match=r"share \(its error 2\); free some"):
        cuda_driver.shared_zeros(0, (4, 16))
    pushed = driver.calls.count("cuCtxPushCurrent_v2")
    assert driver.calls.count("cuCtxPopCurrent_v2") == pushed
