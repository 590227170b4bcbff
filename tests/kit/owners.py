"""Checks that a cache is used only if it is of its owner: its files are given away one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxinfer.core.errors import CacheError

NOBODY = 65534


def check_that_others_are_refused(use: Callable[[], object], cache: Path) -> None:
    """``use`` makes an entry of the cache, or reads it if it is there already.

    It is called with the umask of systems where each user has a group of one's own.
    """
    before = os.umask(0o002)
    try:
        for _ in range(3):  # the second call may write what the third one reads
            use()
        for path in (cache, *cache.rglob("*")):
            _check_refusal(use, path)
        use()
        cache.chmod(0o777)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAXINFER_TRUST_CACHE", "1")
            use()
    finally:
        os.umask(before)


def _check_refusal(use: Callable[[], object], path: Path) -> None:
    status = path.stat()
    path.chmod(status.st_mode | 0o020)
    with pytest.raises(CacheError, match=f"^{re.escape(str(path))} may be written by other users"):
        use()
    path.chmod(status.st_mode)
    if os.geteuid() == 0:  # only root gives files away
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(CacheError, match=f"^{re.escape(str(path))} belongs to the user"):
            use()
        os.chown(path, status.st_uid, status.st_gid)
