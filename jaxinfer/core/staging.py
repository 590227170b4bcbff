"""Folders of the cache that are either complete or absent, or grow file by file under a lock.

An entry is built in ``<entry>.partial`` under an exclusive lock on ``<entry>.lock`` and renamed
when it is complete; then the lock file is removed. The system releases the lock of a killed
process, so a process that holds the lock and finds a partial folder removes it. A second process
that needs the entry waits for the lock and then uses the entry.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxinfer.core.errors import CacheError

OTHER_CACHE = "choose another cache folder with JAXINFER_CACHE_DIR"


def build_once(entry: Path, fill: Callable[[Path], None], *, elsewhere: str = OTHER_CACHE) -> bool:
    """Create the folder ``entry`` unless it exists; ``fill`` writes the contents into a folder.

    Returns whether ``fill`` ran. If it raises, nothing is left behind. Raises ``CacheError`` if the
    folder cannot be written; ``elsewhere`` is the part of its message on how to choose another one.
    """
    with _cache_errors(entry, elsewhere):
        if entry.is_dir():
            return False
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(entry.name + ".lock")):
            if entry.is_dir():  # another process has built it
                return False
            _build(entry, fill)
    return True


def prepare_folder(folder: Path) -> None:
    """Create a folder for entries; raises ``CacheError`` if it is not writable."""
    with _cache_errors(folder, OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def locked_folder(folder: Path) -> Generator[None]:
    """Create a folder to which files are added one by one, and hold its lock in the scope.

    It is removed if nothing was added. Raises ``CacheError`` if it cannot be written.
    """
    with _cache_errors(folder, OTHER_CACHE):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            folder.mkdir(exist_ok=True)
            try:
                yield
            finally:
                with suppress(OSError):  # there are files in it
                    folder.rmdir()


@contextmanager
def _cache_errors(path: Path, elsewhere: str) -> Generator[None]:
    """Raise an ``OSError`` of the block as ``CacheError``."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write {path} ({error.strerror or error}); make room, make the folder "
            f"writable, or {elsewhere}"
        ) from error


def _build(entry: Path, fill: Callable[[Path], None]) -> None:
    partial = entry.with_name(entry.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        fill(partial)
        _flush(partial)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush_folder(entry.parent)


def _flush(folder: Path) -> None:
    """Flush files and folders to the disk: a rename must not reach it before the contents do."""
    for path, _, names in os.walk(folder):
        for name in names:
            flush(Path(path, name))
        _flush_folder(Path(path))


def flush(file: Path) -> None:
    """Flush a file to the disk, before something names it that must not be there without it."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file, and remove the file afterwards.

    If the previous holder removed the file while this process waited, the lock is of no use and a
    new file is locked.
    """
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
