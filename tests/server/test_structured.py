"""Structured output over HTTP: the fields of OpenAI and vLLM, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.text.grammar import forms
from kit.cpu_time import cpu_seconds
from kit.engines import EOS, tiny_engine
from kit.raw_http import RawClient
from kit.server import Serving, serving
from kit.server_process import gone, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
# The random model ends numbers and texts.
COMMON = {
    "max_tokens": 100,
    "frequency_penalty": 2.0,
    "seed": 1,
    "logit_bias": {str(EOS): 20, "125": 10},
}
PROMPT = {"prompt": [72, 105], **COMMON}
CHAT = {"messages": [{"role": "user", "content": "hi"}], **COMMON}
LIMIT = 2.0  # seconds of CPU time: other tests run at the same time


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(tiny_engine()) as running:
        yield running
        running.wait_until_idle()
        assert running.engine.stats().num_late_compiles == 0


def completion(server: Serving, **fields: Any) -> str:
    response = server.post("/v1/completions", **PROMPT, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"]


def chat(server: Serving, **fields: Any) -> str:
    response = server.post("/v1/chat/completions", **CHAT, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"},
    ],
)
def test_json_with_a_schema(server: Serving, fields: dict[str, Any]) -> None:
    for answer in (completion(server, **fields), chat(server, **fields)):
        value = json.loads(answer)
        assert value["kind"] in ("a", "b") and value["count"] <= 99 and len(value) == 2


def test_other_forms(server: Serving) -> None:
    assert json.loads(chat(server, response_format={"type": "json_object"})) is not None
    assert completion(server, guided_choice=["yes", "no"]) in ("yes", "no")
    assert completion(server, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert completion(server, guided_regex="a{3}") == "aaa"
    assert completion(server, guided_grammar='root ::= "b" "c"') == "bc"
    tag = {"format": {"type": "const_string", "value": "x y"}}
    assert completion(server, response_format={"type": "structural_tag", **tag}) == "x y"
    assert completion(server, structured_outputs={"structural_tag": tag}) == "x y"
    assert completion(server, response_format={"type": "text"}) == completion(server)


def test_streams_are_cut_whole_answers(server: Serving) -> None:
    whole = chat(server, response_format=NAMED)
    body = {**CHAT, "response_format": NAMED, "stream": True}
    with server.client() as client:
        lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole


def test_tokens_that_are_allowed_or_not(server: Serving) -> None:
    allowed = {"allowed_token_ids": [97, 98, EOS], "max_tokens": 20}
    response = server.post("/v1/completions", prompt=[1], **allowed).json()
    assert set(response["choices"][0]["text"]) <= {"a", "b"}
    response = server.post("/v1/completions", prompt=[1], **allowed, bad_words=["a"]).json()
    assert set(response["choices"][0]["text"]) <= {"b"}


def test_conditions_that_leave_no_answer_are_refused(server: Serving) -> None:
    for name, value, form in (
        ("allowed_token_ids", [5, 6], {"regex": "[a-f]{1,9}"}),
        ("bad_words", ["y"], {"choice": ["yes"]}),
        ("allowed_token_ids", list(b"noye"), {"choice": ["yes", "not"]}),
        ("bad_words", ["es"], {"choice": ["yes"]}),
    ):
        fields = {"prompt": [1], "structured_outputs": form, name: value}
        response = server.post("/v1/completions", **fields, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    cut_off = {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": list(b"ye")}
    response = server.post("/v1/completions", prompt=[1], **cut_off, max_tokens=2).json()
    assert [response["choices"][0][name] for name in ("text", "finish_reason")] == ["ye", "length"]


LATE = {"structured_outputs": {"regex": "[a-z]{2,9}-"}, "allowed_token_ids": list(range(97, 123))}


def test_a_dead_end_is_an_error_of_the_request(server: Serving) -> None:
    """Too many beginnings lead there for it to be shown before."""
    ordinary = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "seed": 3}
    before = server.post("/v1/completions", **ordinary).json()["choices"]
    with ThreadPoolExecutor() as threads:
        other = threads.submit(server.post, "/v1/completions", **ordinary)
        for path, prompt in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            response = server.post(path, **prompt, **LATE)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "allowed_token_ids")
            stream = server.post(path, **prompt, **LATE, stream=True).text
            *events, last, done = stream.removesuffix("\n\n").split("\n\n")
            assert events and done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["error"] == error
        assert other.result().json()["choices"] == before


PATTERNS = ("[a-d]{2,9}-", "(ab|cd)*x?", "a+b+c+", "yes|no|abcd", "[a-z]{3}[0-9]?")
LETTERS = st.text("abcdnoxyes-", min_size=1, max_size=12)


@pytest.mark.nightly
@given(st.sampled_from(PATTERNS), st.none() | LETTERS, st.lists(LETTERS.map(lambda s: s[:2])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_conditions_within_a_form(
    server: Serving,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    letters: str | None,
    bad_words: list[str],
) -> None:
    """The answer follows all of them, or the request is refused."""
    conditions = {"allowed_token_ids": list(letters.encode())} if letters else {}
    fields = {**PROMPT, "guided_regex": pattern, "bad_words": bad_words, **conditions}
    response = server.post("/v1/completions", **fields)
    if response.status_code == 200:
        (choice,) = response.json()["choices"]
        text = choice["text"]
        # what may go on may do so until it is cut off
        assert re.fullmatch(pattern, text) or choice["finish_reason"] == "length", text
        assert letters is None or set(text) <= set(letters)
        assert not any(word in text for word in bad_words), text
    else:
        param = "allowed_token_ids" if letters else "bad_words"
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR], caplog.text


def test_a_complete_answer_that_cannot_go_on_ends(server: Serving) -> None:
    assert completion(server, guided_regex="a{3}", allowed_token_ids=[97]) == "aaa"
    biased = {**PROMPT, "logit_bias": {"98": -100}, "guided_regex": "ab+"}  # no token is impossible
    answer = server.post("/v1/completions", **biased).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("ab", "stop")


def test_logprobs_of_named_tokens(server: Serving) -> None:
    body = {"prompt": [1], "max_tokens": 2, "logprob_token_ids": [98]}
    answer = server.post("/v1/completions", **body, logprobs=1).json()
    assert all("b" in one for one in answer["choices"][0]["logprobs"]["top_logprobs"])
    body = {"messages": CHAT["messages"], "max_tokens": 2, "logprob_token_ids": [98]}
    answer = server.post("/v1/chat/completions", **body, logprobs=True).json()
    for one in answer["choices"][0]["logprobs"]["content"]:
        assert [other["token"] for other in one["top_logprobs"]] == ["b"]
    refused = server.post("/v1/chat/completions", **body)
    assert refused.json()["error"]["param"] == "logprob_token_ids"


MULTIPLES = [{"type": "integer", "multipleOf": n} for n in (3, 5, 7, 11, 13, 17, 19, 23)]
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
# it allows any number of a up to 9 ** 8
EXPLODING = "(" * 8 + "a" + "{0,9})" * 8
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "endless": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": ENDLESS}}},
        "response_format.json_schema.schema",
    ),
    "contradictory": (
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}},
        "guided_json",
    ),
    "300 KB": (
        {"structured_outputs": {"json": {"const": "x" * 300_000}}},
        "structured_outputs.json",
    ),
    "long regex": ({"guided_regex": "x" * 300_000}, "guided_regex"),
    "exploding regex": ({"structured_outputs": {"regex": EXPLODING}}, "structured_outputs.regex"),
    "hours": ({"structured_outputs": {"json": {"allOf": MULTIPLES}}}, "structured_outputs.json"),
    "undefined rule": (
        {"structured_outputs": {"grammar": "start: foo"}},
        "structured_outputs.grammar",
    ),
    "undefined GBNF rule": ({"guided_grammar": "root ::= foo"}, "guided_grammar"),
    "unsupported keyword": ({"guided_json": {"not": {}}}, "guided_json"),
    "two forms": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "unknown kind": ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no type": ({"response_format": {}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    **{
        f"schema {case}": (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **schema}}},
            "response_format.json_schema.schema",
        )
        for case, schema in (("absent", {}), ("null", {"schema": None}))
    },
    "empty tag": ({"response_format": {"type": "structural_tag"}}, "response_format"),
    "wrong choice": ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    "ids beyond the vocabulary": ({"allowed_token_ids": [320]}, "allowed_token_ids"),
    "no ids": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "empty word": ({"bad_words": [""]}, "bad_words[0]"),
}


def chain(size: int) -> dict[str, Any]:
    """A schema of references, each of which leads to the next."""
    parts = {str(number): {"items": {"$ref": f"#/{number + 1}"}} for number in range(size)}
    return {"$ref": "#/0", **parts, str(size): {"type": "null"}}


def test_a_long_chain_of_references_is_refused_in_each_api(server: Serving) -> None:
    schema, text = chain(1099), {"role": "user", "content": "hi"}
    named = {"type": "json_schema", "name": "n", "schema": schema}
    limited = {"messages": [text], "max_tokens": 8}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**limited, "response_format": {**named, "json_schema": named}}),
        ("/v1/completions", {"prompt": [1], "guided_json": schema}),
        ("/v1/responses", {"input": "hi", "text": {"format": named}}),
        ("/v1/messages", {**limited, "output_config": {"format": named}}),
    ]
    for path, body in requests:
        response = server.post(path, **body)
        assert response.status_code == 400, (path, response.text)
        assert "2200 schemas deep, counted through its references" in response.text
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(9000))
    grammar = f'start: r0\n{rules}\nr9000: "b"'
    response = server.post("/v1/completions", prompt=[1], guided_grammar=grammar)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")
    assert completion(server, guided_regex="ab") == "ab"


def test_a_client_that_leaves_frees_its_trial(server: Serving) -> None:
    waiting = server.engine.constraints._forms._forms
    fields = {**PROMPT, "guided_json": {"allOf": MULTIPLES, "title": "left"}}
    with RawClient(server.port) as client:
        client.post("/v1/completions", **fields)
        wait_until(lambda: any(form.trial is not None for form in waiting.values()), "it is sent")
        pid = server.engine.constraints.trial_pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_until(lambda: bool(children.read_text()), "its process is forked")
        (trial,) = children.read_text().split()
        os.kill(int(trial), signal.SIGSTOP)  # it does not end by itself
    wait_until(lambda: not waiting and gone(int(trial)), "it has ended")
    assert completion(server, guided_regex="a|b") in ("a", "b")


def test_too_many_forms_are_refused_until_later(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS_OF_CLIENT", 0)
    fields = {**PROMPT, "guided_regex": "[xy]z"}
    for stream in (False, True):
        response = server.post("/v1/completions", **fields, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "queue_full")
        assert error["type"] == "rate_limit_error" and int(response.headers["retry-after"]) > 0
    metrics = server.service.loaded.metrics.render()[1].decode()
    assert 'admission_rejections_total{model_name="tiny-llama",reason="structured_outputs"} 2' in (
        metrics.replace('engine="0",', "")
    )
    monkeypatch.undo()
    assert completion(server, guided_regex="[xy]z") in ("xz", "yz")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_fields_are_named_and_disturb_no_one(server: Serving, stream: bool) -> None:
    ordinary = {"prompt": [5, 6], "max_tokens": 120, "ignore_eos": True, "seed": 3}
    before = server.post("/v1/completions", **ordinary).json()["choices"]
    completion(server, guided_regex="a")  # the table of the vocabulary is made
    for name, (fields, param) in BAD.items():
        begin = cpu_seconds()
        response = server.post("/v1/completions", **PROMPT, **fields, stream=stream)
        seconds = cpu_seconds() - begin
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        assert error["param"] == param, (name, error)
        assert error["message"].startswith(param.partition("[")[0]), (name, error)
        assert seconds < LIMIT, (name, seconds)
    assert server.post("/v1/completions", **ordinary).json()["choices"] == before
