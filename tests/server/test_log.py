"""Lines of the log."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from jaxinfer.core.log import LogSettings, TextLines, tell
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.http.log import (
    LIBRARY_LOGGERS,
    LOGGER,
    MAX_WARNED_NAMES,
    EventLog,
    configure_logging,
)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log at level "info"; the loggers are restored afterwards."""
    loggers = [logging.getLogger(name) for name in (LOGGER, *LIBRARY_LOGGERS)]
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    stream = io.StringIO()
    configure_logging(stream, LogSettings(json_lines=True))
    yield stream
    for one, handlers, propagate, level in before:
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


def test_one_json_object_a_line(stream: io.StringIO) -> None:
    EventLog().info("started", text="two\nlines", number=3)
    EventLog().debug("hidden")
    [line] = map(json.loads, stream.getvalue().splitlines())
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "info", "event": "started", "text": "two\nlines", "number": 3}


def test_errors_carry_their_traceback(stream: io.StringIO) -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        EventLog().error("failed", exception=error, request_id="r")
    line = json.loads(stream.getvalue())
    assert line["request_id"] == "r"
    assert line["traceback"].endswith("KeyError: 'lost'")


@pytest.mark.parametrize("name", ["uvicorn.error", "jaxinfer.engine"])
def test_library_messages_are_routed_in(stream: io.StringIO, name: str) -> None:
    logging.getLogger(name).warning("odd %s", "thing")
    logging.getLogger(name).info("chatter")
    [line] = map(json.loads, stream.getvalue().splitlines())
    assert (line["event"], line["message"]) == (name, "odd thing")


def test_text_for_people() -> None:
    record = logging.LogRecord(LOGGER, logging.INFO, "", 0, "access", (), None)
    record.fields = {"path": "/v1", "odd": "a b\nc", "none": None, "status": 200}
    line = TextLines().format(record)
    assert line.split(" ", 1)[1] == 'info access path=/v1 odd="a b\\nc" none=null status=200'


def test_a_sentence(stream: io.StringIO) -> None:
    tell(logging.getLogger(LOGGER), logging.INFO, "settings", "port 1 (flag)", port=1)
    line = json.loads(stream.getvalue())
    del line["time"]
    assert line == {"level": "info", "event": "settings", "message": "port 1 (flag)", "port": 1}
    record = logging.LogRecord(LOGGER, logging.INFO, "", 0, "settings", (), None)
    record.text, record.fields = "port 1 (flag)", {"port": 1}
    assert TextLines().format(record).split(" ", 1)[1] == "info port 1 (flag)"


def test_once_by_name(stream: io.StringIO) -> None:
    log = EventLog()
    for name in ("a", "b", "a", "a"):
        log.warning_once("unknown_field", name)
    names = [json.loads(line)["name"] for line in stream.getvalue().splitlines()]
    assert names == ["a", "b"]


def test_names_from_clients_are_bounded(stream: io.StringIO) -> None:
    log = EventLog()
    for number in range(2 * MAX_WARNED_NAMES):
        log.warning_once("unknown_field", f"{number}-" + "x" * 10_000)
    assert stream.getvalue().count("\n") == MAX_WARNED_NAMES
    assert len(stream.getvalue()) < 400 * MAX_WARNED_NAMES


def test_requests_are_logged_only_if_enabled(stream: io.StringIO) -> None:
    sampling = SamplingParams(
        temperature=0.5, stop=("x" * 1000,), logit_bias=dict.fromkeys(range(300), 1.0)
    )
    for log in (EventLog(), EventLog(requests=True)):
        log.request_received(
            request_id="r",
            route="/v1/x",
            num_prompt_tokens=5,
            sampling=sampling,
            prompts=[Prompt("hidden", (1, 2))],
        )
        log.request_finished(request_id="r", finish_reason="stop", ttft=None, e2e=0.25)
    received, finished = map(json.loads, stream.getvalue().splitlines())
    assert received["event"] == "request_received"
    assert received["num_prompt_tokens"] == 5
    assert received["sampling"] == {
        "temperature": 0.5,
        "logit_bias": "dict of 300",
        "stop": "tuple of 1",
    }
    assert finished["event"] == "request_finished"
    assert "hidden" not in stream.getvalue()
    assert (finished["ttft"], finished["e2e"], finished["finish_reason"]) == (None, 0.25, "stop")


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        (0, None),
        (3, ["one"]),
        (6, ["one ", [7, 8]]),
        (100, ["one ", [7, 8, 9], "three"]),
    ],
)
def test_the_texts_of_a_request_have_a_bound(
    stream: io.StringIO, length: int, shown: list[object] | None
) -> None:
    prompts = [Prompt("one ", (1, 2)), Prompt(None, (7, 8, 9)), Prompt("three", (3,))]
    log = EventLog(requests=True, max_characters=length)
    log.request_received(request_id="r", sampling=SamplingParams(), prompts=prompts)
    assert json.loads(stream.getvalue()).get("prompts") == shown
