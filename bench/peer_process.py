"""A peer engine in a child process with its own interpreter; see ``peers/line_server.py``."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class PeerUnavailable(Exception):
    """A peer that cannot be measured here; the message says why."""


class Run(NamedTuple):
    """One timed call of an engine."""

    seconds: float
    token_ids: list[list[int]]  # of each answer


class PeerProcess:
    """Starts a peer and waits until it has loaded its model; a context manager that ends it.

    Raises ``PeerUnavailable`` if the interpreter or its packages are missing or loading fails.
    """

    def __init__(self, python: str, script: Path, *arguments: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the peer)
        try:
            self._process = subprocess.Popen(
                [python, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerUnavailable(f"not installed ({error})") from error
        try:
            greeting = self._answer()
            if missing := greeting.get("missing"):
                raise PeerUnavailable(f"not installed ({missing})")
        except PeerUnavailable:
            self.close()
            raise
        self.versions: dict[str, str] = greeting["versions"]
        self.facts: dict[str, Any] = greeting["facts"]

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def run(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """Continue all prompts together; the clock runs in the child."""
        assert self._process.stdin is not None
        command = {"prompts": prompts, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Run(answer["seconds"], answer["token_ids"])

    def close(self) -> None:
        """End the child."""
        self._process.communicate()  # it exits at the end of stdin
        self._stderr.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerUnavailable(f"ended with status {self._process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if error := answer.get("error"):
            raise PeerUnavailable(f"failed: {error}")
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"
