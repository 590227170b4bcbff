"""The commands of ``jaxinfer bench``, each imported when it runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import BenchError

type ReadSettings = Callable[[list[str]], dict[str, Any]]  # an engine's flags, as its settings

# module and function of each; the function takes the arguments and returns the exit code
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": ("serve", "main"),
        "throughput": ("offline", "throughput"),
        "latency": ("offline", "latency"),
        "startup": ("startup", "main"),
        "sweep": ("sweep", "main"),
        "replay": ("serve", "replay"),
        "compare": ("compare", "main"),
        "plan": ("plan", "main"),
        "verify": ("verify", "main"),
    }
)
OF_ENGINES = frozenset(("throughput", "latency", "plan"))  # whose other flags are the engine's


def run(arguments: list[str], read_settings: ReadSettings) -> int:
    """Run one command; its exit code. Raises ``BenchError`` for an unknown one."""
    name, *rest = arguments
    if name not in COMMANDS:
        raise BenchError(f"{name!r} is no benchmark; choose one of {', '.join(COMMANDS)}")
    module, function = COMMANDS[name]
    command = getattr(import_module(f"jaxinfer.bench.{module}"), function)
    before = signal.signal(signal.SIGTERM, _end)  # servers that were started end too
    try:
        return command(rest, read_settings) if name in OF_ENGINES else command(rest)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt
