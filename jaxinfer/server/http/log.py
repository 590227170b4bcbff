"""The server's log: one event a line, as JSON or as ``key=value`` text.

Owns: the format of a line. A request is logged with its counts and parameters, never with its text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from functools import partialmethod
from typing import Any, TextIO

import msgspec

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.loop import LOGGER as ENGINE_LOGGER

LOGGER = "jaxinfer.server"
# The engine's logger is in this process when the engine runs on a thread; an engine process writes
# its messages to stderr as text.
LIBRARY_LOGGERS = (ENGINE_LOGGER, "uvicorn", "uvicorn.error", "uvicorn.asgi")
MAX_WARNED_NAMES = 1000  # names come from clients, so memory and log need a bound
MAX_VALUE_CHARACTERS = 200  # a longer name is cut; of a longer parameter only its length is logged


def configure_logging(stream: TextIO, level: str) -> None:
    """Send the server's events and uvicorn's messages to ``stream``.

    A terminal gets text, any other stream JSON. ``level`` is one of uvicorn's level names.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if stream.isatty() else JsonLines())
    number = 5 if level == "trace" else logging.getLevelNamesMapping()[level.upper()]
    # the server logs its own events
    library_level = logging.WARNING if number == logging.INFO else number
    for name in (LOGGER, *LIBRARY_LOGGERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(number if name == LOGGER else library_level)


class EventLog:
    """Writes events. ``requests``: also write when a request is accepted and when it ends."""

    def __init__(self, *, requests: bool = False) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._requests = requests
        self._warned: set[str] = set()

    def _write(
        self, level: int, event: str, *, exception: BaseException | None = None, **fields: Any
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exception)

    debug = partialmethod(_write, logging.DEBUG)  # only developers need it
    info = partialmethod(_write, logging.INFO)  # normal operation
    warning = partialmethod(_write, logging.WARNING)  # the operator may want to act on it
    error = partialmethod(_write, logging.ERROR)  # a failure, with its traceback

    def warning_once(self, event: str, name: str, **fields: Any) -> None:
        """Warn about ``name`` only once, and about at most ``MAX_WARNED_NAMES`` names."""
        key = f"{event} {name[:MAX_VALUE_CHARACTERS]}"
        if key not in self._warned and len(self._warned) < MAX_WARNED_NAMES:
            self._warned.add(key)
            self.warning(event, name=name[:MAX_VALUE_CHARACTERS], **fields)

    def request_received(self, *, sampling: SamplingParams, **fields: Any) -> None:
        """With ``--enable-log-requests``: a request was accepted."""
        if self._requests:
            self.info("request_received", **fields, sampling=_changed_parameters(sampling))

    def request_finished(self, *, ttft: float | None, e2e: float, **fields: Any) -> None:
        """With ``--enable-log-requests``: a request has ended; ``ttft`` and ``e2e`` in seconds."""
        if self._requests:
            first = None if ttft is None else round(ttft, 6)
            self.info("request_finished", **fields, ttft=first, e2e=round(e2e, 6))


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_line(record), default=str)


class TextLines(logging.Formatter):
    """The same as text: ``time level event key=value ...``; a value with spaces is JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = _line(record)
        traceback = line.pop("traceback", "")
        words = [line.pop("time"), line.pop("level"), line.pop("event")]
        words += [f"{name}={_text_value(value)}" for name, value in line.items()]
        return " ".join(words) + (f"\n{traceback}" if traceback else "")


def _line(record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
    if (fields := getattr(record, "fields", None)) is not None:
        line |= {"event": record.getMessage(), **fields}
    else:  # a library's message
        line |= {"event": record.name, "message": record.getMessage()}
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return line


def _text_value(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isascii() and value.isprintable()
    return value if is_plain and value and " " not in value else json.dumps(value, default=str)


def _changed_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults; of long ones only the length."""
    defaults = msgspec.structs.asdict(SamplingParams())
    return {
        name: _shortened(value)
        for name, value in msgspec.structs.asdict(sampling).items()
        if value != defaults[name]
    }


def _shortened(value: Any) -> Any:
    if isinstance(value, Sequence | Mapping | Set) and len(repr(value)) > MAX_VALUE_CHARACTERS:
        return f"{type(value).__name__} of {len(value)}"
    return dict(value) if isinstance(value, Mapping) else value
