"""The user's messages and commands, from a terminal with line editing, or from a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxinfer.core.errors import RequestError

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
COMMAND = re.compile(r"/(?P<name>[A-Za-z?]+)(?:\s+(?P<text>.*))?", re.DOTALL)
HISTORY_LINES = 1000


class Entry(NamedTuple):
    """A message, or a command with its text."""

    command: str | None
    text: str


class Reader:
    """Reads entries with ``line``, a function of the prompt, which raises ``EOFError``."""

    def __init__(self, line: Callable[[str], str]) -> None:
        self._line = line

    def next(self, prompt: str = PROMPT) -> Entry | None:
        """The next entry; None at the end of the input. Empty lines are passed over.

        Text from one triple quote to the next is one text of several lines.
        """
        try:
            while not (line := self._line(prompt)).strip():
                pass
        except EOFError:
            return None
        head, quotes, text = line.partition(QUOTES)
        command = COMMAND.fullmatch((head if quotes else line).strip())
        if quotes and (command is not None or not head.strip()):
            text = self._quoted(text)
            return Entry(None if command is None else command["name"], text)
        if command is None:
            return Entry(None, line.strip())
        return Entry(command["name"], (command["text"] or "").strip())

    def _quoted(self, text: str) -> str:
        with suppress(EOFError):  # then the text ends with the input
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self._line(CONTINUED)
        return text.rstrip().removesuffix(QUOTES).strip("\n")


def terminal_lines(history: Path) -> Callable[[str], str]:
    """Lines of a terminal, with line editing and a history that later chats have, too.

    The file is the user's alone. Where it cannot be written, the history ends with the program.
    """
    try:
        import readline
    except ImportError:  # of a Python without it
        return input
    with suppress(OSError):
        history.parent.mkdir(0o700, parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_RDWR, 0o600))
        history.chmod(0o600)
        readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)

    def line(prompt: str) -> str:
        before = readline.get_current_history_length()
        text = input(prompt)
        if readline.get_current_history_length() > before:
            with suppress(OSError):
                readline.append_history_file(1, history)
                history.chmod(0o600)  # it may be a new file, of the lines that are kept
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    return line


def piped_lines(prompt: str) -> str:
    """Lines of a pipe or a file."""
    del prompt
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8 text (byte {error.start} of a line); convert it first"
        ) from None
