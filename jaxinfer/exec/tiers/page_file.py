"""The file of one unit on disk: a header with a checksum, then its content.

A file is written under another name and renamed when it is complete, so a process that ends at any
moment leaves no half of one; a machine that fails may, which the checksum finds. The name says the
key, and the version of the weights if these have changed since the start of the process.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxinfer.core.connector import Unit, UnitForm
from jaxinfer.core.tiers import DIGEST_SIZE, group_of

MAGIC = b"JIUNIT01"
# checksum of all that follows, bytes of the content, group, length of the key, key, version
_HEADER = struct.Struct("<8sIQHB17s16s")
SUFFIX, PARTIAL = ".unit", ".partial"


class UnitName(NamedTuple):
    """The parts of a file's name."""

    key: bytes
    version: bytes


class DamagedUnit(Exception):
    """A file that does not hold the unit that its name says."""


def path_of(folder: Path, key: bytes, version: bytes) -> Path:
    """The file of a unit; files are divided among 256 folders."""
    ends = f".{version.hex()}" if version else ""
    return folder / f"{key[0]:02x}" / f"{key.hex()}{ends}{SUFFIX}"


def parsed_name(name: str) -> UnitName | None:
    """The parts of a file's name; None if it is no unit's."""
    if not name.endswith(SUFFIX):
        return None
    words, _, version = name.removesuffix(SUFFIX).partition(".")
    try:
        key = bytes.fromhex(words)
        return UnitName(key, bytes.fromhex(version)) if len(key) >= DIGEST_SIZE else None
    except ValueError:
        return None


def file_size(form: UnitForm) -> int:
    """Bytes of the file of a unit."""
    return _HEADER.size + form.num_bytes


def write_unit(path: Path, unit: Unit, version: bytes) -> Path:
    """Write a unit under a name that is not its own, which is returned; raises ``OSError``."""
    fields = (len(unit.content), unit.group, len(unit.key), unit.key, version)
    header = _HEADER.pack(MAGIC, 0, *fields)
    checksum = zlib.crc32(unit.content, zlib.crc32(header[len(MAGIC) + 4 :]))
    partial = path.with_suffix(PARTIAL)
    partial.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with open(partial, "wb", opener=_private) as file:
            file.write(_HEADER.pack(MAGIC, checksum, *fields))
            file.write(unit.content)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return partial


def read_unit(path: Path, key: bytes, version: bytes, form: UnitForm) -> Unit:
    """Read a unit; raises ``DamagedUnit`` with a sentence, or ``OSError``."""
    content = np.empty(file_size(form), np.uint8)
    with path.open("rb", buffering=0) as file:
        count = file.readinto(content)
        if count != len(content) or file.read(1):
            raise DamagedUnit(f"{path} is not of {len(content)} bytes")
    magic, checksum, size, group, length, padded, of = _HEADER.unpack(content[: _HEADER.size])
    if magic != MAGIC or size != form.num_bytes:
        raise DamagedUnit(f"{path} has another header")
    if zlib.crc32(content[len(MAGIC) + 4 :]) != checksum:
        raise DamagedUnit(f"{path} has another checksum")
    if (padded[:length], group, of.rstrip(b"\0")) != (key, group_of(key), version.rstrip(b"\0")):
        raise DamagedUnit(f"{path} holds another unit than its name says")
    return Unit(group, key, content[_HEADER.size :])


def _private(path: str, flags: int) -> int:
    """Open a file that only this user can read: pages tell the prompts."""
    return os.open(path, flags, 0o600)
