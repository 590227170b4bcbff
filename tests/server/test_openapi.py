"""The OpenAPI document: complete, valid, and as strict as the parser."""

import json
import re
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from jaxinfer.server.api.parse import parse
from jaxinfer.server.document.descriptions import REQUEST_FIELDS, RESPONSE_FIELDS, description_of
from jaxinfer.server.document.openapi import ERRORS, openapi_document
from jaxinfer.server.http.errors import ERROR_TYPES, ApiError
from jaxinfer.server.openai import responses
from jaxinfer.server.routes.app import ROUTES
from kit.request_bodies import fit_beams, least_body, may_contradict, without_field

VOCABULARY = 100
OPERATIONS = {route.key: route for route in ROUTES if route.name}
DOCUMENT = openapi_document(ROUTES, secured=True, models=("m", "n"), vocab_size=VOCABULARY)
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUESTS = {one.request.__name__: one.request for one in OPERATIONS.values() if one.request}
INNER = {kind.__name__: kind for one in REQUESTS.values() for kind in one.nested.values()}
REQUESTS |= INNER
DESCRIBED = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def resolved(schema):
    """A self-contained schema."""
    return {**schema, "components": {"schemas": SCHEMAS}}


def accepts(name, body) -> bool:
    return jsonschema_rs.validator_for(resolved(SCHEMAS[name])).is_valid(body)


def test_every_route_but_those_for_owners_is_described():
    for route in ROUTES:
        assert bool(route.name and route.summary) != route.is_admin, (
            f"{route.method} {route.path} needs a name and a summary in its Route"
        )
    assert len({route.key for route in ROUTES}) == len(ROUTES)
    assert set(OPERATIONS) == set(DESCRIBED)


@pytest.mark.parametrize(("method", "path"), [(one.method, one.path) for one in ROUTES])
def test_every_route_is_in_the_documentation(method, path):
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    shown = path.replace(":path}", "}").replace("{response_id}", "{id}")
    assert re.search(rf"[` ]{re.escape(shown)}`", text), (
        f"{method} {path} is not in the table of routes of docs/server.md; add it as `{shown}`"
    )


@pytest.mark.parametrize("is_request", [True, False])
def test_a_field_without_a_description_is_named_with_the_remedy(is_request):
    table = "REQUEST" if is_request else "RESPONSE"
    words = f"'new_id' of Listed has no description; add one to {table}_FIELDS in .*descriptions"
    with pytest.raises(LookupError, match=words):
        description_of("Listed", "new_id", is_request=is_request)


def test_document_is_valid():
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    for name in SCHEMAS:
        schema = resolved({"$ref": f"#/components/schemas/{name}"})
        jsonschema_rs.meta.validate(schema)
        jsonschema_rs.validator_for(schema)  # every $ref has a target
    json.dumps(DOCUMENT, allow_nan=False)


def test_every_field_is_described():
    for name, kind in REQUESTS.items():
        assert set(SCHEMAS[name]["properties"]) == {
            *kind.__struct_fields__,
            *kind.unsupported,
            *kind.ignored,
        }
    for name, schema in SCHEMAS.items():
        for field, described in schema.get("properties", {}).items():
            assert described.get("description"), (name, field)


def test_no_description_without_a_field():
    fields = {name: set(schema.get("properties", ())) for name, schema in SCHEMAS.items()}
    assert set(RESPONSE_FIELDS) <= set.union(*fields.values())
    qualified = {f"{name}.{field}" for name in fields for field in fields[name]}
    assert set(REQUEST_FIELDS) <= qualified.union(*(fields[name] for name in REQUESTS))


def test_errors_are_described():
    assert set(ERRORS) >= set(ERROR_TYPES)
    for (_, path), operation in DESCRIBED.items():
        statuses = set(operation["responses"]) - {"200"}
        assert {"405", "500", "503"} <= statuses
        if "requestBody" in operation:
            assert {"400", "401", "404", "408", "413", "415"} <= statuses
            streams = "text/event-stream" in operation["responses"]["200"]["content"]
            assert ("429" in statuses) == (streams or 429 in OPERATIONS["POST", path].errors)
        assert ("401" in statuses) == (path not in ("/health", "/ping", "/ready"))
        keys = [{"apiKey": []}, {"anthropicKey": []}]
        assert operation["security"] == (keys if "401" in statuses else [])


def test_without_a_key_nothing_is_secured():
    document = openapi_document(ROUTES)
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert all(one["security"] == [] for one in operations)


def test_error_bodies_fit():
    for status in ERRORS:
        body = json.loads(ApiError(status, "no", param="x").body)
        assert accepts("ErrorBody", body)


def test_answers_fit():
    choice = responses.ChatChoice(
        index=0,
        message=responses.ChatMessage(role="assistant", content="a"),
        finish_reason=responses.ChatFinishReason.STOP,
        token_ids=[1],
    )
    answer = responses.ChatCompletion(
        id="x",
        created=1,
        model="m",
        system_fingerprint="f",
        choices=[choice],
        usage=responses.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
        prompt_logprobs=[None, {}],
    )
    sent = json.loads(responses.encode(answer))
    assert accepts("ChatCompletion", sent)
    assert not accepts("ChatCompletion", {**sent, "object": "chat"})
    del sent["usage"]
    assert not accepts("ChatCompletion", sent)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("CompletionRequest", {}),
        ("CompletionRequest", {"prompt": None}),
        ("CompletionRequest", {"prompt": []}),
        ("CompletionRequest", {"prompt": ["a", 1]}),
        ("CompletionRequest", {"prompt": [1, 2.5]}),
        ("CompletionRequest", {"prompt": [[]]}),
        ("CompletionRequest", {"prompt": "a", "n": 0}),
        ("CompletionRequest", {"prompt": "a", "temperature": -1}),
        ("CompletionRequest", {"prompt": "a", "top_p": 0}),
        ("CompletionRequest", {"prompt": "a", "stop": ["a"] * 65}),
        ("CompletionRequest", {"prompt": "a", "stop": [""]}),
        ("CompletionRequest", {"prompt": "a", "logit_bias": {"a": 1}}),
        ("CompletionRequest", {"prompt": "a", "request_id": "a b"}),
        ("CompletionRequest", {"prompt": "a", "guided_choice": []}),
        ("CompletionRequest", {"prompt": "a", "response_format": {"json_schema": {}}}),
        ("ChatCompletionRequest", {"messages": []}),
        ("ChatCompletionRequest", {"messages": [1]}),
        ("ChatCompletionRequest", {"messages": [{"role": "u", "content": "a"}], "tools": [{}]}),
        ("GenerateRequest", {"prompt": ["a"]}),
        ("DetokenizeRequest", {"tokens": [-1]}),
    ],
)
def test_document_and_parser_refuse_the_same(name, body):
    assert not accepts(name, body)
    with pytest.raises(ApiError):
        parse(json.dumps(body).encode(), REQUESTS[name])


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_vocabulary_bounds_token_ids(field):
    body = {"prompt": "a", field: [VOCABULARY - 1]}
    assert accepts("CompletionRequest", body)
    assert not accepts("CompletionRequest", {**body, field: [VOCABULARY]})


def test_models_are_named():
    assert accepts("CompletionRequest", {"prompt": "a", "model": "n"})
    assert not accepts("CompletionRequest", {"prompt": "a", "model": "other"})


@pytest.mark.parametrize(("method", "path"), [key for key in OPERATIONS if OPERATIONS[key].request])
def test_parser_accepts_requests_that_the_document_allows(method, path):
    """Requests that schemathesis generates are refused only for fields that contradict, and each
    is accepted without them.
    """
    kind = OPERATIONS[method, path].request
    least = least_body(kind)
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case):
        fit_beams(case.body)
        body = case.body
        while (error := refused(body, kind)) is not None:
            assert may_contradict(error.param or ""), (error.message, body)
            body = without_field(body, error.param or "", least)

    check()


def refused(body, kind) -> ApiError | None:
    """The error of a body, None if it is accepted."""
    try:
        parse(msgspec.json.encode(body), kind)
    except ApiError as error:
        return error
    return None
