"""The folder of a disk tier: what it belongs to, and that one engine at a time uses it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from jaxinfer.core.errors import CacheError, ConfigError
from jaxinfer.core.owners import check_owner
from jaxinfer.exec.tiers.disk import UNITS

MANIFEST, LOCK = "tier.json", "lock"
SETTING = "kv_offloading_disk"


def check_folder(folder: Path) -> None:
    """Raise ``ConfigError`` if a folder cannot be made, or cannot be written."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{SETTING} {folder} is no folder; name one that the engine may write")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{SETTING} {folder} cannot be written by this user; name another folder")
    if folder.exists():
        try:
            check_owner(folder)
        except CacheError as error:
            raise ConfigError(f"{SETTING}: {error}") from error


def opened(folder: Path, identity: Mapping[str, str]) -> IO[str]:
    """Make the folder one of engines of this identity, and lock it while the result is open.

    Raises ``ConfigError``, naming the field, if it has units of another identity, or if another
    engine uses it.
    """
    check_folder(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"{SETTING} {folder} cannot be used: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"{SETTING} {folder} is used by another engine; name a folder for each"
        ) from error
    try:
        _check_identity(folder, identity)
        (folder / UNITS).mkdir(mode=0o700, exist_ok=True)
    except BaseException:
        lock.close()
        raise
    return lock


def _check_identity(folder: Path, identity: Mapping[str, str]) -> None:
    """Compare what the folder belongs to, or write it down."""
    manifest, advice = folder / MANIFEST, "name another folder, or delete this one"
    if manifest.exists():
        try:
            found = dict(json.loads(manifest.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{manifest} cannot be read: {error}; {advice}") from error
        for name, value in identity.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{SETTING} {folder} has pages of {name} {found.get(name)!r}, and this engine "
                    f"has {value!r}; {advice}"
                )
        return
    if (folder / UNITS).exists():  # it is made after the manifest
        raise ConfigError(f"{SETTING} {folder} has pages and no {MANIFEST}; {advice}")
    partial = manifest.with_suffix(".partial")
    partial.write_text(json.dumps(dict(identity), indent=1))
    partial.rename(manifest)
