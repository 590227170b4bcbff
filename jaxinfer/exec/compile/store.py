"""The executables of a program in the cache: a bundle to which executables are added.

Each is added as soon as it is compiled, so a start that is ended early leaves what it has compiled
to the next one. An executable depends only on its own bucket, which its name states, so programs
that differ only in their buckets share the folder. One process at a time adds, under a lock.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.owners import check_parents, check_tree
from jaxinfer.core.staging import flush, locked_folder
from jaxinfer.exec.compile.bundle import (
    Bundle,
    StoredExecutable,
    open_bundle,
    read_manifest,
    write_manifest,
)
from jaxinfer.exec.compile.fingerprint import Fingerprint
from jaxinfer.exec.compile.memory_plan import MemoryPlan
from jaxinfer.exec.compile.program import Program

EXECUTABLES = "executables"  # the folder of the cache


@dataclass(frozen=True)
class Store:
    """The folder of a program's executables; it may not exist yet."""

    program: Program
    memory: MemoryPlan
    cache: Path  # the root of the cache
    folder: Path

    @classmethod
    def of(cls, program: Program, memory: MemoryPlan, cache: Path) -> Store:
        """The store of a program in the cache.

        Every source file is read to compute the folder's name.
        """
        digest = Fingerprint.of(program).without_buckets().digest()
        return cls(program, memory, cache, cache / EXECUTABLES / digest)

    def bundle(self) -> Bundle | None:
        """The executables that are saved, also those of other buckets; None without any.

        Raises ``CacheError`` if one is damaged.
        """
        return open_bundle(self.folder) if self._has_some else None

    def saved(self) -> dict[str, StoredExecutable]:
        """The saved executables of the program, by name in the program's order; their files are
        not checked.

        Raises ``CacheError`` if the list of them is damaged.
        """
        found = self._all_saved()
        return {name: found[name] for name in self.program.names() if name in found}

    @property
    def _has_some(self) -> bool:
        """Raises ``CacheError`` if another user may change what is there: it is code."""
        # unlike Path.is_file, no error for a folder that cannot be: creating it says what is wrong
        if not os.path.isfile(self.folder / BUNDLE_MANIFEST):
            return False
        check_parents(self.folder, self.cache)
        check_tree(self.folder)
        return True

    def _all_saved(self) -> dict[str, StoredExecutable]:
        return read_manifest(self.folder).executables if self._has_some else {}

    @contextmanager
    def adding(self) -> Generator[None]:
        """Wait until no other process adds executables, and be the one that does in this scope.

        Raises ``CacheError`` if the folder cannot be written.
        """
        with locked_folder(self.folder, self.cache):
            yield

    def add(self, name: str, stored: StoredExecutable) -> None:
        """Add an executable whose file is in the folder; the caller is ``adding``."""
        flush(self.folder / stored.file)
        executables = self._all_saved() | {name: stored}
        write_manifest(self.folder, self.program, self.memory, executables, {})
