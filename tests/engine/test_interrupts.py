"""Ctrl-C waits for the end of a block, then does what it always does."""

import os
import signal
import threading
from typing import Any

import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api import llm as llm_module
from jaxinfer.engine.api.interrupts import interrupts_deferred
from jaxinfer.engine.api.llm import ADDED_AT_ONCE, LLM
from jaxinfer.engine.loop.engine import Engine
from kit.watched_executor import watched_engine


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


def test_ctrl_c_does_not_wait_until_all_prompts_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = watched_engine()
    monkeypatch.setattr(llm_module, "start_engine", lambda *_: engine)
    add_checked = Engine.add_checked

    def interrupted(self: Engine, *arguments: Any, **named: Any) -> None:
        if not self.stats().num_requests:
            press_ctrl_c()
        add_checked(self, *arguments, **named)

    monkeypatch.setattr(Engine, "add_checked", interrupted)
    llm, params = LLM("m"), SamplingParams(max_tokens=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]] * (2 * ADDED_AT_ONCE), params, use_tqdm=False)
    assert llm.stats().num_requests == ADDED_AT_ONCE
    assert len(llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids) == 2
