"""The code blocks of README.md and docs/*.md, and the option parsers that their commands have.

A block is fenced and names its language: ``sh``, ``python``, ``toml`` or ``text``. A ``text`` block
directly after another one is what that one prints. A block that the tests cannot run begins with
the comment ``NOT_RUN`` and one of ``REASONS``.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("sh", "python", "text", "toml")
NOT_RUN = "# Not run by the tests: "
REASONS = (
    "needs two machines.",
    "needs an NVIDIA GPU.",
    "needs the network.",
    "needs the program of another project.",
    "runs tests.",
    "takes minutes.",
)
# Their options are not ours to check.
OTHER_PROGRAMS = (
    *("claude", "curl", "docker", "echo", "env", "export", "guidellm", "install"),
    *("hf", "lm_eval", "mkdir", "pgrep"),
    *("kubectl", "python3", "python3.11", "serve", "systemctl", "useradd", "vllm"),
)

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"\n\n {4,}\S")
_LIST_ITEM = re.compile(r"^ *([-*]|\d+\.) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block; ``prints`` is the text that its output has to contain."""

    name: str  # README.md:42
    language: str
    text: str
    prints: str | None

    @property
    def reason(self) -> str | None:
        """Why the tests do not run it."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(NOT_RUN) if first.startswith(NOT_RUN) else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command of a shell block, those within a pipe or ``$()`` included."""
        text = re.sub(r"\w+=\$\((.*)\)$", r"\1", self.text.replace("\\\n", " "), flags=re.MULTILINE)
        commands: list[list[str]] = []
        for line in text.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, "|"]:
                if set(word) <= set("|&"):
                    commands += [words] if words else []
                    words = []
                else:
                    words.append(word)
        return commands

    @property
    def serves(self) -> list[str] | None:
        """The arguments of ``jaxinfer serve``, if that is what the block does."""
        if self.language != "sh" or not self.commands:
            return None
        program, *arguments = self.commands[0]
        return arguments[1:] if program.endswith("/jaxinfer") and arguments[0] == "serve" else None


def blocks_of(document: Path) -> list[Block]:
    """All code blocks of a document, in order."""
    text = document.read_text()
    found = list(_FENCED.finditer(text))
    blocks: list[Block] = []
    for match, following in zip_longest(found, found[1:]):
        output = None
        if following and following[2] == "text" and match[2] != "text":
            between = text[match.end() : following.start()].split("\n")
            if sum(bool(line) for line in between) <= 1:
                output = dedent(following[3]).strip()
        line = text.count("\n", 0, match.start()) + 1
        name = f"{document.relative_to(ROOT)}:{line}"
        blocks.append(Block(name, match[2], dedent(match[3]), output))
    return blocks


def indented_blocks(document: Path) -> Iterator[str]:
    """The first lines of code blocks that have no fence, so no language."""
    text = _FENCED.sub("", document.read_text())
    for match in _INDENTED.finditer(text):
        before = text[: match.start()].rpartition("\n\n")[2]
        if not _LIST_ITEM.match(before):
            yield text[match.start() :].strip().partition("\n")[0]


def check_command(words: list[str]) -> None:
    """Raise if the program of a command refuses its options, or does not exist."""
    words = [re.sub(r"^\$.*", "1", word) for word in words]  # a shell's variable: here all are pids
    program, *arguments = words
    match Path(program).name:
        case "jaxinfer":
            _check_jaxinfer(arguments)
        case "python" if arguments[0] == "-m":
            _check_module(arguments[1], arguments[2:])
        case "python" | "pytest":
            paths = [word for word in arguments if word.endswith(".py") or word.startswith("tests")]
            assert paths and all((ROOT / path).exists() for path in paths), words
        case "pip":
            _check_pip(arguments)
        case "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True)
        case name:
            assert name in OTHER_PROGRAMS, words


def _check_jaxinfer(arguments: list[str]) -> None:
    from jaxinfer.cli.main import cli

    name, *rest = arguments
    if name == "bench":
        _check_bench(rest)
    else:
        cli.commands[name].make_context(name, rest)


class _Parsed(Exception):
    """The parser accepted the arguments."""


def _check_bench(arguments: list[str]) -> None:
    """Run a command of ``jaxinfer bench`` until it has parsed its arguments."""
    from jaxinfer.bench.main import run
    from jaxinfer.cli.bench import engine_settings

    def read(more: list[str]) -> NoReturn:
        engine_settings(more)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_only)
        run(arguments, read)


def _parse_only(parser: Any, given: list[str] | None = None, *_: object) -> NoReturn:
    _, more = parser.parse_known_args(given)
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    raise _Parsed


def _check_module(name: str, arguments: list[str]) -> None:
    """Run a benchmark until it has parsed its arguments."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_only)
        patch.setattr("sys.argv", [name, *arguments])
        module.main()


def _check_pip(arguments: list[str]) -> None:
    """An editable install names extras of pyproject.toml; a file of constraints exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for option, value in zip(arguments, arguments[1:], strict=False):
        if option == "-c":
            assert (ROOT / value).exists(), value
        if option == "-e":
            assert set(re.findall(r"\w+", value)) <= extras.keys(), value
