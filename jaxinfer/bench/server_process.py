"""A ``jaxinfer serve`` process for the duration of a measurement: start, wait until ready, end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxinfer.bench.client import Client

READY_SECONDS = 300.0
END_SECONDS = 60.0


class ServerProcess:
    """Starts ``jaxinfer serve`` on a free port; a context manager that ends it.

    Raises ``RuntimeError`` with the end of the server's log if it exits or does not respond before
    it is ready.
    """

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        command = [str(Path(sys.executable).with_name("jaxinfer")), "serve", *arguments]
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--host=127.0.0.1", f"--port={port}"], stdout=self._log, stderr=self._log
        )
        try:
            asyncio.run(self._wait())
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - start

    @property
    def pid(self) -> int:
        """The id of the started process; its children hold the rest of its memory."""
        return self._process.pid

    async def _wait(self) -> None:
        client = Client(self.url)
        deadline = time.monotonic() + READY_SECONDS
        while (await client.get("/ready")).status != 200:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready: {self._last_words()}")
            await asyncio.sleep(0.05)
        client.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        """Send SIGTERM, and SIGKILL if the server does not exit."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
