"""The commands of ``jaxinfer bench``, each imported when it runs."""

from __future__ import annotations

import signal
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.resources import files
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
        "offload": ("offload", "main"),
        "startup": ("startup", "main"),
        "sweep": ("sweep", "main"),
        "replay": ("serve", "replay"),
        "compare": ("compare", "main"),
        "plan": ("plan", "main"),
        "simulate": ("simulate", "main"),
        "plot": ("draw", "main"),
        "verify": ("verify", "main"),
    }
)
OF_SERVERS = frozenset(("serve", "sweep", "replay"))  # which take --api-key
# whose other flags are the engine's
OF_ENGINES = frozenset(("throughput", "latency", "offload", "plan", "simulate"))


def presets() -> list[str]:
    """The names of the workloads in configs/bench."""
    folder = files("jaxinfer.configs").joinpath("bench")
    return sorted(one.name[:-5] for one in folder.iterdir() if one.name.endswith(".toml"))


def preset_arguments(name: str) -> list[str]:
    """The command of a preset and its flags, which later ones override."""
    text = files("jaxinfer.configs").joinpath("bench", f"{name}.toml").read_text()
    preset = tomllib.loads(text)
    flags = [
        f"--{flag}" if value is True else f"--{flag}={value}"
        for flag, value in preset["flags"].items()
    ]
    return [preset["command"], *flags]


def run(arguments: list[str], read_settings: ReadSettings, api_key: str = "") -> int:
    """Run one command or preset; its exit code. Raises ``BenchError`` for an unknown one.

    ``api_key`` is that of a server that runs already, unless a flag gives another.
    """
    name, *rest = arguments
    if name in presets():
        name, *rest = [*preset_arguments(name), *rest]
    if name not in COMMANDS:
        known = ", ".join((*COMMANDS, *presets()))
        raise BenchError(f"{name!r} is no benchmark; choose one of {known}")
    if api_key and name in OF_SERVERS:
        rest = [f"--api-key={api_key}", *rest]
    module, function = COMMANDS[name]
    command = getattr(import_module(f"jaxinfer.bench.{module}"), function)
    before = signal.signal(signal.SIGTERM, _end)  # servers that were started end too
    try:
        return command(rest, read_settings) if name in OF_ENGINES else command(rest)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """End the run once: a second signal, as `timeout` sends it, must not end the report too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
