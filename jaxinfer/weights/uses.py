"""Records of what the cache holds for a model: converted weights and executables.

``uses/HASH`` has a line for each file of the model's weights and for each folder of the cache that
was made for it. Executables may be made for several models with equal configs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.core.errors import CacheError
from jaxinfer.core.owners import check_owner, check_parents
from jaxinfer.core.staging import prepare_folder, replace_trusted

_FOLDER = "uses"
_FILE, _MADE = "file ", "made "


@dataclass(frozen=True)
class Use:
    """The files of a model's weights, and the folders of the cache that were made for them."""

    record: Path
    files: frozenset[Path]
    made: frozenset[Path]


def note_use(cache_dir: Path, files: Sequence[Path], made: Path) -> None:
    """Record that a folder of the cache is for the model of these files.

    A cache that cannot be written is passed over, as nothing but ``list`` and ``rm`` reads records.
    Raises ``CacheError`` if another user may change the record.
    """
    if not files:
        return
    listed = [f"{_FILE}{file}" for file in files]
    name = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:32]
    record, line = cache_dir / _FOLDER / name, f"{_MADE}{made.relative_to(cache_dir)}"
    with suppress(OSError, ValueError):
        _check(record, cache_dir)
        lines = record.read_text("utf-8").splitlines() if record.is_file() else listed
        if line not in lines:
            with suppress(CacheError):
                prepare_folder(record.parent, cache_dir)
            replace_trusted(record, "\n".join([*lines, line]).encode())


def uses(cache_dir: Path) -> tuple[Use, ...]:
    """All records that can be read; raises ``CacheError`` if another user may change one."""
    found: list[Use] = []
    folder = cache_dir / _FOLDER
    for record in sorted(folder.iterdir()) if folder.is_dir() else ():
        _check(record, cache_dir)
        try:
            lines = record.read_text("utf-8").splitlines()
        except (OSError, ValueError):
            continue
        files = (Path(line.removeprefix(_FILE)) for line in lines if line.startswith(_FILE))
        made = (cache_dir / line.removeprefix(_MADE) for line in lines if line.startswith(_MADE))
        inside = (path for path in made if path.resolve().is_relative_to(cache_dir.resolve()))
        found.append(Use(record, frozenset(files), frozenset(inside)))
    return tuple(found)


def _check(record: Path, cache_dir: Path) -> None:
    check_parents(record, cache_dir)
    if record.is_file():
        check_owner(record)


def made_for(files: Iterable[Path], known: Iterable[Use]) -> tuple[tuple[Use, ...], set[Path]]:
    """The records of models with one of these files, and the folders that only they name."""
    files = frozenset(files)
    own = tuple(use for use in known if use.files & files)
    others = {path for use in known if use not in own for path in use.made}
    return own, {path for use in own for path in use.made} - others


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
