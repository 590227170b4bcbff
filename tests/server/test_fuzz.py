"""Random requests generated from the server's own OpenAPI document.

No response may be 5xx or end in such an error, every response must be one that the document
describes, and each request that the document allows must be accepted, at the latest without the
fields that contradict others or do not fit the model. Afterwards no request or page is left, and
the next request is answered as before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jaxinfer.server.routes.app import ROUTES
from kit.engines import tiny_engine, tiny_limits
from kit.request_bodies import FORMS, fit_beams, least_body, may_contradict, without_field
from kit.server import SECONDS, Serving, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# paths of a model for embeddings; /score and others have the handlers of these paths
POOLED = ("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank", "/api/embed")
SAME = ("/score", "/rerank", "/v2/rerank", "/api/embeddings")
OPERATIONS = {route.key: route for route in ROUTES if route.name}
PATHS = {
    path: method for method, path in OPERATIONS if method in ("GET", "POST") and path not in SAME
}
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
WITH_BODY = [path for path, method in PATHS.items() if method == "POST" and "{" not in path]
# 8 valid and 8 invalid requests for each path with a body, fewer for those that are alike, and 3
# for the others: 259 in all; 9,065 at night
FEWER = {"/v1/messages": 6, "/v1/messages/count_tokens": 4, **dict.fromkeys(POOLED, 4)}
FEWER |= {"/api/chat": 6, "/api/generate": 4, "/api/show": 3}
CASES = [
    *((path, mode, FEWER.get(path, 8)) for path in WITH_BODY for mode in GenerationMode),
    *((path, POSITIVE, 3) for path in PATHS if path not in WITH_BODY),
]
NAMES = [f"{path[1:]}-{mode.value}" for path, mode, _ in CASES]
# texts, histories and tools, which the tokenizer, the template and the engine may refuse, too
OF_THE_MODEL = re.compile(
    r"(prompt|messages|input|instructions|tools|tool_choice|chat_template|chat_template_kwargs"
    r"|logit_bias|allowed_token_ids|stop_token_ids|system|options|tokens|token_ids|query|queries|documents|text_1|text_2|dimensions)([.\[].*)?"
)
MOST_COMPLETIONS = 4  # of a fuzzed request: thousands would be accepted
VALID_FORMS = (
    {"json_object": True},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "[a-f]{1,9}"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a" | "b" start'},
)
ORDINARY = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(
        tiny_engine(),
        request_timeout=SECONDS / 2,
        trust_request_chat_template=True,
        tool_call_parser="hermes",
    ) as running:
        before = running.post("/v1/completions", **ORDINARY).json()["choices"]
        yield running
        running.wait_until_idle()
        assert running.post("/v1/completions", **ORDINARY).json()["choices"] == before
        assert running.engine.stats().num_late_compiles == 0


@pytest.fixture(scope="module")
def embedder() -> Iterator[Serving]:
    with serving(tiny_engine(tiny_limits(pooling="last")), request_timeout=SECONDS / 2) as running:
        yield running
        running.wait_until_idle()
        assert running.engine.stats().num_late_compiles == 0


@pytest.fixture
def fuzzed(request: pytest.FixtureRequest, path: str) -> Serving:
    """The server whose model fits a path."""
    return request.getfixturevalue("embedder" if path in POOLED else "server")


@pytest.mark.parametrize(("path", "mode", "count"), CASES, ids=NAMES)
def test_no_request_breaks_the_server(
    fuzzed: Serving,
    path: str,
    mode: GenerationMode,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fuzz(fuzzed, path, mode, settings(max_examples=count, derandomize=True), caplog)


@pytest.mark.nightly
@pytest.mark.parametrize(("path", "mode", "count"), CASES, ids=NAMES)
def test_no_request_of_thousands_breaks_the_server(
    fuzzed: Serving,
    path: str,
    mode: GenerationMode,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fuzz(fuzzed, path, mode, settings(max_examples=35 * count, derandomize=False), caplog)


def fuzz(
    server: Serving,
    path: str,
    mode: GenerationMode,
    how: settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Send cases and check each response."""
    with server.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    request = OPERATIONS[PATHS[path], path].request
    least = {} if request is None else least_body(request)

    @given(case=schema[path][PATHS[path]].as_strategy(generation_mode=mode))
    @settings(how, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def send(case: Case) -> None:
        if not has_wrong_body(case) and isinstance(case.body, dict):
            (reconcile_pooled if path in POOLED else reconcile)(case.body)
            if path.startswith("/v1/messages"):
                reconcile_turns(case.body)
        response = case.call(base_url=server.url, session=session, timeout=SECONDS)
        while mode is POSITIVE and path in WITH_BODY and response.status_code == 400:
            case.validate_response(response, checks=CHECKS)
            case.body = without_refused(case.body, response.json(), least)
            response = case.call(base_url=server.url, session=session, timeout=SECONDS)
        # schemathesis does not count 413, of a body that is too large, among refusals
        refusable = has_wrong_body(case) and response.status_code != 413
        checks = [*CHECKS, negative_data_rejection] if refusable else CHECKS
        case.validate_response(response, checks=checks)
        if mode is POSITIVE and path in WITH_BODY:
            assert response.status_code == 200, (response.text, case.body)
        # the error of a stream or of a background response has status 200, and is logged
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR], caplog.text

    with requests.Session() as session:
        session.trust_env = False  # no proxy of the environment
        send()


def without_refused(
    body: dict[str, Any], refusal: dict[str, Any], least: dict[str, Any]
) -> dict[str, Any]:
    """The body without the field that a refusal names; fails if the field may not be refused."""
    error = refusal["error"]  # a text in ollama's form; in Anthropic's without a ``param``
    message = error if isinstance(error, str) else error["message"]
    if message.startswith("This model's maximum context length"):
        return least | ({"model": body["model"]} if "model" in body else {})
    param = refusal.get("param") or (not isinstance(error, str) and error.get("param"))
    param = param or re.split(r"[^][a-z_.0-9]", message, maxsplit=1)[0]
    assert may_contradict(param) or OF_THE_MODEL.fullmatch(param), (param, message, body)
    return without_field(body, param, least)


def has_wrong_body(case: Case) -> bool:
    """True if the body violates the schema; the server replaces an invalid header."""
    assert case.meta is not None
    parts = {part.value: info.mode for part, info in case.meta.components.items()}
    return parts.get("body") is NEGATIVE


def reconcile(body: dict[str, Any]) -> None:
    """Remove fields that only contradict another one, so that the engine has work."""
    if body.get("prompt") is not None or body.get("messages"):
        fit(body)
    fit_beams(body)
    if not body.get("stream"):
        body.pop("stream_options", None)
    else:
        body.pop("prompt_logprobs", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
        body.pop("logprob_token_ids", None)
    n = body.get("n")  # any value, on a path whose schema does not have it
    if isinstance(n, int) and n > MOST_COMPLETIONS:
        body["n"] = MOST_COMPLETIONS
    if [name for name in FORMS if body.pop(name, None) is not None]:
        # random ones are hardly ever schemas or grammars, and only one may be set
        body["structured_outputs"] = VALID_FORMS[len(str(body)) % len(VALID_FORMS)]
    if body.get("best_of") not in (None, body.get("n", 1)):
        body.pop("best_of")
    if isinstance(body.get("timeout"), int | float):  # else 408 is the right answer
        body["timeout"] = max(body["timeout"], SECONDS)
    if body.get("max_tokens") == 0:
        body["echo"] = True
    if body.get("continue_final_message"):
        body["add_generation_prompt"] = False
        body.pop("chat_template", None)  # of random text, without the message
    for name in ("min_tokens", "taps", "steer"):  # the engine has no points to read
        body.pop(name, None)
    if "input" in body:
        reconcile_items(body)


def reconcile_turns(body: dict[str, Any]) -> None:
    """The same for ``/v1/messages``, whose prompts are not cut to fit the context."""
    body.pop("tool_choice", None)
    last = {"role": "user", "content": "x"}  # earlier calls do not end the conversation
    body["messages"] = [*body["messages"][:1], last]
    body["tools"] = (body.get("tools") or [])[:1]
    if body.get("thinking"):
        body["thinking"]["budget_tokens"] = 1


def reconcile_items(body: dict[str, Any]) -> None:
    """The same for ``/v1/responses``."""
    for name in (
        "previous_response_id",
        "text",
        "tool_choice",
        "top_logprobs",
        "logprob_token_ids",
    ):
        body.pop(name, None)
    body |= {"store": True, "truncation": "auto"}
    if body.get("max_output_tokens"):
        body["max_output_tokens"] = min(body["max_output_tokens"], 8)
    for item in body["input"] if isinstance(body["input"], list) else ():
        if "arguments" in item:
            item["arguments"] = "{}"


def reconcile_pooled(body: dict[str, Any]) -> None:
    """The same for embeddings and scores; the tiny tokenizer adds no token to an empty text."""
    for name in ("input", "text_1", "text_2", "queries", "documents", "query"):
        given = body.get(name)
        if given is not None:
            body["truncate_prompt_tokens"] = -1
        if isinstance(given, list):
            body[name] = [with_text(item) for item in given]
        elif given == "":
            body[name] = "x"
    for name in ("text_1", "queries"):  # of as many documents as there are
        if isinstance(given := body.get(name), list):
            body[name] = given[:1]
    if body.get("dimensions"):
        body["dimensions"] = min(body["dimensions"], 32)
    if isinstance(body.get("timeout"), int | float):
        body["timeout"] = max(body["timeout"], SECONDS)


def with_text(item: Any) -> Any:
    """A text, or a document, that is not empty."""
    if isinstance(item, dict):
        return {**item, "text": item.get("text") or "x"}
    return item if item != "" else "x"


def fit(body: dict[str, Any]) -> None:
    """Make prompts neither empty nor too long."""
    prompt = body.get("prompt")
    if prompt == "":
        body["prompt"] = "x"
    elif isinstance(prompt, list):
        body["prompt"] = [item if item != "" else "x" for item in prompt]
    body["truncate_prompt_tokens"] = -1
