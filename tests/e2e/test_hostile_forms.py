"""Hostile forms against the default server with SmolLM2, while chats stream."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from bench.hostile_forms import CHAT, COMPLETION, MESSAGE, RESPONSE, hostile_forms, measure
from bench.hostile_forms import request_of as body_of
from jaxinfer.bench.server_process import ServerProcess
from jaxinfer.core.structured import KINDS

FORMS = 200
MAX_SECONDS = 20.0  # of any wait: other tests run at the same time; ``bench`` has the real bounds
MAX_GROWTH_MIB = 300


def test_the_forms_are_of_all_kinds_and_no_two_are_the_same() -> None:
    forms = hostile_forms(FORMS)
    assert len({json.dumps(form.value) for form in forms}) == FORMS
    assert {form.kind for form in forms} == {*KINDS, "whitespace_pattern"} - {"json_object"}
    requests = [body_of(form, number) for number, form in enumerate(forms)]
    assert {path for path, _ in requests} == {CHAT, COMPLETION, MESSAGE, RESPONSE}
    assert all(len(json.dumps(body)) < 1 << 20 for _, body in requests)


@pytest.mark.nightly
def test_hostile_forms_disturb_no_chat() -> None:
    options = argparse.Namespace(forms=FORMS, chats=8, at_once=2)
    with ServerProcess("--tool-call-parser=hermes") as server:
        report = asyncio.run(measure(server.url, server.pid, options))
    assert report["statuses"] == {400: FORMS}, report["forms"]
    waits = [*report["longest_wait_of_each_chat"], report["longest_answer_seconds"]]
    assert max(waits) < MAX_SECONDS and report["engine_growth_mib"] < MAX_GROWTH_MIB
