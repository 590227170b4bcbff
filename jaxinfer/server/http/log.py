"""The server's log: one event a line, in the format of ``core.log``.

A request is logged with its counts and parameters, and with its text only up to a given length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from functools import partialmethod
from typing import Any, TextIO

import msgspec

from jaxinfer.core.log import SERVER_LOGGER as LOGGER
from jaxinfer.core.log import LogSettings, log_to
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.loop.loop import LOGGER as ENGINE_LOGGER
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.engine.start.progress import LOGGER as START_LOGGER

# The engine's logger is used in this process when the engine runs on a thread; an engine process
# writes its own messages in the same format.
LIBRARY_LOGGERS = (ENGINE_LOGGER, "uvicorn", "uvicorn.error", "uvicorn.asgi", "opentelemetry")
MAX_WARNED_NAMES = 1000  # names come from clients, so memory and log need a bound
MAX_VALUE_CHARACTERS = 200  # a longer name is cut; of a longer parameter only its length is logged


def configure_logging(stream: TextIO, settings: LogSettings) -> None:
    """Send the server's events, and the messages of the engine and uvicorn, to ``stream``."""
    levels: dict[str, int] = {LOGGER: settings.number, START_LOGGER: settings.number}
    for name in LIBRARY_LOGGERS:
        levels[name] = settings.library_number
    log_to(stream, settings, levels)


class EventLog:
    """Writes events. ``requests``: also write when a request is accepted and when it ends.

    ``max_characters`` of a request's prompts are logged as well, or as many token ids of prompts
    that have no text.
    """

    def __init__(self, *, requests: bool = False, max_characters: int | None = None) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._requests = requests
        self._max_characters = max_characters or 0
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

    def request_received(
        self, *, sampling: SamplingParams, prompts: Sequence[Prompt], **fields: Any
    ) -> None:
        """With ``--enable-log-requests``: a request was accepted."""
        if self._requests:
            texts = _shortened_prompts(prompts, self._max_characters)
            self.info("request_received", **fields, sampling=_changed_parameters(sampling), **texts)

    def request_finished(self, *, ttft: float | None, e2e: float, **fields: Any) -> None:
        """With ``--enable-log-requests``: a request has ended; ``ttft`` and ``e2e`` in seconds."""
        if self._requests:
            first = None if ttft is None else round(ttft, 6)
            self.info("request_finished", **fields, ttft=first, e2e=round(e2e, 6))


def _changed_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults; of long ones only the length."""
    defaults = msgspec.structs.asdict(SamplingParams())
    return {
        name: _shortened(value)
        for name, value in msgspec.structs.asdict(sampling).items()
        if value != defaults[name]
    }


def _shortened_prompts(prompts: Sequence[Prompt], most: int) -> dict[str, Any]:
    """The field ``prompts`` with at most ``most`` characters, or token ids, of them all."""
    shown: list[str | tuple[int, ...]] = []
    for prompt in prompts:
        if most <= 0:
            break
        shown.append((prompt.token_ids if prompt.text is None else prompt.text)[:most])
        most -= len(shown[-1])
    return {"prompts": shown} if shown else {}


def _shortened(value: Any) -> Any:
    if isinstance(value, Sequence | Mapping | Set) and len(repr(value)) > MAX_VALUE_CHARACTERS:
        return f"{type(value).__name__} of {len(value)}"
    return dict(value) if isinstance(value, Mapping) else value
