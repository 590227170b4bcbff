"""An IntLog is an immutable value, also when several logs grow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.intlog import IntLog

values = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(st.data())
def test_a_view_never_changes(data: st.DataObject) -> None:
    known: list[tuple[IntLog, list[int]]] = [(IntLog(), [])]
    for _ in range(12):
        log, expected = data.draw(st.sampled_from(known))
        added = data.draw(values)
        grown = log.extend(added)
        if len(added) == 1:
            assert grown == log.append(added[0])
        known.append((grown, expected + added))
    for log, expected in known:
        assert list(log) == log.array().tolist() == expected
        assert len(log) == len(expected)
        assert log == IntLog(expected) and hash(log) == hash(IntLog(expected))


@pytest.mark.parametrize("added", [0, 99], ids=["new", "grown"])
def test_arrays_cannot_be_written(added: int) -> None:
    with pytest.raises(ValueError, match="read-only"):
        IntLog([1, 2]).extend(range(added)).array()[0] = 5


def test_an_empty_log_does_not_hold_the_buffer_of_longer_logs() -> None:
    empty = IntLog()
    grown = [empty.extend(range(1000)), empty.append(7)]
    assert [len(log) for log in grown] == [1000, 1] and len(empty) == 0
    assert empty._buffer.data.nbytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array], ids=lambda kind: kind.__name__)
@given(values)
def test_logs_of_lists_tuples_iterators_and_arrays_are_equal(
    kind: Callable[[list[int]], Any], given: list[int]
) -> None:
    log = IntLog(kind(given))
    assert log == IntLog(range(0)).extend(given) and list(log) == given
    assert log.array().dtype == np.int32


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("beyond", [2**31, -(2**31) - 1, 2**70])
def test_values_beyond_int32_are_errors(kind: Callable[[list[int]], Any], beyond: int) -> None:
    with pytest.raises(OverflowError):
        IntLog(kind([1, beyond]))


def test_index() -> None:
    log = IntLog([4, 5])
    assert (log[0], log[-1]) == (4, 5)
    assert (log[:1], log[1:], log[-5:]) == ([4], [5], [4, 5])
    with pytest.raises(IndexError):
        log[2]


def test_a_log_of_a_log_is_the_same_value_without_a_copy() -> None:
    log = IntLog([4, 5])
    again = IntLog(log)
    assert again == log and np.shares_memory(again.array(), log.array())
    assert list(again.append(6)) == [4, 5, 6] and list(log.append(7)) == [4, 5, 7]
    assert list(again) == list(log) == [4, 5]
