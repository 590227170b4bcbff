"""Starts the engine's process, which needs seconds for its imports.

This module imports nothing slow, so that the process can be started first and both processes import
at the same time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

ENGINE_PROGRAM = (sys.executable, "-m", "jaxinfer.engine.link.child")


@dataclass(frozen=True)
class Spawned:
    """A process and this side's end of the socket to it; closing the socket ends the process.

    The context manager kills the process on exit if it is still running.
    """

    process: subprocess.Popen[bytes]
    end: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # and its compiler processes
        self.process.wait()


def spawn(
    program: Sequence[str] = ENGINE_PROGRAM, environment: Mapping[str, str] | None = None
) -> Spawned:
    """Start ``program`` with its socket's file descriptor as argument; returns at once.

    ``environment``: all its variables; None: those of this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            process_group=0,  # Ctrl-C reaches the server only, which then stops the engine
        )
    return Spawned(process, ours)
