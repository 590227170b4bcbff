"""Cache entries that are either whole or absent.

Owns: how a folder of the cache comes to be.

An entry is built in ``<entry>.partial`` under an exclusive lock on ``<entry>.lock`` and renamed
when whole; the lock file goes then. The system drops the lock of a killed process, so a partial
folder found while holding it belongs to nobody and is removed; a second process that wants the
entry waits and then uses it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from jaxinfer.core.errors import CacheError

OTHER_CACHE = "choose another cache folder with JAXINFER_CACHE_DIR"


def build_once(entry: Path, fill: Callable[[Path], None], *, elsewhere: str = OTHER_CACHE) -> bool:
    """Make sure that the folder ``entry`` exists; ``fill`` writes its contents into a folder.

    Returns whether ``fill`` ran. When it raises, nothing is left behind. Raises ``CacheError``
    when the folder cannot be written; ``elsewhere`` says how to choose another one.
    """
    with _written(entry, elsewhere):
        if entry.is_dir():
            return False
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(entry.name + ".lock")):
            if entry.is_dir():  # another process built it meanwhile
                return False
            _build(entry, fill)
    return True


def prepare_folder(folder: Path) -> None:
    """Make a folder of entries; raises ``CacheError`` when none could be written into it."""
    with _written(folder, OTHER_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _written(what: Path, elsewhere: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write {what} ({error.strerror or error}); make room, make the folder "
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
    """Bring files and folders to the disk: a rename must not outlive what it names."""
    for path, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(path, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(path))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock file, and remove it afterwards.

    Who waited for a file that was removed meanwhile begins again with the one that is there now.
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
