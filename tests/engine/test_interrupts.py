"""Ctrl-C is deferred to the end of a block, then handled as usual."""

import os
import signal
import threading
from typing import Any

import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api import llm as llm_module
from jaxinfer.engine.api.llm import ADDED_AT_ONCE, LLM, interrupts_deferred
from jaxinfer.engine.loop.engine import Engine
from kit.watched_executor import watched_engine


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_deferred_to_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        press_ctrl_c()
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_a_block_without_interrupt_restores_the_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_user_is_called() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_deferred():
            press_ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_change_the_handler() -> None:
    before, within = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupts_deferred():
            within.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert within == [before]


def test_ctrl_c_is_handled_before_all_prompts_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = watched_engine()
    monkeypatch.setattr(llm_module, "start_engine", lambda *_: engine)
    add_validated = Engine.add_validated

    def interrupted(self: Engine, *arguments: Any, **named: Any) -> None:
        if not self.stats().num_requests:
            press_ctrl_c()
        add_validated(self, *arguments, **named)

    monkeypatch.setattr(Engine, "add_validated", interrupted)
    llm, params = LLM("m"), SamplingParams(max_tokens=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]] * (2 * ADDED_AT_ONCE), params, use_tqdm=False)
    assert llm.stats().num_requests == ADDED_AT_ONCE
    assert len(llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids) == 2
