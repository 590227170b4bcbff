"""``jaxinfer serve`` in a process of its own, over a simulated device or a model on disk.

Owns: ``ServerProcess`` and the commands that start one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kit.sim_executor import FOLDER, SIM_PROGRAM

SECONDS = 60.0  # for a start; other waits are shorter
READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+) ")
SERVE = (sys.executable, "-c", "from jaxinfer.cli.main import main; main()", "serve")
SIM_SERVE = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = [{str(FOLDER)!r}]; from kit import server_process; "
    "server_process.sim_main()",
    "serve",
)


def sim_main() -> None:
    """The command line with simulated engines; the model argument is the script."""
    from jaxinfer.cli.main import main
    from jaxinfer.engine.link import spawn

    spawn.spawn = partial(spawn.spawn, program=SIM_PROGRAM)
    main()


def sim_arguments(step_seconds: float, num_seqs: int = 64) -> tuple[str, ...]:
    """Arguments for ``SIM_SERVE``."""
    script = json.dumps({"step_seconds": step_seconds, "trace_file": ""})
    return ("--model", script, "--max-num-seqs", str(num_seqs), "--served-model-name", "sim")


class ServerProcess:
    """A server that is ready. ``lines`` has its stderr."""

    def __init__(self, command: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.port = 0
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def engine(self) -> int:
        """The engine's process, the first that the server starts."""
        return min(self.children)

    @property
    def children(self) -> list[int]:
        """Processes that the server has started and that still run."""
        return [pid for pid in _pids() if _parent(pid) == self.pid]

    def wait_ready(self) -> ServerProcess:
        """Return once the server reports that it is ready."""
        wait_until(lambda: bool(self.port) or self._process.poll() is not None, "ready", SECONDS)
        assert self.port, self.lines
        return self

    def signal(self, number: int) -> None:
        """Send a signal to the server alone."""
        self._process.send_signal(number)

    def exit_code(self, seconds: float = 20.0) -> int:
        """Wait for the end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.lines[-20:]}") from None

    def close(self) -> None:
        """Kill the server if it still runs."""
        self._process.kill()
        self._process.wait()
        self._reader.join(10)  # ends with the last process that may write
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.port = int(found[1])


@contextmanager
def server_process(*command: str, port: int = 0) -> Iterator[ServerProcess]:
    """Run one of the commands above with its arguments until it is ready."""
    process = ServerProcess([*command, "--host", "127.0.0.1", "--port", str(port)])
    try:
        yield process.wait_ready()
    finally:
        process.close()


def wait_until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Return once it is true; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """True if no such process runs."""
    return _parent(pid) == 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _parent(pid: int) -> int:
    """The parent of a running process, else 0 (also of a zombie)."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(parent)
