"""The format of log lines, which every process of a server shares: text for people, or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

SERVER_LOGGER = "jaxinfer.server"
TRACE = 5  # uvicorn's level below debug


@dataclass(frozen=True)
class LogSettings:
    """The format and the level of a log; ``level`` is one of uvicorn's names."""

    json_lines: bool = False
    level: str = "info"

    @property
    def number(self) -> int:
        """The level as a number of ``logging``."""
        names = logging.getLevelNamesMapping()
        return TRACE if self.level == "trace" else names[self.level.upper()]

    @property
    def library_number(self) -> int:
        """The level of loggers whose information only developers need."""
        return logging.WARNING if self.number == logging.INFO else self.number


def log_to(stream: TextIO, settings: LogSettings, levels: Mapping[str, int]) -> None:
    """Send the messages of loggers, by name with their level, to ``stream``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if settings.json_lines else TextLines())
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def tell(logger: logging.Logger, level: int, event: str, text: str, **fields: Any) -> None:
    """Log an event that has a sentence: text logs show only that, JSON the fields as well."""
    logger.log(level, event, extra={"text": text, "fields": fields})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, then the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_line(record), default=str)


class TextLines(logging.Formatter):
    """The same as text: ``time level event key=value ...``; a value with spaces is JSON.

    An event with a sentence is ``time level sentence``.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = _line(record)
        traceback = line.pop("traceback", "")
        words = [line.pop("time"), line.pop("level"), line.pop("event")]
        text = getattr(record, "text", None)
        if text is not None:
            words[2:] = [text]
        else:
            words += [f"{name}={_text_value(value)}" for name, value in line.items()]
        return " ".join(words) + (f"\n{traceback}" if traceback else "")


def _line(record: logging.LogRecord) -> dict[str, Any]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
    text = getattr(record, "text", None)
    if (fields := getattr(record, "fields", None)) is not None:
        line |= {"event": record.getMessage(), **({} if text is None else {"message": text})}
        line |= fields
    else:  # a library's message
        line |= {"event": record.name, "message": record.getMessage()}
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return line


def _text_value(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isascii() and value.isprintable()
    return value if is_plain and value and " " not in value else json.dumps(value, default=str)
