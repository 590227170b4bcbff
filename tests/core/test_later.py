"""What a thread makes for who may want it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from jaxinfer.core.later import TURN_SECONDS, Later


def test_made_once_by_another_thread_from_begin_on() -> None:
    threads: list[threading.Thread] = []
    go = threading.Event()

    def make() -> int:
        threads.append(threading.current_thread())
        assert go.wait(10)
        return 3

    later = Later(make)
    later.wait(0.01)
    assert not later.done and not threads
    turn = sys.getswitchinterval()
    later.begin()
    later.begin()
    later.wait(0.01)
    assert not later.done
    assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
    go.set()
    later.wait(10)
    assert threads[0].join(10) is None and sys.getswitchinterval() == turn
    assert later.done and later.result() == later.result() == 3
    (maker,) = threads
    assert maker is not threading.current_thread() and not maker.daemon


def test_what_follows_comes_when_it_is_done_made_or_not() -> None:
    go, followed = threading.Event(), threading.Event()

    def make() -> None:
        assert go.wait(10)
        raise ValueError("no room")

    later = Later(make)
    later.when_done(followed.set)
    later.begin()
    assert not followed.wait(0.02)
    go.set()
    assert followed.wait(10)
    after: list[bool] = []
    later.when_done(lambda: after.append(later.done))
    assert after == [True]


def test_who_asks_begins_it_and_is_told_why_not() -> None:
    def make() -> int:
        raise ValueError("no room")

    later = Later(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            later.result()
    assert later.done


def test_who_begins_it_is_told_of_a_failure_first() -> None:
    def make() -> int:
        raise ValueError("no room")

    told: list[str] = []
    later = Later(make)
    later.begin(lambda error: told.append(f"{error}, {later.done}"))
    with pytest.raises(ValueError, match="no room"):
        later.result()
    assert told == ["no room, False"]


CUT_OFF = """
import sys
from concurrent.futures import ThreadPoolExecutor

from jaxinfer.core.later import Later


def make():
    while True:  # until the process ends, and pools take no work any more
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()


Later(make).begin(lambda error: print(error, file=sys.stderr))
"""


def test_who_is_cut_off_by_the_end_of_the_process_tells_nobody() -> None:
    ended = subprocess.run(
        (sys.executable, "-c", CUT_OFF), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr == ""
