"""Requests whose forms wait for a trial: they are aborted, and their forms are sent once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link import thread as link_thread
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.link.wire import AbortRequest, Command, Refused, Submission
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.text.grammar import forms
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.grammar.trial import Refused as RefusedForm
from kit.engines import tiny_engine
from kit.server_process import wait_until

FORM = {"regex": "[ab]{3}"}
SAMPLING = SamplingParams(structured_outputs=FORM, max_tokens=8)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = tiny_engine()
    yield made
    made.close()


def test_an_aborted_request_ends_its_trial(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def outcome(end: object, params: StructuredOutputsParams) -> RefusedForm:
        begun.set()
        go.wait()
        return RefusedForm("structured_outputs.regex is refused")

    monkeypatch.setattr(forms, "outcome", outcome)
    answers: list[Any] = []
    link = EngineThread(engine)
    link.connect(answers.append)
    waiting = engine.constraints._forms._forms
    for name in ("first", "second"):
        link.send(Submission(name, RequestSpec((1,), SAMPLING)))
    wait_until(begun.is_set, "its form is tried")
    link.send(AbortRequest("first"))
    wait_until(lambda: sum(len(one.requests) for one in waiting.values()) == 1, "one is left")
    (form,) = waiting.values()
    assert form.trial is not None and form.trial.fileno() >= 0
    link.send(AbortRequest("second"))
    wait_until(lambda: not waiting, "no request waits")
    assert not form.trial.recv(1), "the trial has been told to end"
    go.set()
    link.stop()
    assert not [one for one in answers if isinstance(one, Refused)]


class Noting(EngineThread):
    """Notes the submissions."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.sent: list[Submission] = []

    def _pass(self, command: Command) -> None:
        if isinstance(command, Submission):
            self.sent.append(command)
        super()._pass(command)


def test_the_form_of_several_prompts_is_sent_once(engine: Engine) -> None:
    other = replace(SAMPLING, structured_outputs={"choice": ["x"]})
    given = [SAMPLING, replace(SAMPLING, seed=1), replace(SAMPLING, structured_outputs=None)]
    given += [SAMPLING, other, SAMPLING]

    async def scenario() -> list[str]:
        link = Noting(engine)
        client = EngineClient(link)
        streams = [client.open(RequestSpec((1, 2), sampling)) for sampling in given]
        texts = []
        for stream in streams:
            text = ""
            while deltas := await stream.read():
                text += "".join(delta.text for delta in deltas)
            texts.append(text)
        assert [one.has_last_form for one in link.sent] == [False, True, False, True, False, False]
        assert link.sent[1].spec.sampling.structured_outputs is None
        await client.shutdown()
        return texts

    texts = asyncio.run(scenario())
    for number in (0, 1, 3, 5):
        assert len(texts[number]) == 3 and set(texts[number]) <= {"a", "b"}
    assert texts[4] == "x" and len(texts[2]) != 3


def test_forms_of_many_prompts_are_compiled_together_and_checked_in_order(engine: Engine) -> None:
    """The first invalid prompt is named, whichever form is refused first."""
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.progress import NO_PROGRESS
    from jaxinfer.engine.api.llm import LLM

    llm = LLM.of_engine(engine, EngineConfig(), NO_PROGRESS)
    params: list[Any] = [
        SamplingParams(structured_outputs={"regex": f"[ab]{{{n}}}"}, max_tokens=20)
        for n in range(1, 9)
    ]
    prompts = [{"prompt_token_ids": [1]}] * 8
    answers = llm.generate(prompts, params, use_tqdm=False)
    assert [len(answer.outputs[0].text) for answer in answers] == [*range(1, 9)]
    params[3] = replace(params[3], structured_outputs={"regex": "("})
    params[5] = replace(params[5], allowed_token_ids=(999,))
    with pytest.raises(RequestError, match="^prompt 3: structured_outputs.regex cannot be used"):
        llm.generate(prompts, params, use_tqdm=False)
    params[3] = params[2]
    with pytest.raises(RequestError, match="^prompt 5: allowed_token_ids holds token id 999"):
        llm.generate(prompts, params, use_tqdm=False)


def test_an_idle_engine_prepares_for_the_first_form(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_thread, "IDLE_SECONDS", 0.01)
    link = EngineThread(engine)
    link.connect(lambda news: None)
    try:
        wait_until(lambda: engine.constraints.trial_pid is not None, "the process of trials runs")
        pid = engine.constraints.trial_pid
        assert engine.constraints.compile(SAMPLING) is not None
        assert engine.constraints.trial_pid == pid
    finally:
        link.stop()


def test_an_engine_without_a_tokenizer_prepares_nothing() -> None:
    without = ConstraintCompiler(None, 8, (0,))
    without.prepare()
    with pytest.raises(RequestError, match="needs a tokenizer"):
        without.compile(SAMPLING)
    assert without.trial_pid is None
