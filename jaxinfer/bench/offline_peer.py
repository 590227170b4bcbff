"""Another engine's ``generate`` in its own interpreter, for ``jaxinfer bench throughput``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxinfer.bench.offer import NotReady
from jaxinfer.bench.records import Record
from jaxinfer.bench.workload import Query

SCRIPT = Path(__file__).with_name("peer_calls.py")  # given as text: see ``OfflinePeer``
END_SECONDS = 20.0  # that an engine may take to end by itself


class OfflinePeer:
    """A child that answers whole calls; a context manager that ends it and its children.

    ``log`` gets its output. ``wait`` and ``call`` raise ``NotReady`` once it has ended. Python
    looks for modules next to a script first, where ``numbers.py`` and ``profile.py`` are not those
    of the standard library; so the script is given as a text.
    """

    def __init__(
        self, engine: str, python: str, model: str, arguments: Mapping[str, Any], log: Path
    ) -> None:
        self._log, self._process = log, None
        command = [python, "-c", SCRIPT.read_text("utf-8"), engine, model, json.dumps(arguments)]
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    start_new_session=True,
                )
        except OSError as error:
            self._error = f"not installed: {python} ({error.strerror})"

    def wait(self) -> str:
        """Wait until its model is loaded; its version."""
        return str(self._answer()["version"])

    def call(self, queries: Sequence[Query], fields: Mapping[str, Any]) -> list[Record]:
        """One call with these prompts: a record for each, all of the call's duration."""
        asked = {
            "prompts": [one.prompt for one in queries],
            "sampling": [{**fields, "max_tokens": one.max_tokens} for one in queries],
        }
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
        answer = self._answer()
        spent = round(answer["seconds"] * 1e9)
        return [
            Record(gaps_ns=[spent], end_ns=spent, prompt_tokens=prompt, output_tokens=output)
            for prompt, output in answer["counts"]
        ]

    def _answer(self) -> dict[str, Any]:
        if self._process is None:
            raise NotReady(self._error)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            words = " ".join(" / ".join(lines[-3:]).split())[-500:] or "it wrote nothing"
            raise NotReady(f"its process ended with status {self._process.wait()}: {words}")
        return json.loads(line)

    def close(self) -> None:
        """End it: it ends by itself when its input does; then kill what is left of its session."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> OfflinePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
