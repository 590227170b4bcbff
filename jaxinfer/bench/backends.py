"""The engines that ``compare`` knows: how each is started, and what its server takes."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxinfer.bench.offer import NotReady

VERSION = "import importlib.metadata as m, {module}; print(m.version({package!r}))"
PROBE_SECONDS = 120.0  # an engine imports PyTorch first


@dataclass(frozen=True)
class Backend:
    """An engine's server. ``arguments`` follow an interpreter, with {model} and {port}."""

    name: str
    module: str  # that its interpreter must have
    package: str  # whose version is reported
    arguments: tuple[str, ...]
    takes_token_ids: bool = True
    streams_usage: bool = True  # else counts are asked for without a stream
    version_route: str = "/version"  # of a server that runs already
    lists_models: bool = True  # else requests name the model as it was given
    omitted: frozenset[str] = frozenset()  # fields of requests that it refuses
    to_the_end: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # fields in place of ignore_eos


HOST = ("--host", "127.0.0.1", "--port", "{port}")
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        one.name: one
        for one in (
            Backend(
                "jaxinfer", "jaxinfer", "jaxinfer", ("-m", "jaxinfer", "serve", "{model}", *HOST)
            ),
            Backend(
                "vllm",
                "vllm",
                "vllm",
                ("-m", "vllm.entrypoints.cli.main", "serve", "{model}", *HOST),
            ),
            Backend(
                "sglang",
                "sglang",
                "sglang",
                ("-m", "sglang.launch_server", "--model-path", "{model}", *HOST),
                version_route="/server_info",
            ),
            Backend(
                "llamacpp",
                "llama_cpp.server",
                "llama_cpp_python",
                (
                    *("-m", "llama_cpp.server", "--model", "{model}", *HOST),
                    *("--interrupt_requests", "False"),  # else a new request ends the one before
                ),
                takes_token_ids=False,
                streams_usage=False,
                omitted=frozenset(("ignore_eos", "stream_options")),
            ),
            Backend(
                "transformers",
                "transformers",
                "transformers",
                ("-m", "transformers.cli.transformers", "serve", "{model}", *HOST),
                takes_token_ids=False,
                lists_models=False,
                omitted=frozenset(("ignore_eos", "stream_options", "top_k", "min_p")),
                to_the_end=MappingProxyType(
                    {"generation_config": '{"do_sample": false, "pad_token_id": 0}'}
                ),
            ),
        )
    }
)


@dataclass(frozen=True)
class Peer:
    """A backend as the command line gives it: at a URL, or a command to start."""

    backend: Backend
    model: str
    python: str
    url: str | None = None
    command: str | None = None
    more: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    def command_line(self, port: int) -> list[str]:
        """The command that starts the server."""
        if self.command is not None:
            parts: Sequence[str] = shlex.split(self.command)
        else:
            parts = (self.python, *self.backend.arguments)
        values = {"{model}": self.model, "{port}": str(port)}
        filled: list[str] = []
        for part in parts:
            for name, value in values.items():
                part = part.replace(name, value)
            filled.append(part)
        return [*filled, *self.more]

    def version(self) -> str:
        """The version of the engine's package; raises ``NotReady`` if it is not installed."""
        if self.url is not None or self.command is not None:
            return ""
        script = VERSION.format(module=self.backend.module, package=self.backend.package)
        try:
            done = subprocess.run(
                [self.python, "-c", script],
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
            )
        except OSError as error:
            raise NotReady(f"not installed: {self.python} ({error.strerror})") from error
        except subprocess.TimeoutExpired as error:
            raise NotReady(f"{self.python} did not report a version in time") from error
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise NotReady(f"not installed for {self.python}: {last[0]}")
        return done.stdout.strip().splitlines()[-1]

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request, as this server takes them."""
        omitted = self.backend.omitted
        kept = {name: value for name, value in fields.items() if name not in omitted}
        whole = self.backend.to_the_end if fields.get("ignore_eos") else {}
        return {**kept, **whole, **self.extra_body}
