"""A command in a pseudo-terminal, and what a person sees of it.

Owns: ``Terminal``.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.server_process import wait_until

SECONDS = 60.0  # after which a test stops waiting
# the terminal becomes the process's own, so that Ctrl-C in it is a signal
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from jaxinfer.cli.main import main
main()
"""


class Terminal:
    """The terminal's side of a command: ``type`` and ``expect``."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self.output = ""  # all of it, with the echo of what was typed
        self._end = end
        self._seen = 0  # characters that an earlier ``expect`` has passed

    def type(self, text: str) -> None:
        """Type text; "\\n" is the Return key, "\\x03" Ctrl-C, "\\x04" Ctrl-D.

        Ctrl-C waits until the command does: CPython's input with line editing loses a signal that
        comes after its prompt and before its ``select``, which only a program is quick enough for.
        """
        if "\x03" in text:
            wait_until(self._is_waiting, "the command waits")
        os.write(self._end, text.encode())

    def expect(self, text: str) -> str:
        """Wait until this text follows in the output; returns the output up to its end."""
        deadline = time.monotonic() + SECONDS
        while (found := self.output.find(text, self._seen)) < 0:
            more = self._read(deadline)
            assert more, f"{text!r} does not follow in {self.output[self._seen :]!r}"
        before, self._seen = self._seen, found + len(text)
        return self.output[before : self._seen]

    def ends(self) -> int:
        """Wait for the end of the command; its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(SECONDS)

    def _is_waiting(self) -> bool:
        """True if the command's main thread sleeps; the state follows its name in brackets."""
        pid = self.process.pid
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "S"

    def _read(self, deadline: float) -> bool:
        """Add further output; False if the command has closed the terminal, or at the deadline."""
        if not select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]:
            return False
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.output += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Run ``jaxinfer`` with these arguments in a terminal of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "PYTHONUNBUFFERED": "", **environment},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
