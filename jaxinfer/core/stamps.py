"""Whether a file is the one whose hash is known, without reading it at every start.

A file's *stamp* changes whenever it is written, moved or copied, also if its modification time is
set back: the change time of an inode cannot be set. A file with another stamp is hashed again.
Damage that no program made, of the disk itself, changes no stamp.

Times of files are coarse (4 ms on Linux), so the stamp of a file that changed just now is not
known: a later change might leave it.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_SETTLED_NS = 1_000_000_000


class Known(NamedTuple):
    """The hash of a file, and its stamp when it was hashed (empty: not known)."""

    sha256: str
    stamp: str = ""


def known(path: Path) -> Known:
    """Hash a file (1 GB/s); raises ``OSError``."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        is_settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Known(digest, _stamp(status) if is_settled else "")


def is_unchanged(path: Path, before: Known) -> bool:
    """True if a file has the stamp of a known one; raises ``OSError``."""
    return before.stamp == _stamp(path.stat())


def _stamp(status: os.stat_result) -> str:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, (status.st_size, *times, status.st_ino, status.st_dev)))
