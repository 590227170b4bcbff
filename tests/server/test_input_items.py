"""``GET /v1/responses/{id}/input_items`` with the official ``openai`` client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseItemList

from kit.agent_bodies import PATCH, Codex
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

KEYS = ("first", "second")
HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Serving, ScriptedDevice]]:
    engine, device = scripted_engine("qwen3")
    with serving(engine, api_key=KEYS) as server:
        yield server, device
        server.wait_until_idle()


@pytest.fixture
def client(served: tuple[Serving, ScriptedDevice]) -> Iterator[OpenAI]:
    served[1].speak("Hello")
    with OpenAI(base_url=f"{served[0].url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


def make(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "scripted", "input": "Hi", **fields})


def listed(client: OpenAI, response_id: str, **query: Any) -> list[Any]:
    """All items, oldest first, with all pages."""
    items = client.responses.input_items.list(response_id, order="asc", **query)
    return [item.to_dict() for item in items]


def test_text_and_earlier_turns(client: OpenAI) -> None:
    """Text is a message of the user; the items of earlier turns come first, answers too."""
    first = make(client, input="Hi")
    (item,) = listed(client, first.id)
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    second = make(
        client, input=[{"role": "user", "content": "Why?"}], previous_response_id=first.id
    )
    items = listed(client, second.id)
    assert [one["role"] for one in items] == ["user", "assistant", "user"]
    assert items[0] == item and items[1] == first.output[0].to_dict()
    assert items[2]["content"] == [{"type": "input_text", "text": "Why?"}]


def test_items_of_every_kind(client: OpenAI) -> None:
    """They keep their own ids, and get one where they have none, which does not change."""
    session = Codex("scripted")
    common = {"call_id": "1", "name": "apply_patch", "input": PATCH}
    session.input += [
        {"type": "reasoning", "id": "rs_own", "summary": [], "content": None},
        {"type": "custom_tool_call", **common},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
        {"type": "function_call", "call_id": "2", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "ok"},
        {"role": "assistant", "content": "Done."},
    ]
    made = make(client, input=session.input)
    page = client.responses.input_items.list(made.id, limit=100, order="asc")
    ResponseItemList.model_validate(page.to_dict())
    items = [item.to_dict() for item in page]
    assert [one["type"] for one in items[3:]] == [
        one.get("type", "message") for one in session.input[3:]
    ]
    ids = [one["id"] for one in items]
    assert ids[3] == "rs_own" and len({*ids}) == len(ids)
    assert items[-1]["content"][0] == {"type": "output_text", "text": "Done.", "annotations": []}
    assert [one["id"] for one in listed(client, made.id)] == ids


def test_pages(client: OpenAI) -> None:
    made = make(client, input=[{"role": "user", "content": str(n)} for n in range(45)])
    list_items = client.responses.input_items.list
    page = list_items(made.id, include=["message.output_text.logprobs"])
    texts = [item.content[0].text for item in page.data]  # type: ignore[union-attr]
    assert texts == [str(n) for n in range(44, 24, -1)]  # 20, the last first
    answer = page.to_dict()
    assert (answer["object"], answer["has_more"]) == ("list", True)
    assert (answer["first_id"], answer["last_id"]) == (page.data[0].id, page.data[-1].id)
    assert len(list(list_items(made.id))) == 45
    assert [one["content"][0]["text"] for one in listed(client, made.id, limit=7)] == [
        str(n) for n in range(45)
    ]
    last = list_items(made.id, after=listed(client, made.id)[-1]["id"], order="asc").to_dict()
    assert last == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 50}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_unknown"}, "after"),
    ],
    ids=str,
)
def test_wrong_queries_are_named(client: OpenAI, query: Any, param: str) -> None:
    made = make(client)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(made.id, extra_query=query)
    assert caught.value.param == param and param in caught.value.message


def test_items_belong_to_a_key(client: OpenAI, served: tuple[Serving, ScriptedDevice]) -> None:
    made, unstored = make(client), make(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key=KEYS[1]).responses.input_items.list(made.id)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="none").responses.input_items.list(made.id)
    for missing in (unstored.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.input_items.list(missing)
        assert caught.value.code == "response_not_found"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


def test_a_background_response_lists_them_at_once(
    client: OpenAI, served: tuple[Serving, ScriptedDevice]
) -> None:
    device = served[1]
    before = make(client)
    with device.held(after=3) as released:
        made = make(client, background=True, previous_response_id=before.id)
        items = listed(client, made.id)
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key=KEYS[1]).responses.input_items.list(made.id)
        released.set()
    assert [one["role"] for one in items] == ["user", "assistant", "user"]
    while client.responses.retrieve(made.id).status in ("queued", "in_progress"):
        pass
    assert listed(client, made.id) == items
