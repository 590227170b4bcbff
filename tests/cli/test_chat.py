"""``jaxinfer chat`` as its user sees it: in a terminal, and in a pipe."""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli.main import cli
from kit.chat_server import chat_server, ending, event, response, stream
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.terminal import Terminal, terminal

PROMPT = ">>> "
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture(scope="module")
def device_and_server() -> Iterator[tuple[ScriptedDevice, Serving]]:
    engine, device = scripted_engine("qwen3")
    with serving(engine, served_model_name=("scripted",)) as server:
        yield device, server


@pytest.fixture
def device(device_and_server: tuple[ScriptedDevice, Serving]) -> ScriptedDevice:
    """The device of the server, whose answers the test writes."""
    return device_and_server[0]


@pytest.fixture
def serving_url(device_and_server: tuple[ScriptedDevice, Serving]) -> str:
    """A server with a context of 8,192 tokens, each of them a byte."""
    return device_and_server[1].url


@pytest.fixture
def user(serving_url: str, tmp_path: Path) -> Iterator[Terminal]:
    """A chat in a terminal, at its first prompt."""
    with chat("--url", serving_url, folder=tmp_path) as user:
        assert f"scripted at {serving_url}, context of 8192 tokens." in user.expect(PROMPT)
        yield user


def chat(*arguments: str, folder: Path, **environment: str) -> Any:
    return terminal("chat", *arguments, JAXINFER_CACHE_DIR=str(folder), **environment)


def saved(user: Terminal, file: Path) -> list[dict[str, Any]]:
    user.type(f"/save {file}\n")
    user.expect(f"messages to {file})")
    return json.loads(file.read_text())


def history(length: int) -> list[dict[str, str]]:
    """A conversation of so many characters."""
    return [
        {"role": "user", "content": "a" * (length - 1)},
        {"role": "assistant", "content": "b"},
    ]


def test_text_is_shown_as_it_comes_and_ctrl_c_ends_an_answer(
    user: Terminal,
    device: ScriptedDevice,
    device_and_server: tuple[ScriptedDevice, Serving],
    tmp_path: Path,
) -> None:
    device.speak("one two three four")
    with device.held(after=9) as released:
        user.type("count\n")
        user.expect("one two")
        assert "four" not in user.output
        released.set()
        user.expect(" three four\n")
    user.expect(PROMPT)
    with device.held(after=9):
        user.type("again\n")
        user.expect("one two")
        user.type("\x03")
        user.expect("(stopped; what was said stays in the conversation)")
    device_and_server[1].wait_until_idle()
    messages = saved(user, tmp_path / "chat.json")
    assert [one["content"] for one in messages[:3]] == ["count", "one two three four", "again"]
    assert messages[3]["content"].startswith("one two") and messages[3]["cut"] is True
    with device.held(after=0):
        user.type("never\n")
        wait_until(lambda: device_and_server[1].engine.has_work, "it is asked")
        user.type("\x03")
        user.expect("(stopped before an answer; /retry sends the message again)")
    device.speak("now")
    user.type("/retry\n")
    user.expect("\nnow\n")
    assert len(saved(user, tmp_path / "chat.json")) == 6
    user.expect(PROMPT)
    user.type("half a line")
    user.expect("half a line")
    user.type("\x03")
    user.expect("Ctrl-C again, Ctrl-D or /exit ends the chat.")
    user.expect(PROMPT)
    user.type("\x03")
    assert user.ends() == 0


def test_commands(user: Terminal, device: ScriptedDevice, tmp_path: Path) -> None:
    device.speak("fine")
    user.type("/nonsense 1\n")
    user.expect(
        "error: there is no command /nonsense; use one of /help, /reset, /system, /retry, "
        "/save, /load, /stats, /exit"
    )
    user.type("/help\n")
    user.expect("/system TEXT   set the system message")
    user.type("/system\n")
    user.expect("(no system message)")
    user.type('/system """be\nkind"""\n/system\n')
    user.expect("be\nkind\n")
    with device.held(after=3) as released:  # the tokens come in several parts
        user.type('"""how\nare you?"""\n')
        user.expect("\nf")
        released.set()
        user.expect("ine\n")
    file = tmp_path / "chat.json"
    assert [one["content"] for one in saved(user, file)] == ["be\nkind", "how\nare you?", "fine"]
    user.type("/stats\n")
    stats = user.expect("1 answer, 5 tokens generated")
    assert re.search(r"first token    \d+\.\d\d s\nanswer         5 tokens, \d+\.\d tok", stats)
    user.type("/reset\n")
    user.expect("(a new conversation)")
    assert [one["content"] for one in saved(user, file)] == ["be\nkind"]
    user.type("/retry\n")
    user.expect("error: there is no message to send again")
    user.type("/load\n")
    user.expect("error: the command needs a file; write /load FILE")
    user.expect(PROMPT)  # before it, the terminal would drop Ctrl-D
    user.type("\x04")
    assert user.ends() == 0
    lines = tmp_path / "chat_history"
    assert "are you?" in lines.read_text() and stat.S_IMODE(lines.stat().st_mode) == 0o600


def test_a_long_conversation_and_a_full_context(
    serving_url: str, device: ScriptedDevice, tmp_path: Path
) -> None:
    device.speak("fine")
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(history(3000)))
    with chat("--url", serving_url, "--load", str(file), folder=tmp_path) as user:
        for text in ("one", "two"):
            user.type(f"{text}\n")
            user.expect("\nfine\n")
        user.type("/stats\n")
        prompt = user.expect(" of them cached").rpartition("prompt ")[2]
        assert 3000 < int(prompt.split()[2]) < int(prompt.split()[0]) < 3200
        user.expect("of 8192 tokens, 3")
        file.write_text(json.dumps(history(8000)))
        device.speak("x" * 200)
        user.type(f"/load {file}\nmore\n")
        user.expect("(cut: the context of 8192 tokens is full; /reset begins a new conversation)")
        user.type("even more\n")
        user.expect("error: the context of 8192 tokens is full, so this message does not fit; ")
        device.speak("fine")
        user.type("/reset\nhello\n")
        user.expect("\nfine\n")
        user.type("/exit\n")
        assert user.ends() == 0
    assert "Traceback" not in user.output


@pytest.mark.parametrize("plain", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_thoughts_and_calls(
    serving_url: str, device: ScriptedDevice, tmp_path: Path, plain: dict[str, str]
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    device.speak(f"<think>\nhm\n</think>\n\nI ask.\n{call}")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": WEATHER}]))
    arguments = ("--url", serving_url, "--tools", str(tools), "--temperature=0")
    with chat(*arguments, folder=tmp_path, **plain) as user:
        user.expect(PROMPT)
        user.type("weather?\n")
        shown = user.expect("result of get_weather> ")
        dim, end = ("", "") if plain else ("\x1b[2m", "\x1b[0m")
        assert f"{dim}Thoughts: {end}{dim}hm{end}\n\nI ask." in shown
        assert f'{dim}Call of get_weather: {end}{dim}{{"city": "Paris"}}{end}\n' in shown
        device.speak("Rain.")
        user.type("7 degrees\n")
        user.expect("\nRain.\n")
        messages = saved(user, tmp_path / "chat.json")
        assert messages[2]["role"] == "tool" and messages[2]["content"] == "7 degrees"
        user.expect(PROMPT)  # before it, the terminal would drop Ctrl-D
        user.type("\x04")
        assert user.ends() == 0
    assert ("\x1b[2m" in user.output) is not bool(plain)


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    with chat_server() as server:
        server.responses = [
            stream(event(content="half of it"), is_whole=False),
            response("429 No", b"", more="Retry-After: 3\r\n"),
            stream(event(content="whole"), ending()),
        ]
        with chat("--url", server.url, folder=tmp_path) as user:
            user.expect(PROMPT)
            user.type("hello\n")
            user.expect("half of it\n")
            user.expect("ended the connection before the answer was complete")
            user.expect("/retry sends the message again")
            user.type("/retry\n")
            user.expect("try again in 3 s")
            user.type("/retry\n")
            user.expect("\nwhole\n")
            user.expect(PROMPT)  # before it, the terminal would drop Ctrl-D
            user.type("\x04")
            assert user.ends() == 0
        sent = [[one["content"] for one in body["messages"]] for body in server.bodies]
        assert sent == [["hello"]] * 3
    assert "Traceback" not in user.output


# pipes


def piped(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli, ["chat", *arguments], input=stdin, catch_exceptions=False)


def test_each_line_of_a_pipe_is_answered(tiny_arguments: list[str]) -> None:
    arguments = (*tiny_arguments, "--max-tokens=3", "--temperature=0")
    result = piped(*arguments, "--system=kind", stdin="hi\n/stats\nyou\n")
    assert result.exit_code == 0, result.stderr
    first, *stats, second = result.stdout.split("\n")[:-1]
    assert first and second
    assert stats[1].startswith("answer         3 tokens")
    generated = CliRunner().invoke(cli, ["generate", *arguments, "--system=kind", "hi"])
    assert generated.stdout == first + "\n"


def test_a_message_needs_no_stdin(serving_url: str, device: ScriptedDevice) -> None:
    device.speak("yes")
    command = f"{sys.executable} -m jaxinfer chat --url {serving_url} scripted hello <&-"
    assert subprocess.check_output(command, shell=True) == b"yes\n"


def test_a_pipe_has_only_the_answers(serving_url: str, device: ScriptedDevice) -> None:
    device.speak("<think>\nhm\n</think>\n\nyes")
    result = piped("--url", serving_url, "scripted", "first", stdin="second\n")
    assert (result.stdout, result.exit_code) == ("yes\nyes\n", 0)
    failed = piped("--url", serving_url, "-m", "other", stdin="hi\n/nonsense\n")
    assert failed.exit_code == 1 and failed.stdout == ""
    assert "does not know the model or the address (404: " in failed.stderr
    latin = piped("--url", serving_url, stdin=b"\xe9\n")
    assert latin.exit_code == 1 and "stdin is not UTF-8 text (byte 0 of a line)" in latin.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "127.0.0.1:1 cannot be reached (Connection refused)"),
        (["--url", "ftp://x"], 1, "url must be http://HOST:PORT"),
        (["--url", "x", "--max-model-len=9"], 2, "--max-model-len is of an engine here; leave it"),
        (["--api-key", "a"], 2, "--api-key is of a server; give its --url"),
        (["--url", "x", "--api-key", "a\nb"], 1, "api_key must be printable ASCII"),
        (["--temperature=-1"], 1, "temperature must be"),
        (["--tools", __file__], 1, "is not JSON"),
        (["--n=2"], 2, "No such option"),
    ],
)
def test_wrong_settings_are_sentences(arguments: list[str], code: int, words: str) -> None:
    result = piped(*arguments)
    assert result.exit_code == code and words in result.stderr, result.output


def test_the_key_is_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server() as server:
        server.responses = [stream(event(content="a"), ending())]
        monkeypatch.setenv("JAXINFER_URL", server.url)
        monkeypatch.setenv("JAXINFER_API_KEY", "secret")
        assert piped(stdin="hi\n").stdout == "a\n"
        assert all("Authorization: Bearer secret" in head for head in server.heads)
