"""The server's log: one event a line, as JSON or as ``key=value`` text.

Owns: the form of a line, and what is told about a request: counts and parameters, never its text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.loop import LOGGER as ENGINE_LOGGER

LOGGER = "jaxinfer.server"
# the engine's own is there when it runs on a thread; another process tells it on stderr as text
ROUTED = (ENGINE_LOGGER, "uvicorn", "uvicorn.error", "uvicorn.asgi")
MOST_NAMES = 1000  # that clients choose: neither memory nor the log grows without end
LONGEST_VALUE = 200  # characters; a longer name is cut, a longer parameter only counted


def configure_logging(stream: TextIO, level: str) -> None:
    """Send the events of the server and the messages of uvicorn to ``stream``.

    A terminal gets text, everything else JSON. ``level`` is uvicorn's word for it.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if stream.isatty() else JsonLines())
    number = 5 if level == "trace" else logging.getLevelNamesMapping()[level.upper()]
    of_library = logging.WARNING if number == logging.INFO else number  # we tell what matters
    for name in (LOGGER, *ROUTED):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(number if name == LOGGER else of_library)


class EventLog:
    """Writes events. ``requests``: also when each request comes and goes."""

    def __init__(self, *, requests: bool = False) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._requests = requests
        self._told: set[str] = set()

    def debug(self, event: str, **fields: Any) -> None:
        """Something that matters to nobody but a developer."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something that happened as it should."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that the operator may want to change."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, *, exception: BaseException | None = None, **fields: Any) -> None:
        """Something that failed, with its traceback."""
        self._write(logging.ERROR, event, fields, exception)

    def once(self, event: str, name: str, **fields: Any) -> None:
        """Warn about ``name`` the first time only, and about ``MOST_NAMES`` names in all."""
        key = f"{event} {name[:LONGEST_VALUE]}"
        if key not in self._told and len(self._told) < MOST_NAMES:
            self._told.add(key)
            self.warning(event, name=name[:LONGEST_VALUE], **fields)

    def request_received(
        self,
        request_id: str,
        *,
        route: str,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        **fields: Any,
    ) -> None:
        """With ``--enable-log-requests``: a request was accepted."""
        if self._requests:
            self.info(
                "request_received",
                request_id=request_id,
                route=route,
                num_prompt_tokens=num_prompt_tokens,
                sampling=_chosen(sampling),
                **fields,
            )

    def request_finished(
        self,
        request_id: str,
        *,
        finish_reason: str | None,
        num_output_tokens: int,
        ttft: float | None,
        e2e: float,
        **fields: Any,
    ) -> None:
        """With ``--enable-log-requests``: a request has ended; ``ttft`` and ``e2e`` in seconds."""
        if self._requests:
            self.info(
                "request_finished",
                request_id=request_id,
                finish_reason=finish_reason,
                num_output_tokens=num_output_tokens,
                ttft=None if ttft is None else round(ttft, 6),
                e2e=round(e2e, 6),
                **fields,
            )

    def _write(
        self,
        level: int,
        event: str,
        fields: Mapping[str, Any],
        exception: BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exception)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return json.dumps(_line(record), default=str)


class TextLines(logging.Formatter):
    """The same for people: ``time level event key=value ...``; odd values are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        line = _line(record)
        traceback = line.pop("traceback", "")
        words = [line.pop("time"), line.pop("level"), line.pop("event")]
        words += [f"{name}={_word(value)}" for name, value in line.items()]
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


def _word(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isascii() and value.isprintable()
    return value if is_plain and value and " " not in value else json.dumps(value, default=str)


def _chosen(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the class's defaults; long ones by their length."""
    defaults = msgspec.structs.asdict(SamplingParams())
    return {
        name: _told(value)
        for name, value in msgspec.structs.asdict(sampling).items()
        if value != defaults[name]
    }


def _told(value: Any) -> Any:
    if isinstance(value, Sequence | Mapping | Set) and len(repr(value)) > LONGEST_VALUE:
        return f"{type(value).__name__} of {len(value)}"
    return dict(value) if isinstance(value, Mapping) else value
