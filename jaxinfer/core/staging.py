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
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxinfer.core.errors import CacheError
from jaxinfer.core.owners import WRITABLE_BY_OTHERS, check_parents, check_tree

_PRIVATE = 0o700
TRUSTED_FOLDER, TRUSTED_FILE = 0o755, 0o644  # modes that ``check_owner`` accepts
OTHER_CACHE = "choose another cache folder with JAXINFER_CACHE_DIR"


def build_once(
    entry: Path,
    fill: Callable[[Path], None],
    *,
    root: Path | None = None,
    elsewhere: str = OTHER_CACHE,
    mode: int = 0o777,
) -> bool:
    """Create the folder ``entry`` unless it exists; ``fill`` writes the contents into a folder.

    Returns whether ``fill`` ran. If it raises, nothing is left behind. ``root`` is the folder of
    the cache that the entry is in: what is created there is private, and what is there already must
    belong to this user (``owners``); an entry elsewhere has ``mode``, less the umask. Raises
    ``CacheError`` if the entry is not trusted, or cannot be written; ``elsewhere`` is the part of
    its message on how to choose another folder.
    """
    with _cache_errors(entry, elsewhere):
        if root is not None:
            check_parents(entry, root)
        if entry.is_dir():
            _check_entry(entry, root)
            return False
        _make_folder(entry.parent, root)
        with _locked(entry.with_name(entry.name + ".lock")):
            if entry.is_dir():  # another process has built it
                _check_entry(entry, root)
                return False
            _build(entry, fill, mode, is_private=root is not None)
    return True


def _check_entry(entry: Path, root: Path | None) -> None:
    if root is not None:
        check_tree(entry)


def _make_folder(folder: Path, root: Path | None) -> None:
    """Make a folder and its parents; those in the cache for this user alone, whatever the umask."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        in_cache = root is not None and (one == root or root in one.parents)
        one.mkdir(mode=_PRIVATE if in_cache else 0o777, exist_ok=True)
    folder.mkdir(exist_ok=True)  # an error if it is a file


def prepare_folder(folder: Path, root: Path | None = None) -> None:
    """Create a folder for entries; raises ``CacheError`` if it is not writable. ``root``: see
    ``build_once``.
    """
    with _cache_errors(folder, OTHER_CACHE):
        _make_folder(folder, root)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def locked_folder(folder: Path, root: Path) -> Generator[None]:
    """Create a folder to which files are added one by one, and hold its lock in the scope.

    It is removed if nothing was added. ``root``: see ``build_once``. Raises ``CacheError`` if it is
    not trusted, or cannot be written.
    """
    with _cache_errors(folder, OTHER_CACHE):
        check_parents(folder, root)
        _make_folder(folder.parent, root)
        with _locked(folder.with_name(folder.name + ".lock")):
            _make_folder(folder, root)
            check_tree(folder)
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


def _build(entry: Path, fill: Callable[[Path], None], mode: int, *, is_private: bool) -> None:
    partial = entry.with_name(entry.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=_PRIVATE if is_private else mode)
    try:
        fill(partial)
        if is_private:
            _take_rights(partial)
        _flush(partial)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _flush_folder(entry.parent)


def _take_rights(folder: Path) -> None:
    """Take away the right of other users to write, which a umask such as 002 leaves."""
    for path, folders, files in os.walk(folder):
        for name in folders + files:
            one = Path(path, name)
            mode = stat.S_IMODE(one.stat().st_mode)
            if mode & WRITABLE_BY_OTHERS:
                one.chmod(mode & ~WRITABLE_BY_OTHERS)


def _flush(folder: Path) -> None:
    """Flush files and folders to the disk: a rename must not reach it before the contents do."""
    for path, _, names in os.walk(folder):
        for name in names:
            flush(Path(path, name))
        _flush_folder(Path(path))


def write_trusted(path: Path, content: bytes) -> None:
    """Write a file that only this user may change, whatever the umask."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, TRUSTED_FILE), "wb") as file:
        file.write(content)


def replace_trusted(path: Path, content: bytes) -> None:
    """``write_trusted``, of which other processes see all or nothing."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    write_trusted(partial, content)
    partial.replace(path)


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
