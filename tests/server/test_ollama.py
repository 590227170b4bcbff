"""Ollama's API over HTTP, with the official ``ollama`` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import httpx
import ollama
import pytest
from ollama import Client

from jaxinfer.server.ollama.chat import chat_messages
from jaxinfer.server.ollama.inputs import CalledInput, CallInput, MessageInput, Options
from kit.answer_texts import MESSAGES, WRITERS
from kit.api_calls import error_of
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "parameters": NOTHING}},
    {"type": "function", "function": {"name": "save", "parameters": {"type": "object"}}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]
CALLS = WRITERS["hermes"](MESSAGES["two calls"])
THOUGHTS = WRITERS["hermes"](MESSAGES["thoughts"])
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice
    client: Client

    def chat(self, text: str, **fields: Any) -> Any:
        """The whole answer of a model that answers with this text, or the parts of a stream."""
        self.device.speak(text)
        given = {"model": "scripted", "messages": QUESTION, **fields}
        return self.client.chat(**given)

    def generate(self, text: str, prompt: str = "Hi", **fields: Any) -> Any:
        """The same of ``/api/generate``."""
        self.device.speak(text)
        return self.client.generate(model="scripted", prompt=prompt, **fields)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """The bare response to these fields."""
        with self.server.client(headers={"Authorization": "Bearer secret"}) as client:
            return client.post(path, json={"model": "scripted", **fields})


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine, api_key=("secret",)) as server:
        with Client(host=server.url, headers={"Authorization": "Bearer secret"}) as client:
            yield Scripted(server, device, client)
        server.wait_until_idle()


def said(*answers: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """The thoughts, the text and the calls of answers, joined."""
    messages = [one.message for one in answers]
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    return (
        "".join(message.thinking or "" for message in messages),
        "".join(message.content or "" for message in messages),
        [(call.name, dict(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize("name", MESSAGES)
def test_whole_and_streamed_answers(scripted: Scripted, name: str) -> None:
    """A stream adds up to the whole answer, in whole calls."""
    wanted = MESSAGES[name]
    text = WRITERS["hermes"](wanted)
    whole = scripted.chat(text, tools=TOOLS)
    calls = [(name, dict(arguments)) for name, arguments in wanted.calls]
    assert said(whole) == (wanted.reasoning or "", wanted.content or "", calls)
    parts = list(scripted.chat(text, tools=TOOLS, stream=True))
    assert said(*parts) == said(whole)
    assert [one.done for one in parts] == [False] * (len(parts) - 1) + [True]
    for end in (whole, parts[-1]):
        assert (end.done, end.done_reason, end.model) == (True, "stop", "scripted")
        assert end.eval_count == len(text.encode()) + 1 and end.prompt_eval_count > 10
        assert end.load_duration == 0 < end.prompt_eval_duration
        assert sum(end[one] for one in DURATIONS[1:]) <= end.total_duration < 60e9
        assert datetime.fromisoformat(end.created_at).tzinfo is not None
    assert all(one.total_duration is None and one.done_reason is None for one in parts[:-1])


def test_the_bytes_of_a_stream(scripted: Scripted) -> None:
    """Objects, one a line, unless the request says otherwise."""
    scripted.device.speak("Hello")
    answer = scripted.post("/api/chat", messages=QUESTION)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, last = answer.text.split("\n")
    assert last == ""
    *parts, end = map(json.loads, lines)
    assert {*parts[0]} == {"model", "created_at", "message", "done"}
    assert parts[0]["message"].keys() == {"role", "content"}
    assert "".join(part["message"]["content"] for part in parts) == "Hello"
    assert end["message"] == {"role": "assistant", "content": ""}
    whole = scripted.post("/api/chat", messages=QUESTION, stream=False)
    assert whole.headers["content-type"] == "application/json"
    assert whole.json().keys() == end.keys()


def test_tokens_are_sent_as_they_come(scripted: Scripted) -> None:
    wanted, thoughts = MESSAGES["thoughts"].reasoning or "", ""
    with scripted.device.held(after=len("<think>") + len(wanted) // 2) as released:
        for part in scripted.chat(THOUGHTS, stream=True):
            thoughts += part.message.thinking or ""
            released.set()  # the client has read a part before the rest was drawn
    assert thoughts == wanted


@pytest.mark.parametrize(
    ("text", "fields", "reason", "content"),
    [
        ("Hello", {}, "stop", "Hello"),
        ("", {}, "stop", ""),
        ("Hello", {"options": {"num_predict": 3}}, "length", "Hel"),
        ("Hello", {"options": {"num_predict": -1}}, "stop", "Hello"),
        ("Hello", {"options": {"stop": ["x", "ll"]}}, "stop", "He"),
        ("Hello", {"options": {"stop": "ll", "seed": -1, "repeat_penalty": 1.1}}, "stop", "He"),
        (CALLS, {"tools": TOOLS, "options": {"num_predict": 55}}, "length", ""),
    ],
)
def test_ends(scripted: Scripted, text: str, fields: Any, reason: str, content: str) -> None:
    for answers in (
        [scripted.chat(text, **fields)],
        list(scripted.chat(text, stream=True, **fields)),
    ):
        assert answers[-1].done_reason == reason
        assert said(*answers)[1] == content
    if "tools" in fields:  # a call that is cut off in its first argument
        assert said(scripted.chat(text, **fields))[2] == [("weather", {})]


def test_the_context_may_end_an_answer(scripted: Scripted) -> None:
    limit = scripted.server.engine.limits.max_model_len
    empty = scripted.chat("", messages=[{"role": "user", "content": ""}]).prompt_eval_count
    question = [{"role": "user", "content": "a" * (limit - empty - 9)}]
    fields = {"messages": question, "options": {"num_predict": 2 * limit, "num_ctx": limit}}
    answer = scripted.chat("b" * 99, **fields)
    assert (answer.done_reason, answer.eval_count) == ("length", 9)
    with pytest.raises(ollama.ResponseError, match="maximum context length") as refused:
        scripted.chat("", messages=[{"role": "user", "content": "a" * limit}])
    assert refused.value.status_code == 400


def test_forms(scripted: Scripted) -> None:
    pytest.importorskip("llguidance")
    written = '{"city": "Bern"} and so on'
    for given in ("json", CITY):
        assert json.loads(scripted.chat(written, format=given).message.content) == {"city": "Bern"}
        assert scripted.generate(written, format=given).response == '{"city": "Bern"}'
        assert scripted.generate(written, raw=True, format=given).response == '{"city": "Bern"}'
    assert scripted.chat(written, format="").message.content == written
    with pytest.raises(ollama.ResponseError, match="^format .*not"):
        scripted.chat("", format={"not": {}})


def test_thinking(scripted: Scripted) -> None:
    """think is a variable of the chat template; absent, the template decides."""
    counts = {
        think: scripted.chat("", think=think).prompt_eval_count
        for think in (None, True, False, "low")
    }
    assert counts[None] == counts[True] == counts["low"] < counts[False]  # closed thoughts
    assert scripted.generate(THOUGHTS, think=True).thinking == MESSAGES["thoughts"].reasoning
    assert scripted.generate(THOUGHTS).response == MESSAGES["thoughts"].content


def test_models_that_do_not_think() -> None:
    engine, _ = scripted_engine("qwen2.5")
    with serving(engine) as server, Client(host=server.url) as client:
        with pytest.raises(ollama.ResponseError, match="think needs a model whose thoughts"):
            client.chat("scripted", QUESTION, think=True)
        client.chat("scripted", QUESTION, think=False, options={"num_predict": 1})
        assert client.show("scripted").capabilities == ["completion", "tools"]


def test_generate_is_a_chat_unless_it_is_raw(scripted: Scripted) -> None:
    answer = scripted.generate("Hello", system="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = scripted.chat("Hello", messages=chat)
    assert (answer.response, answer.prompt_eval_count) == ("Hello", whole.prompt_eval_count)
    raw = scripted.generate(THOUGHTS, raw=True)
    assert raw.response == THOUGHTS and raw.prompt_eval_count < 5
    parts = list(scripted.generate("Hello", raw=True, stream=True))
    assert "".join(part.response for part in parts) == "Hello" and parts[-1].done_reason == "stop"


def test_logprobs(scripted: Scripted) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = scripted.chat("Hello", **fields)
    assert [one.token for one in whole.logprobs] == [*"Hello", "<|eos|>"]
    assert all(len(one.top_logprobs) == 2 for one in whole.logprobs)
    parts = list(scripted.chat("Hello", stream=True, **fields))
    assert [one for part in parts for one in part.logprobs or ()] == list(whole.logprobs)
    raw = scripted.generate("Hello", raw=True, **fields)
    assert list(raw.logprobs) == list(whole.logprobs)
    assert scripted.chat("Hello").logprobs is None


# conversations with tools


def prompt_of(scripted: Scripted, path: str, **fields: Any) -> int:
    """The number of the prompt's tokens."""
    scripted.device.speak("")
    body = scripted.post(path, **fields).json()
    return body["prompt_eval_count"] if path == "/api/chat" else body["usage"]["prompt_tokens"]


def test_a_conversation_with_tools(scripted: Scripted) -> None:
    """The client's own messages go back, whose calls have no ids."""
    answer = scripted.chat(CALLS, tools=TOOLS)
    results = [
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "12 degrees", "tool_name": "weather"},
    ]
    messages = [*QUESTION, answer.message, *results]
    final = scripted.chat("It is noon.", messages=messages, tools=TOOLS)
    assert final.message.content == "It is noon."
    arguments = [json.dumps(call.function.arguments) for call in answer.message.tool_calls]
    names = [call.function.name for call in answer.message.tool_calls]
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in zip(names, arguments, strict=True)
    ]
    chat = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "clock"},
        {"role": "tool", "content": "12 degrees", "tool_call_id": "weather"},
    ]
    same = prompt_of(scripted, "/v1/chat/completions", messages=chat, tools=TOOLS)
    assert names == ["weather", "clock"] and final.prompt_eval_count == same


def called(name: str, call_id: str | None = None) -> CallInput:
    return CallInput(function=CalledInput(name=name, arguments={}), id=call_id)


@pytest.mark.parametrize(
    ("ids", "results", "named"),
    [
        ((None, None), [{}, {}], [0, 1]),
        ((None, None), [{"tool_name": "b"}, {"tool_name": "a"}], [1, 0]),
        ((None, None), [{"tool_name": "b"}, {}], [1, 0]),
        ((None, None), [{"tool_name": "other"}, {"tool_name": "a"}], [0, 1]),
        (("x", "y"), [{"tool_call_id": "y"}, {}], [1, 0]),
    ],
)
def test_results_have_the_ids_of_their_calls(
    ids: tuple[str | None, str | None], results: list[dict[str, Any]], named: list[int]
) -> None:
    calls = (called("a", ids[0]), called("b", ids[1]))
    turn = [
        MessageInput(role="assistant", tool_calls=calls),
        *(MessageInput(role="tool", content="r", **result) for result in results),
    ]
    first, *tools = chat_messages([*turn, *turn])[: 1 + len(results)]
    made = [call["id"] for call in first["tool_calls"]]
    assert made == [given or f"call0000{n}" for n, given in enumerate(ids)]
    assert [one["tool_call_id"] for one in tools] == [made[n] for n in named]
    later = chat_messages([*turn, *turn])[1 + len(results)]["tool_calls"]
    assert None in ids or [call["id"] for call in later] == made
    assert ids != (None, None) or {call["id"] for call in later}.isdisjoint(made)


def test_options_are_fields_of_chats() -> None:
    given = Options(seed=-1, num_predict=0, repeat_penalty=1.5, stop="a", num_ctx=5, top_k=0)
    found = {name: value for name, value in given.fields.items() if value is not None}
    assert found == {"repetition_penalty": 1.5, "stop": "a", "top_k": 0}
    assert Options(seed=0, num_predict=7).fields["seed"] == 0
    assert Options(num_predict=7).fields["max_tokens"] == 7


def test_ids_of_calls_go_back(scripted: Scripted) -> None:
    """Other clients send the message as it came, and results with ids or in the order of calls."""
    scripted.device.speak(CALLS)
    message = scripted.post("/api/chat", messages=QUESTION, tools=TOOLS, stream=False).json()[
        "message"
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 2 and [call["function"]["index"] for call in message["tool_calls"]] == [
        0,
        1,
    ]
    texts = {"weather": "12 degrees", "clock": "noon"}
    prompts: set[int] = set()
    for results in (
        [
            {"tool_call_id": ids[1], "content": "noon"},
            {"tool_call_id": ids[0], "content": "12 degrees"},
        ],
        [{"content": "12 degrees"}, {"content": "noon"}],
        [{"tool_name": name, "content": texts[name]} for name in texts],
    ):
        tools = [{"role": "tool", **result} for result in results]
        messages = [*QUESTION, message, *tools]
        scripted.device.speak("")
        answer = scripted.post("/api/chat", messages=messages, tools=TOOLS, stream=False)
        prompts.add(answer.json()["prompt_eval_count"])
    assert len(prompts) == 1


def test_a_template_that_needs_ids() -> None:
    """Mistral's wants ids of nine characters, which the client does not send."""
    engine, device = scripted_engine("mistral-nemo")
    device.speak("")
    calls = [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12 degrees"},
    ]
    with serving(engine) as server, Client(host=server.url) as client:
        assert client.chat("scripted", messages, tools=TOOLS).done
        # its thoughts have marks in other templates of this format
        assert client.show("scripted").capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError, match="think needs a model"):
            client.chat("scripted", QUESTION, think=True)


# the model


def test_older_clients_name_the_model_as_name(scripted: Scripted) -> None:
    with scripted.server.client(headers={"Authorization": "Bearer secret"}) as client:
        answers = {
            name: client.post("/api/show", json={} if name is None else {"name": name})
            for name in ("scripted", "scripted:latest", "other", None)
        }
    assert [one.status_code for one in answers.values()] == [200, 200, 404, 400]
    assert answers["other"].json()["error"].startswith("the model 'other' does not exist")
    assert answers[None].json()["error"] == "model is required"


@pytest.mark.parametrize("function", [{"name": "clock"}, {"name": "clock", "arguments": None}])
def test_an_earlier_call_may_have_no_arguments(scripted: Scripted, function: Any) -> None:
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "noon", "tool_name": "clock"},
    ]
    scripted.device.speak("a")
    answer = scripted.post("/api/chat", messages=messages, tools=TOOLS, stream=False).json()
    whole = scripted.chat(
        "a",
        messages=[
            *QUESTION,
            {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
            messages[-1],
        ],
        tools=TOOLS,
    )
    assert answer["prompt_eval_count"] == whole.prompt_eval_count


def test_lists(scripted: Scripted) -> None:
    (card,) = scripted.client.list().models
    assert card.model == "scripted:latest" and card.modified_at is not None
    (running,) = scripted.client.ps().models
    assert running.name == running.model == card.model
    assert running.context_length == scripted.server.engine.limits.max_model_len
    assert running.expires_at is not None
    for hours in (-12, 14):  # clients show it in the time zone of their users
        assert running.expires_at.astimezone(timezone(timedelta(hours=hours))).year > 9990
    info = scripted.client.show(card.model)
    assert info.capabilities == ["completion", "tools", "thinking"]
    assert info.modelinfo is not None
    family = info.modelinfo["general.architecture"]
    assert info.modelinfo[f"{family}.context_length"] == running.context_length
    assert info.template is not None and "<|im_start|>" in info.template
    assert "temperature 1.0\ntop_k 0\n" in (info.parameters or "")
    assert scripted.chat("a", model=card.model).message.content == "a"
    with scripted.server.client(headers={"Authorization": "Bearer secret"}) as client:
        version = client.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # which VS Code requires
        props = client.get("/props").json()
        assert client.head("/api/tags").status_code == 200
    assert props["default_generation_settings"]["n_ctx"] == running.context_length
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["chat_template"] == info.template
    assert props["total_slots"] == scripted.server.engine.limits.max_num_seqs
    assert (props["model_alias"], props["modalities"]["vision"]) == ("scripted", False)


def test_names(scripted: Scripted) -> None:
    """Every name of a list may be sent, on all routes; a name with a tag has it already."""
    engine, device = scripted_engine("qwen3")
    device.speak("a")
    with (
        serving(engine, served_model_name=("x/coder", "ORG/NAME:Q4_K_M")) as server,
        Client(host=server.url) as client,
    ):
        names = [card.model for card in client.list().models]
        assert names == ["x/coder:latest", "ORG/NAME:Q4_K_M"]
        for name in (*names, "x/coder"):
            assert client.chat(name, QUESTION).model == "x/coder"
            assert server.post("/v1/chat/completions", model=name, messages=QUESTION).is_success
    for unknown in ("other", "scripted:7b", "scripted:latest:latest"):
        with pytest.raises(ollama.ResponseError, match="does not exist") as refused:
            scripted.client.show(unknown)
        assert refused.value.status_code == 404


def test_the_path_of_a_model_is_a_name_too() -> None:
    engine, device = scripted_engine("qwen3")
    device.speak("a")
    names: dict[str, Any] = {
        "served_model_name": ("coder",),
        "unlisted_model_name": "/x/coder.gguf",
    }
    with serving(engine, **names) as server, server.client() as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["coder"]
        assert [one["name"] for one in client.get("/api/tags").json()["models"]] == ["coder:latest"]
        for name in ("coder", "/x/coder.gguf"):
            answer = server.post("/v1/chat/completions", model=name, messages=QUESTION)
            assert answer.json()["model"] == "coder"
        assert error_of(server.post("/v1/completions", model="/x", prompt="a"), 404)


def test_a_request_without_a_text_only_loads(scripted: Scripted) -> None:
    for answer in (
        scripted.client.chat("scripted", keep_alive=0),
        scripted.client.generate("scripted", keep_alive="5m"),
        next(iter(scripted.client.generate("scripted", "", stream=True))),
    ):
        assert (answer.done, answer.done_reason) == (True, "load")


def test_what_ollamas_clients_look_for_at_the_root(scripted: Scripted) -> None:
    with scripted.server.client() as client:
        assert client.head("/").status_code == 200
        assert "Ollama is running" in client.get("/").text


# errors

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "images": ("chat", {"messages": [{**QUESTION[0], "images": ["aGk="]}]}, "read text alone"),
    "images of a prompt": ("generate", {"prompt": "a", "images": ["aGk="]}, "images is not supp"),
    "suffix": ("generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    "template": ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template is not supp"),
    "raw and system": ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system cannot be"),
    "context": ("chat", {"options": {"num_ctx": 1 << 20}}, "options.num_ctx is 1048576, and this"),
    "option": ("chat", {"options": {"top_p": 2}}, "options.top_p must be at most 1"),
    "sampler": ("chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
    "format": ("chat", {"format": "xml"}, "format must be json, a JSON schema or empty"),
    "think": ("chat", {"think": "much"}, "think must be low, medium, high or max"),
    "role": ("chat", {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role must be"),
    "arguments": (
        "chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments must be an object",
    ),
    "result": (
        "chat",
        {"messages": [{"role": "tool", "content": "a"}]},
        "tool_call_id is required",
    ),
    "tool": ("chat", {"messages": QUESTION, "tools": [{"function": {}}]}, "tools[0].function.name"),
    "logprobs": ("chat", {"messages": QUESTION, "top_logprobs": 2}, "needs logprobs=true"),
    "model": ("chat", {"model": None}, "model is required"),
}


@pytest.mark.parametrize(("path", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(scripted: Scripted, path: str, fields: dict[str, Any], message: str) -> None:
    answer = scripted.post(f"/api/{path}", **fields)
    assert message in error_of(answer, 400)["message"]
    assert isinstance(answer.json()["error"], str)


ELSEWHERE = {
    "pull": lambda client: client.pull("x"),
    "push": lambda client: client.push("x"),
    "create": lambda client: client.create("x", from_="y"),
    "copy": lambda client: client.copy("x", "y"),
    "delete": lambda client: client.delete("x"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_models_are_managed_elsewhere(scripted: Scripted, name: str) -> None:
    with pytest.raises(ollama.ResponseError, match="start another with `jaxinfer serve MODEL`"):
        answer = ELSEWHERE[name](scripted.client)
        assert answer.status == "error"  # what delete makes of an error


def test_errors_of_guards(scripted: Scripted) -> None:
    with scripted.server.client() as client:
        for path in ("/api/chat", "/api/nothing", "/api"):
            assert error_of(client.post(path), 401)["code"] == "invalid_api_key"
        assert error_of(client.get("/props"), 401)
    missing = scripted.post("/api/nothing")
    assert "/openapi.json lists the routes" in error_of(missing, 404)["message"]


def test_a_late_error_is_a_line(scripted: Scripted) -> None:
    """An answer that the server ends early fails; what was said before it stays."""
    with scripted.device.held(after=3) as released:
        stream = scripted.chat("Hello", stream=True)
        assert "Hel".startswith(next(stream).message.content)
        scripted.server.loop.call_soon_threadsafe(scripted.server.service.stop_all)
        with pytest.raises(ollama.ResponseError, match="has ended the answer before its end"):
            list(stream)
        released.set()
    scripted.server.wait_until_idle()


def test_a_client_that_leaves(scripted: Scripted) -> None:
    with scripted.device.held(after=3) as released:
        stream = scripted.chat("Hello" * 999, stream=True)
        next(stream)
        stream.close()
        released.set()
    scripted.server.wait_until_idle()


def test_prefixes_are_found_in_the_cache(scripted: Scripted) -> None:
    """Of the prompt of the same chat in OpenAI's form."""
    messages = [{"role": "user", "content": "b" * 200}]
    prompt = prompt_of(scripted, "/api/chat", messages=messages, stream=False)
    body = scripted.post("/v1/chat/completions", messages=messages).json()["usage"]
    assert body["prompt_tokens"] == prompt
    assert body["prompt_tokens_details"]["cached_tokens"] > 100
