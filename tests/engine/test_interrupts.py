"""Ctrl-C waits for the end of a block, then does what it always does."""

import os
import signal
import threading

import pytest

from jaxinfer.engine.interrupts import interrupts_deferred


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_waits_for_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        press_ctrl_c()
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_quiet_block_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_own_handlers_are_kept() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_deferred():
            press_ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone() -> None:
    before, within = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupts_deferred():
            within.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert within == [before]
