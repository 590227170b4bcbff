"""A server's process for the duration of a measurement: start, wait until ready, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from jaxinfer.bench.client import Client
from jaxinfer.bench.offer import NotReady

READY_SECONDS = 300.0
END_SECONDS = 60.0
POLL_SECONDS = 0.05


def free_port() -> int:
    """A port of the loopback interface that no server has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CommandProcess:
    """A command in a session of its own, which ends with all its children; a context manager.

    Raises ``NotReady`` if the program does not exist. ``log`` gets its output.
    """

    def __init__(self, command: Sequence[str], log: BinaryIO) -> None:
        self._log = log
        try:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise NotReady(f"{command[0]} cannot be started ({error.strerror})") from error

    @property
    def pid(self) -> int:
        """The id of the started process; its children hold the rest of its memory."""
        return self._process.pid

    @property
    def end(self) -> str:
        """A clause if the process has ended: its status and last words; "" while it lives."""
        code = self._process.poll()
        return "" if code is None else f"its process ended with status {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The end of its output, in one line."""
        self._log.flush()
        data = Path(f"/proc/self/fd/{self._log.fileno()}").read_bytes()
        lines = data.decode(errors="replace").strip().splitlines()
        return " ".join(" / ".join(lines[-3:]).split())[-500:] or "it wrote nothing"

    async def until[T](self, wait: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; raises ``NotReady`` if the process ends before."""
        task = asyncio.ensure_future(wait)
        while not task.done():
            if end := self.end:
                task.cancel()
                raise NotReady(end)
            await asyncio.wait({task}, timeout=POLL_SECONDS)
        return await task

    async def end_within(self, seconds: float) -> str:
        """``end``, once the process has had so long to end by itself."""
        deadline = time.monotonic() + seconds
        while not self.end and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return self.end

    def close(self) -> None:
        """Send SIGTERM, and SIGKILL to what is left of the session."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._log.close()

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerProcess(CommandProcess):
    """Starts ``jaxinfer serve`` on a free port and waits until it is ready.

    Raises ``NotReady`` with the end of the server's log if it exits or does not respond in time.
    """

    def __init__(self, *arguments: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        program = str(Path(sys.executable).with_name("jaxinfer"))
        command = [program, "serve", *arguments, "--host=127.0.0.1", f"--port={port}"]
        start = time.perf_counter()
        super().__init__(command, tempfile.TemporaryFile())  # noqa: SIM115  (closed by ``close``)
        try:
            asyncio.run(self._wait())
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - start

    async def _wait(self) -> None:
        client = Client(self.url)
        deadline = time.monotonic() + READY_SECONDS
        while (await client.get("/ready")).status != 200:
            if self.end or time.monotonic() > deadline:
                raise NotReady(f"the server did not become ready: {self.last_words()}")
            await asyncio.sleep(POLL_SECONDS)
        client.close()

    def __enter__(self) -> ServerProcess:
        return self
