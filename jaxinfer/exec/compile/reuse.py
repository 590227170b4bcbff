"""Takes executables for a new bundle from the cache, which is a folder of bundles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.exec.compile.bundle import FORMAT, Manifest, StoredExecutable, checked_content
from jaxinfer.exec.compile.fingerprint import Fingerprint
from jaxinfer.exec.compile.program import Program


def take_cached(
    program: Program, cache: Path, folder: Path, progress: Progress
) -> dict[str, StoredExecutable]:
    """Copy the executables of ``program`` that bundles in ``cache`` have; their records by name.

    The buckets of the other bundle may differ: an executable depends on its own bucket only, which
    its name states. A damaged file is left alone, with a line that names it.
    """
    wanted, taken = Fingerprint.of(program), dict[str, StoredExecutable]()
    for path, manifest in _manifests(cache):
        if manifest.format != FORMAT or _without_buckets(manifest.fingerprint) != _without_buckets(
            wanted
        ):
            continue
        for name in program.names():
            stored = manifest.executables.get(name)
            if stored is None or name in taken:
                continue
            try:
                content = checked_content(path, stored)
            except CacheError as error:
                progress.note(f"not taken from the cache: {error}")
                continue
            (folder / stored.file).write_bytes(content)
            taken[name] = stored
    return taken


def _manifests(cache: Path) -> Iterator[tuple[Path, Manifest]]:
    """The bundles of this version in a folder, the newest first."""
    paths = [path for path in cache.glob(f"*/{BUNDLE_MANIFEST}") if ".partial" not in str(path)]
    for path in sorted(paths, key=lambda one: -os.path.getmtime(one)):
        try:
            yield path.parent, msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError):
            continue


def _without_buckets(made: Fingerprint) -> Fingerprint:
    limits = {name: value for name, value in made.limits.items() if name != "buckets"}
    return msgspec.structs.replace(made, limits=limits)
