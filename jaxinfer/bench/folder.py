"""The folder of a run: records, environment, logs, report, page, and the hashes of all files.

    run.json            what was asked; a series for each server and load
    records/NAME.jsonl  a record for each request of a series
    machine/NAME.jsonl  the GPUs' use, power and memory, several times a second
    profile.json        with --profile: each kernel with its op and step; trace/: JAX's own files
    environment.json    machine, versions, commit
    NAME.log            what a server wrote
    result.json         every figure and verdict, from the records alone
    report.md           the same for a reader; report.html with plots
    SHA256SUMS          of all other files, for `sha256sum -c` too

Each file is written whole or not at all, so a run that is killed leaves the series before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.bench.circumstances import host_circumstances
from jaxinfer.bench.monitor import Sample
from jaxinfer.bench.page import page_text
from jaxinfer.bench.profile_table import Profiled, read_profiled
from jaxinfer.bench.records import (
    MISSING,
    PARTIAL,
    Record,
    Run,
    Series,
    as_lines,
    read_lines,
    read_run,
)
from jaxinfer.bench.report import report_text
from jaxinfer.bench.results import results_of
from jaxinfer.core.errors import BenchError

RUN, RESULT, ENVIRONMENT = "run.json", "result.json", "environment.json"
REPORT, PAGE, SUMS = "report.md", "report.html", "SHA256SUMS"
PROFILE, TRACE = "profile.json", "trace"


class Folder:
    """A run's folder, while it is written."""

    def __init__(self, path: Path, run: Run, environment: Mapping[str, Any] | None = None) -> None:
        self.path, self.run = path, run
        self.environment: dict[str, Any] = {**host_circumstances(), **(environment or {})}

    @classmethod
    def create(cls, path: Path, run: Run, environment: Mapping[str, Any] | None = None) -> Folder:
        """A new folder; raises ``BenchError`` if there is one with files or it cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise BenchError(f"{path} has files; name another --output")
        except OSError as error:
            raise BenchError(
                f"{path} cannot be written ({error.strerror}); name another --output"
            ) from error
        folder = cls(path, run, environment)
        folder._write_run()
        return folder

    @classmethod
    def resume(cls, path: Path, run: Run, environment: Mapping[str, Any] | None = None) -> Folder:
        """The folder of an earlier run with its complete series; raises ``BenchError`` if that run
        had other settings.
        """
        before = read_folder(path)
        changed = sorted(
            name
            for name in before.run.settings.keys() | run.settings.keys()
            if before.run.settings.get(name) != run.settings.get(name)
        )
        if changed:
            raise BenchError(
                f"{path} was measured with another {', '.join(changed)}; give the same settings, "
                "or another --output"
            )
        run.series = [one for one in before.run.series if one.state not in (PARTIAL, MISSING)]
        return cls(path, run, environment)

    def add(
        self, series: Series, records: Sequence[Record], samples: Sequence[Sample] = ()
    ) -> None:
        """Write the records of a series, in place of earlier ones of its name."""
        files = {"records": records, "machine": samples} if samples else {"records": records}
        for name, lines in files.items():
            path = self.path / name / f"{series.name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            write_whole(path, as_lines(lines))
        self.run.series = [one for one in self.run.series if one.name != series.name]
        self.run.series.append(series)
        self._write_run()

    def records(self) -> dict[str, list[Record]]:
        """The records of each series, read from the files."""
        return {one.name: _records_in(self.path, one) for one in self.run.series}

    def log_path(self, name: str) -> Path:
        """Where the log of a server goes."""
        return self.path / f"{name}.log"

    def add_profile(self, profiled: Profiled) -> None:
        """Write the rows of a profile, from which the result has a table."""
        write_whole(self.path / PROFILE, msgspec.json.encode(profiled) + b"\n")

    def _write_run(self) -> None:
        write_whole(self.path / RUN, msgspec.json.format(msgspec.json.encode(self.run)) + b"\n")

    def finish(self) -> dict[str, Any]:
        """Write result, report, page and hashes; returns the result."""
        self._write_run()
        result = results_of(self.run, self.records(), _profile_in(self.path))
        write_whole(self.path / ENVIRONMENT, _json(self.environment))
        write_whole(self.path / RESULT, _json(result))
        write_whole(self.path / REPORT, report_text(self.run, self.environment, result).encode())
        write_whole(
            self.path / PAGE,
            page_text(self.run, self.environment, result, self.records()).encode(),
        )
        write_whole(self.path / SUMS, sums_of(self.path).encode())
        return result


@contextmanager
def finished(folder: Folder) -> Generator[Folder]:
    """Write the reports when the block ends; after an error the run is marked as partial."""
    try:
        yield folder
    except BaseException as error:
        folder.run.state = PARTIAL
        ended = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        name = "the run was ended" if ended else type(error).__name__
        folder.run.reason = str(error) or name
        folder.finish()
        raise
    if any(one.state != "complete" for one in folder.run.series):
        folder.run.state = PARTIAL
    folder.finish()


class Read(msgspec.Struct):
    """A finished folder, as its files say."""

    run: Run
    environment: dict[str, Any]
    records: dict[str, list[Record]]
    profiled: Profiled | None = None


def read_folder(path: Path) -> Read:
    """Read run, environment and records; raises ``BenchError`` if it is no folder of a run."""
    run = read_run(read_file(path / RUN), str(path / RUN))
    environment: dict[str, Any] = {}
    if (path / ENVIRONMENT).exists():
        try:
            environment = json.loads(read_file(path / ENVIRONMENT))
        except ValueError as error:
            raise BenchError(f"{path / ENVIRONMENT} is not JSON ({error}); run it again") from error
    records = {one.name: _records_in(path, one) for one in run.series}
    return Read(run, environment, records, _profile_in(path))


def _profile_in(path: Path) -> Profiled | None:
    file = path / PROFILE
    return read_profiled(read_file(file), str(file)) if file.exists() else None


def _records_in(path: Path, series: Series) -> list[Record]:
    file = path / "records" / f"{series.name}.jsonl"
    return read_lines(read_file(file), str(file))


def read_file(path: Path) -> bytes:
    """The bytes of a file; raises ``BenchError`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BenchError(
            f"{path} cannot be read ({error.strerror}); name the folder of a finished run"
        ) from error


def sums_of(path: Path) -> str:
    """A line of ``sha256sum`` for each file but the list itself."""
    files = sorted(
        file for file in path.rglob("*") if file.is_file() and file.relative_to(path) != Path(SUMS)
    )
    return "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(path).as_posix()}\n"
        for file in files
    )


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once, so that a killed process leaves the earlier one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def default_path(command: str) -> Path:
    """A folder of the current one that tells command and time."""
    return Path(f"bench-{command}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
