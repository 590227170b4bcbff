"""Whether other users may change a file or a folder that is trusted: executables, weights, keys.

The rule is OpenSSH's (``StrictModes``): it belongs to this user or to root, and neither its group
nor others may write it.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from jaxinfer.core.config import TRUST_CACHE, trusts_cache
from jaxinfer.core.errors import CacheError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_owner(path: Path, *more: Path) -> None:
    """Raise ``CacheError`` if another user owns or may change one of these files and folders.

    Links are followed. Raises ``OSError`` for one that is not there. The user may switch the rule
    off: see ``core.config.trusts_cache``.
    """
    if trusts_cache():
        return
    for one in (path, *more):
        status = one.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise CacheError(
                f"{one} belongs to {_name(status.st_uid)}, not to this user or root, and may hold "
                f"code that would run; use another folder, or set {TRUST_CACHE}=1 if all who may "
                "write there are trusted"
            )
        if status.st_mode & WRITABLE_BY_OTHERS:
            mode = stat.S_IMODE(status.st_mode)
            raise CacheError(
                f"{one} may be written by other users (mode {mode:o}), and may hold code that "
                f"would run; take that right away (chmod go-w), or set {TRUST_CACHE}=1 if all who "
                "may write there are trusted"
            )


def check_tree(folder: Path) -> None:
    """``check_owner`` of a folder and everything in it, except for files that are removed while
    it runs: another process that uses the cache may rename what it has written.
    """
    check_owner(folder)
    for path, folders, files in os.walk(folder):
        for name in folders + files:
            one = Path(path, name)
            try:
                check_owner(one)
            except FileNotFoundError:
                if one.is_symlink():  # to a file that another user could make
                    raise


def check_parents(entry: Path, root: Path) -> None:
    """``check_owner`` of the folders from ``root`` to the one that holds ``entry``; those that are
    there.
    """
    between = [folder for folder in entry.parents if folder == root or root in folder.parents]
    if found := [folder for folder in between if folder.exists()]:
        check_owner(*found)


def _name(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"
