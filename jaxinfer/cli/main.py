"""``jaxinfer``: the command group, its exit codes, and the encoding of its output.

Owns: exit codes 0 for success, 1 for a ``JaxinferError`` or a broken installation, 2 for wrong
usage, 130 for Ctrl-C.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import click

from jaxinfer import __version__
from jaxinfer.cli.bench import bench
from jaxinfer.cli.chat.command import chat
from jaxinfer.cli.compile import compile_
from jaxinfer.cli.convert import convert
from jaxinfer.cli.doctor import doctor
from jaxinfer.cli.export import export
from jaxinfer.cli.generate import generate
from jaxinfer.cli.inspect import inspect
from jaxinfer.cli.models import list_, pull, rm
from jaxinfer.cli.replay import replay
from jaxinfer.cli.run_batch import run_batch
from jaxinfer.cli.serve import serve
from jaxinfer.cli.simulate import simulate
from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.host_memory import limit_heap_arenas

# the words of ollama, vLLM and llama.cpp, and the commands that do the same
WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "run": ("generate", "chat", "serve"),
        **dict.fromkeys(("ask", "complete", "prompt"), ("generate", "chat")),
        **dict.fromkeys(("cli", "repl", "talk"), ("chat",)),
        **dict.fromkeys(("start", "server", "api", "launch"), ("serve",)),
        **dict.fromkeys(("show", "info"), ("inspect",)),
        **dict.fromkeys(("create", "quantize", "save"), ("convert", "export")),
        **dict.fromkeys(("download", "get"), ("pull",)),
        **dict.fromkeys(("ls", "models"), ("list",)),
        **dict.fromkeys(("remove", "delete"), ("rm",)),
        **dict.fromkeys(("check", "env", "collect-env"), ("doctor",)),
        "batch": ("run-batch",),
    }
)
INTERRUPTED = 130  # the shell's exit code for a command that SIGINT ended


class Commands(click.Group):
    """A group that prints the project's errors as one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except JaxinferError as error:
            click.echo(f"jaxinfer: error: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument; the error for another word names similar ones."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = WORDS.get(name.lower()) or get_close_matches(name.lower(), self.commands)
            *others, last = [f"'{one}'" for one in near if one in self.commands] or [""]
            names = f"{', '.join(others)} or {last}" if others else last
            ctx.fail(f"No such command '{name}'" + (f"; did you mean {names}?" if last else "."))
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    commands=(
        *(bench, chat, compile_, convert, doctor, export, generate, inspect, list_, pull, replay),
        *(rm, run_batch, serve, simulate),
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="jaxinfer %(version)s")
def cli() -> None:
    """Large language models served by pure JAX."""


def main(prog_name: str = "jaxinfer") -> None:
    """The entry point of the console script; ``prog_name`` is its name in usage lines."""
    limit_heap_arenas()
    _open_closed_streams()
    _write_any_text()
    try:
        cli(prog_name=prog_name)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All frames have been unwound; only compiler threads may be left, and the interpreter
            # would wait for them.
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        # Python's last collection would free msgspec's types, which crashes now and then once
        # schemas have been made of them (msgspec 0.22, its issue 717).
        gc.freeze()
        raise


def _open_closed_streams() -> None:
    """Let streams that the program was started without (``>&-``) read and write nothing.

    Otherwise the next file that is opened would get their number, and their output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _write_any_text() -> None:
    """Let stdout take any text of a model, which its encoding may not contain.

    A terminal shows replacement characters; a file or pipe gets UTF-8. Python's stderr escapes by
    itself.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper):  # replaced by a test
        return
    if sys.stdout.isatty():
        sys.stdout.reconfigure(errors="replace")
    else:
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
