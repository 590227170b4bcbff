"""The file of a recording: framed records with checksums, in a ring of two files.

A file begins with a line of text that names the format and its version. Each record after it is
its length and its CRC-32 (uint32, little endian), then a body in msgpack. The first record is the
``Header``, the second one a state of the scheduler, from which the calls after it are replayed. So
each file can be replayed alone.

The ring: once FILE has half of the allowed bytes, it is renamed to FILE.1, which replaces an older
one, and a new FILE begins. A rename is atomic, and a record whose end is missing is found by its
length or its checksum, so the process may be killed at any moment.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import RecordingError
from jaxinfer.core.limits import Limits

VERSION = 4  # of the format; raised by every change of it, and of the records in it
MAGIC = b"jaxinfer recording "
OLDER = ".1"  # behind the name of the ring's other file
PREVIOUS = ".previous"  # behind the name of the recording of the run before
_HEAD = 8  # bytes before a body
_LONGEST_BODY = 1 << 31


class Header(msgspec.Struct, frozen=True):
    """The engine that was recorded, and its machine."""

    run: str  # a random name of the engine's run, which the files of a ring share
    number: int  # of the file in the run, from 0
    jaxinfer: str  # the version
    config: EngineConfig
    limits: Limits
    model: str  # the name of the model
    model_fields: dict[str, str]  # ``exec.compile.fingerprint.of_model``; empty without a model
    weights: str  # ``ModelSource.fingerprint``
    machine: dict[str, str]  # ``exec.compile.fingerprint.of_machine``
    overlap: bool
    is_redacted: bool = False


class FileWriter:
    """Writes one file; raises ``OSError``."""

    def __init__(self, path: Path, header: Header) -> None:
        self.num_bytes = 0
        self._file = path.open("wb")
        try:
            os.fchmod(self._file.fileno(), 0o600)  # prompts are in it
            self._write(MAGIC + b"%d\n" % VERSION)
            self.add(msgspec.msgpack.encode(header))
        except OSError:
            self._file.close()
            raise

    def add(self, body: bytes) -> None:
        """Write a record."""
        size, checksum = len(body), zlib.crc32(body)
        self._write(size.to_bytes(4, "little") + checksum.to_bytes(4, "little"))
        self._write(body)

    def flush(self) -> None:
        """Pass all to the system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)


class FileReader:
    """Reads one file. ``header`` is read at once; raises ``RecordingError`` if there is none.

    ``is_torn`` is True once ``bodies`` has ended at a record that is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_torn = path, False
        try:
            self._data = memoryview(path.read_bytes())
        except OSError as error:
            raise RecordingError(
                f"the recording {path} cannot be read ({error.strerror}); check the path"
            ) from error
        self._at = self._begin()
        body = next(self.bodies(), None)
        if body is None:
            raise RecordingError(f"the recording {path} ends within its first record; it is empty")
        try:
            self.header = msgspec.msgpack.decode(body, type=Header)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RecordingError(
                f"the recording {path} has a first record that cannot be read ({error}); replay it "
                "with the version of jaxinfer that wrote it"
            ) from error

    def bodies(self) -> Iterator[memoryview]:
        """The bodies of the next records, up to the end of the file or one that is not whole."""
        while self._at < len(self._data):
            head = self._data[self._at : self._at + _HEAD]
            size = int.from_bytes(head[:4], "little")
            body = self._data[self._at + _HEAD : self._at + _HEAD + size]
            checksum = int.from_bytes(head[4:], "little")
            if len(head) < _HEAD or len(body) < size or zlib.crc32(body) != checksum:
                self.is_torn = True
                return
            self._at += _HEAD + size
            yield body

    def _begin(self) -> int:
        """The place of the first record; raises ``RecordingError`` for another kind of file."""
        line = bytes(self._data[:64]).partition(b"\n")[0]
        number = line.removeprefix(MAGIC)
        if not line.startswith(MAGIC) or not number.isdigit():
            raise RecordingError(
                f"{self.path} is no recording; give a file that --record has written"
            )
        if int(number) != VERSION:
            raise RecordingError(
                f"the recording {self.path} has version {int(number)} of the format, and this "
                f"jaxinfer reads version {VERSION}; replay it with the jaxinfer that wrote it"
            )
        return len(line) + 1


def older(path: Path) -> Path:
    """The ring's other file, which has what was before."""
    return path.with_name(path.name + OLDER)


def keep_previous(path: Path) -> None:
    """Rename the files of an earlier run, whose engine may have failed and been started again, to
    FILE.previous; those that have this name are replaced. Raises ``OSError``.
    """
    previous = path.with_name(path.name + PREVIOUS)
    if path.exists() and path.stat().st_size:
        older(previous).unlink(missing_ok=True)
        path.replace(previous)
        if older(path).exists():
            older(path).replace(older(previous))
    older(path).unlink(missing_ok=True)  # not to be taken for the older part of this run


def open_ring(path: Path) -> list[FileReader]:
    """The files of a recording in the order of time: FILE.1, if it is of the same run, and FILE.

    Raises ``RecordingError``.
    """
    newest = FileReader(path)
    try:
        before = FileReader(older(path))
    except RecordingError:
        return [newest]
    same = before.header.run == newest.header.run
    return [before, newest] if same else [newest]


def plain(body: memoryview) -> Any:
    """A body as builtin values; raises ``RecordingError``."""
    try:
        return msgspec.msgpack.decode(body)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"a record of the recording is no msgpack ({error})") from error
