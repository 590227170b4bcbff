"""The parts of ``jaxinfer chat``: entries, messages, what is shown, and answers of both kinds."""

import io
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.cli.chat.conversation import Answer, Conversation
from jaxinfer.cli.chat.events import CallPart, End, Event, Said, Thought, Usage, read_events
from jaxinfer.cli.chat.local import local_answerer
from jaxinfer.cli.chat.reader import Entry, Reader
from jaxinfer.cli.chat.remote import RemoteAnswerer
from jaxinfer.cli.chat.screen import Screen
from jaxinfer.core.chat_config import ChatConfig, ServerAddress, server_address
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    JaxinferError,
    RequestError,
)
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.thread import EngineThread
from kit.chat_server import DONE, ChatServer, chat_server, ending, event, response, stream
from kit.scripted import scripted_engine
from kit.server import serving
from kit.server_process import wait_until

USER = {"role": "user", "content": "hi"}
REQUEST: dict[str, Any] = {
    "messages": [USER],
    "stream": True,
    "stream_options": {"include_usage": True},
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


# entries


def entries(text: str) -> list[Entry]:
    lines = iter(text.split("\n"))

    def line(prompt: str) -> str:
        for one in lines:
            return one
        raise EOFError

    reader = Reader(line)
    return list(iter(reader.next, None))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" hi \n\n  \nthere", [(None, "hi"), (None, "there")]),
        ('"""one\ntwo\n"""\nthree', [(None, "one\ntwo"), (None, "three")]),
        ('"""\none\n\ntwo"""', [(None, "one\n\ntwo")]),
        ('"""one"""', [(None, "one")]),
        ('"""one\ntwo', [(None, "one\ntwo")]),
        ("/save  a b.json ", [("save", "a b.json")]),
        ('/system """be\nkind"""\n/system', [("system", "be\nkind"), ("system", "")]),
        ('"""/reset\nis a command"""', [(None, "/reset\nis a command")]),
        ("/usr/bin/env is what?", [(None, "/usr/bin/env is what?")]),
        ('say """ to it', [(None, 'say """ to it')]),
    ],
)
def test_entries(text: str, found: list[tuple[str | None, str]]) -> None:
    assert entries(text) == found


# messages


def answer_of(*events: Event) -> Answer:
    answer = Answer()
    for one in events:
        answer.add(one)
    return answer


def test_an_answer_is_a_message() -> None:
    answer = answer_of(Thought("a"), Thought("b"), Said("c"), Said("d"))
    message = {"role": "assistant", "content": "cd", "reasoning_content": "ab"}
    assert answer.message(is_cut=False) == message
    assert answer.message(is_cut=True) == {**message, "cut": True}
    assert answer_of(Thought("a")).message(is_cut=True) is None


def test_only_whole_calls_are_kept() -> None:
    begun = (CallPart(0, "a", "f", ""), CallPart(0, "", "", '{"x":'), CallPart(1, "b", "g", ""))
    message = answer_of(*begun, CallPart(0, "", "", " 1}"), CallPart(1, "", "", "{")).message(
        is_cut=True
    )
    assert message is not None and message["content"] is None
    [call] = message["tool_calls"]
    assert (call["id"], call["function"]) == ("a", {"name": "f", "arguments": '{"x": 1}'})


def test_messages_after_calls_are_their_results() -> None:
    conversation = Conversation()
    calls = answer_of(CallPart(0, "a", "f", "{}"), CallPart(1, "b", "g", "{}"))
    conversation.messages = [USER, calls.message(is_cut=False) or {}]
    for name in "ab":
        asked = conversation.next_message("7")
        assert asked == {"role": "tool", "tool_call_id": name, "content": "7"}
        conversation.messages.append(asked)
    assert conversation.next_message("hi") == USER


def test_save_and_load(tmp_path: Path) -> None:
    conversation, file = Conversation("be kind"), tmp_path / "chat.json"
    said = answer_of(Thought("a"), Said("é")).message(is_cut=True)
    assert said is not None
    conversation.messages = [USER, said]
    conversation.save(file)
    assert json.loads(file.read_text())[0] == {"role": "system", "content": "be kind"}
    loaded = Conversation()
    loaded.load(file)
    assert (loaded.system, loaded.messages) == (conversation.system, conversation.messages)
    sent = loaded.to_send(USER)
    assert sent[2] == {"role": "assistant", "content": "é"} and sent[3] == USER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "must have a list of messages"),
        ("[1]", "each of them an object"),
        ('[{"role": "judge"}]', "messages[0].role must be one of system"),
        ('[{"role": "user", "tool_calls": [{"id": 1}]}]', "messages[0].tool_calls must have id"),
        (r'[{"role": "user", "content": "\ud83d"}]', "half of a surrogate pair"),
        ("[" * 5000, "is not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_conversation(tmp_path: Path, text: str | None, words: str) -> None:
    conversation, file = Conversation("kind"), tmp_path / "chat.json"
    conversation.messages = [USER]
    if text is not None:
        file.write_text(text)
    with pytest.raises(RequestError, match=re.escape(words)):
        conversation.load(file)
    assert conversation.messages == [USER] and conversation.system == "kind"
    with pytest.raises(RequestError, match="cannot be written"):
        conversation.save(tmp_path / "none" / "chat.json")


def test_a_text_or_a_path_without_bytes_is_not_saved(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text("of before")
    for system, path in (("\udcff", file), ("kind", tmp_path / "a\0b")):
        with pytest.raises(RequestError, match="cannot be written"):
            Conversation(system).save(path)
    assert file.read_text() == "of before"


def test_retry_takes_the_last_turn() -> None:
    conversation = Conversation()
    assert conversation.take_last_turn() is None
    conversation.messages = [USER, {"role": "assistant", "content": "a"}]
    assert conversation.take_last_turn() == USER and conversation.messages == []


# what is shown


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


SHOWN = (
    Thought("hm\x1b[2J"),
    Said("yes\x07"),
    CallPart(0, "a", "f", ""),
    CallPart(0, "", "", '{"x": 1}'),
    CallPart(1, "b", "g", "{}"),
    End("stop", None),
)


@pytest.mark.parametrize(
    ("kind", "colours", "text"),
    [
        (
            Tty,
            True,
            "\x1b[2mThoughts: \x1b[0m\x1b[2mhm␛[2J\x1b[0m\n\nyes␇\n"
            '\x1b[2mCall of f: \x1b[0m\x1b[2m{"x": 1}\x1b[0m\n'
            "\x1b[2mCall of g: \x1b[0m\x1b[2m{}\x1b[0m\n",
        ),
        (Tty, False, 'Thoughts: hm␛[2J\n\nyes␇\nCall of f: {"x": 1}\nCall of g: {}\n'),
        (io.StringIO, True, 'yes\x07\nCall of f: {"x": 1}\nCall of g: {}\n'),
    ],
)
def test_screen(kind: type[io.StringIO], colours: bool, text: str) -> None:
    out = kind()
    screen = Screen(out, io.StringIO(), colours=colours)
    for one in SHOWN:
        screen.show(one)
    screen.end()
    assert out.getvalue() == text


# servers


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:8000", ("http", "a", 8000, "/v1")),
        ("a:8000/", ("http", "a", 8000, "/v1")),
        ("https://a/v1/", ("https", "a", 443, "/v1")),
        ("http://[::1]:1/x/v1/chat/completions", ("http", "::1", 1, "/x/v1")),
    ],
)
def test_addresses(url: str, address: tuple[str, str, int, str]) -> None:
    assert server_address(url) == ServerAddress(*address)


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:b", "http://u:p@a", "a b", "é"]
)
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be http://HOST:PORT"):
        ChatConfig(url=url)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A server whose responses the test writes."""
    with chat_server() as server:
        yield server


def remote(server: ChatServer, key: str = "") -> RemoteAnswerer:
    address = ChatConfig(url=server.url).address
    assert address is not None
    return RemoteAnswerer(address, key)


def test_a_stream_in_pieces(server: ChatServer) -> None:
    whole = (
        b": a comment\n\n"
        + event(role="assistant", content="")
        + event(reasoning="hm")
        + event(content="é")
        + event(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f"}}])
        + event(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]).replace(b"\n", b"\r\n")
        + ending("tool_calls")
    )
    server.responses = [stream(*(whole[at : at + 7] for at in range(0, len(whole), 7)))]
    assert list(remote(server, "key").answer(REQUEST)) == [
        Thought("hm"),
        Said("é"),
        CallPart(0, "a", "f", ""),
        CallPart(0, "", "", "{}"),
        End("tool_calls", Usage(3, 2, None)),
    ]
    assert server.bodies == [{"model": "stub", **REQUEST}]
    assert "Authorization: Bearer key" in server.heads[1]


def test_fields_that_are_null_and_events_without_data(server: ChatServer) -> None:
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "prompt_tokens_details"))
    call = {"index": None, "id": "a", "function": {"name": "f", "arguments": None}}
    last = b"data: %b\n\n" % json.dumps({"choices": [{"delta": None}], "usage": usage}).encode()
    server.responses = [stream(event(tool_calls=[call]), b"data:\n\n", last, DONE)]
    found = list(remote(server).answer(REQUEST))
    assert found == [CallPart(0, "a", "f", ""), End("", Usage(0, 0, None))]


def test_a_text_without_bytes_is_not_sent(server: ChatServer) -> None:
    request = {**REQUEST, "messages": [{"role": "user", "content": "\udcff"}]}
    with pytest.raises(RequestError, match="is not UTF-8; convert it first"):
        list(remote(server).answer(request))


FULL = b'{"error": {"message": "the maximum context length is 100 tokens", "code": null}}'
FAILURES: dict[str, tuple[bytes, type[JaxinferError], str]] = {
    "key": (
        response("401 No", b'{"error": {"message": "Wrong key."}}'),
        RequestError,
        r"refuses the key \(401: Wrong key\); give its key with --api-key",
    ),
    "model": (
        response("404 No", b'{"detail": "no model x"}'),
        RequestError,
        r"does not know the model or the address \(404: no model x\); check MODEL and --url",
    ),
    "busy": (
        response("429 No", b"", more="Retry-After: 5\r\n"),
        RequestError,
        r"takes no further request now \(429\); try again in 5 s",
    ),
    "field": (response("400 No", b'{"error": "top_k"}'), RequestError, r"\(400: top_k\)$"),
    "full": (response("400 No", FULL), ContextLengthError, "100 tokens"),
    "moved": (
        response("308 No", b"", more="Location: http://b/\r\n"),
        RequestError,
        r"sends the request on to http://b/ \(308\); give that address",
    ),
    "failed": (response("500 No", b"<html>"), EngineError, r"failed \(500\); try again"),
    "event": (
        stream(event(content="a"), b'data: {"error": {"message": "lost"}}\n\n'),
        EngineError,
        r"failed \(500: lost\); try again",
    ),
    "page": (
        response("200 OK", b"<html>", "text/html"),
        EngineError,
        "answers with 'text/html' instead of a stream of events",
    ),
    "form": (stream(b"data: [1]\n\n"), EngineError, "an event that is none of OpenAI's"),
    "no HTTP": (b"hello\r\n\r\n", EngineError, "does not speak HTTP"),
    "no response": (b"", EngineError, "cannot be reached"),
    "early end": (stream(event(content="a")), EngineError, "before it was complete"),
    "death": (
        stream(event(content="a"), is_whole=False),
        EngineError,
        "ended the connection before the answer was complete",
    ),
}


@pytest.mark.parametrize(("sent", "kind", "words"), FAILURES.values(), ids=FAILURES)
def test_failures_are_sentences(
    server: ChatServer, sent: bytes, kind: type[JaxinferError], words: str
) -> None:
    answerer = remote(server)
    server.responses = [sent, stream(event(content="a"), ending())]
    with pytest.raises(kind, match=words) as caught:
        list(answerer.answer(REQUEST))
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert list(answerer.answer(REQUEST))[0] == Said("a")  # it goes on


def test_servers_without_models(server: ChatServer) -> None:
    address = ChatConfig(url=server.url).address
    assert address is not None
    server.models = response("404 No", b"")
    with pytest.raises(RequestError, match=r"\(404\)"):
        RemoteAnswerer(address)
    found = RemoteAnswerer(address, model="m")
    assert (found.model, found.max_model_len) == ("m", None)
    server.models = response("200 OK", b'{"data": []}')
    with pytest.raises(ConfigError, match="lists no model; give its name as MODEL"):
        RemoteAnswerer(address)
    server.models = response("401 No", b"")
    with pytest.raises(RequestError, match="refuses the key"):
        RemoteAnswerer(address, model="m")


def test_an_answer_needs_an_end() -> None:
    said = event(content="a")
    assert list(read_events([said + DONE], "x"))[1] == End("", None)
    with pytest.raises(EngineError, match="x ended the answer before it was complete; try again"):
        list(read_events([said], "x"))


# the engine here


def test_an_engine_here_answers_as_a_server_does() -> None:
    request = {**REQUEST, "tools": [TOOL], "temperature": 0}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    texts = (f"<think>\nhm\n</think>\n\nI ask.\n{call}", "Just text.")
    found: list[list[list[Event]]] = []
    for answers in (_answers_here, _answers_of_server):
        engine, device = scripted_engine("qwen3")
        found.append(answers(engine, device, texts, request))
    here, there = ([_told(*events) for events in one] for one in found)
    assert here == there
    arguments = '{"city": "Paris"}'
    assert here[0][:3] == ("hm", "I ask.", [("get_weather", arguments)])
    assert here[1][:3] == ("", "Just text.", [])


def _told(*events: Event) -> tuple[object, ...]:
    """An answer whose events may be cut anywhere, without the ids of calls, which are random."""
    answer = answer_of(*events)
    calls = [(call.name, call.arguments) for call in answer.calls.values()]
    ends = [one for one in events if isinstance(one, End)]
    return answer.thoughts, answer.content, calls, ends


def _answers_here(engine: Any, device: Any, texts: Any, request: Any) -> list[list[Event]]:
    config = ServerConfig(served_model_name=("scripted",))
    with local_answerer(EngineConfig(), config, lambda _: EngineThread(engine)) as answerer:
        assert answerer.max_model_len == 8192
        events: list[list[Event]] = []
        for text in texts:
            device.speak(text)
            events.append(list(answerer.answer(request)))
        with pytest.raises(ContextLengthError):
            list(answerer.answer({"messages": [{**USER, "content": "a" * 9000}]}))
        with pytest.raises(RequestError, match=r"the engine refuses the request \(400: top_k"):
            list(answerer.answer({**request, "top_k": -7}))
        device.speak("abc" * 1000)
        before = engine.stats().num_generated_tokens
        with device.held(after=20), closing(answerer.answer(REQUEST)) as stopped:
            assert isinstance(next(stopped), Said)
        wait_until(lambda: not engine.has_work, "the answer is aborted")
        assert engine.stats().num_generated_tokens - before < 2000
        device.speak("again")
        assert _told(*answerer.answer(REQUEST))[1] == "again"
    return events


def _answers_of_server(engine: Any, device: Any, texts: Any, request: Any) -> list[list[Event]]:
    events: list[list[Event]] = []
    with serving(engine, served_model_name=("scripted",)) as server:
        address = ChatConfig(url=server.url).address
        assert address is not None
        answerer = RemoteAnswerer(address)
        assert (answerer.model, answerer.max_model_len) == ("scripted", 8192)
        for text in texts:
            device.speak(text)
            events.append(list(answerer.answer(request)))
    return events


def test_a_model_without_a_template_is_refused() -> None:
    engine, _ = scripted_engine(source=" ")
    engine.tokenizer = None
    config = ServerConfig(served_model_name=("scripted",))
    with (
        pytest.raises(ConfigError, match="this model has no chat template; give one"),
        local_answerer(EngineConfig(), config, lambda _: EngineThread(engine)),
    ):
        pass
