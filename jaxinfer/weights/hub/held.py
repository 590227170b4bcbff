"""The models in the hub's cache: what ``list`` shows and ``rm`` removes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.errors import SourceError
from jaxinfer.weights.hub.fetch import Request, cache_folder, in_cache, known_sizes
from jaxinfer.weights.hub.files import files_of, gguf_files
from jaxinfer.weights.hub.names import HubName

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True)
class Held:
    """A model that is in a cache: the reference that loads it, its bytes, and its files."""

    name: str
    size: int
    files: frozenset[Path]
    is_complete: bool = True


def held_of_hub(download_dir: Path | None = None) -> list[Held]:
    """The models of the hub's cache, by name: each revision's folder, and each GGUF file."""
    found: list[Held] = []
    cache = _scanned(download_dir)
    if cache is None:
        return found
    for repo in cache.repos:
        for revision in repo.revisions if repo.repo_type == "model" else ():
            found += _held(repo, revision, download_dir)
    for folder, size in _incomplete(cache).items():
        repo_id = _repo_id(folder)
        of_repo = [one for one in found if one.name.partition("@")[0].partition(":")[0] == repo_id]
        if repo_id is not None and not any(one.is_complete for one in of_repo):
            found = [one for one in found if one not in of_repo]
            found.append(Held(repo_id, size, frozenset(), is_complete=False))
    return sorted({one.name: one for one in found}.values(), key=lambda one: one.name.lower())


def remove_from_hub(name: HubName, download_dir: Path | None = None) -> Held:
    """Remove a repository, one revision or one GGUF file from the hub's cache; returns what it was.

    Raises ``SourceError`` if it is not there.
    """
    request = Request(name, download_dir)
    cache = _scanned(download_dir)
    repos = () if cache is None else cache.repos
    repo = next((one for one in repos if one.repo_path == request.repo_folder), None)
    if cache is None or (repo is None and not request.repo_folder.is_dir()):
        raise _absent(request)
    files = [] if repo is None else _chosen(repo, name, download_dir)
    if repo is not None and not files:
        raise _absent(request)
    blobs = {file.blob_path.resolve(): file.size_on_disk for file in files}
    cache.delete_files(*files).execute()
    left = set() if repo is None else {file for one in repo.revisions for file in one.files}
    if not left - {*files}:
        partial = request.repo_folder.glob("blobs/*.incomplete")
        blobs |= {path: path.stat().st_size for path in partial}
        shutil.rmtree(request.repo_folder, ignore_errors=True)
        shutil.rmtree(request.cache / ".locks" / request.repo_folder.name, ignore_errors=True)
    gone = {path: size for path, size in blobs.items() if not path.exists()}  # others are shared
    return Held(str(name), sum(gone.values()), frozenset(gone))


def _absent(request: Request) -> SourceError:
    return SourceError(
        f"{request.name} is not in the cache {request.cache}; `jaxinfer list` shows what is"
    )


def _scanned(download_dir: Path | None) -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(cache_folder(download_dir))
    except (CacheNotFound, ValueError):
        return None


def _incomplete(cache: HFCacheInfo) -> dict[str, int]:
    """The bytes of broken transfers, by the name of the repository's folder."""
    sizes: dict[str, int] = {}
    for file in cache.incomplete_files:
        folder = file.file_path.parents[1].name
        sizes[folder] = sizes.get(folder, 0) + file.size_on_disk
    return sizes


def _held(
    repo: CachedRepoInfo, revision: CachedRevisionInfo, download_dir: Path | None
) -> Iterable[Held]:
    label = None if "main" in revision.refs else min(revision.refs, default=revision.commit_hash)
    parts: dict[str | None, list[CachedFileInfo]] = {**_of_quants(repo, revision, download_dir)}
    folder = [one for one in revision.files if not one.file_name.lower().endswith(".gguf")]
    if not parts or any(one.file_name.endswith(".safetensors") for one in folder):
        parts[None] = folder
    for quant, members in parts.items():
        name = HubName(repo.repo_id, label, quant)
        yield Held(
            str(name),
            sum(one.size_on_disk for one in members),
            frozenset(one.blob_path.resolve() for one in members),
            in_cache(Request(name, download_dir), of_others=True) is not None,
        )


def _of_quants(
    repo: CachedRepoInfo, revision: CachedRevisionInfo, download_dir: Path | None
) -> dict[str, list[CachedFileInfo]]:
    """The cached GGUF files by the names that they have in the whole repository."""
    here = {str(one.file_path.relative_to(revision.snapshot_path)): one for one in revision.files}
    names = known_sizes(repo.repo_id, revision.commit_hash, cache_folder(download_dir))
    found = {
        quant: [here[file] for file in files if file in here]
        for quant, files in gguf_files(here if names is None else names).items()
    }
    return {quant: members for quant, members in found.items() if members}


def _chosen(repo: CachedRepoInfo, name: HubName, download_dir: Path | None) -> list[CachedFileInfo]:
    """The cached files that a name stands for; without a revision, those of all revisions."""
    chosen: list[CachedFileInfo] = []
    for revision in repo.revisions:
        if name.revision not in (None, revision.commit_hash, *revision.refs):
            continue
        if name.quant is None:
            chosen += revision.files
        else:
            chosen += files_of(name.quant, _of_quants(repo, revision, download_dir)) or ()
    return chosen


def _repo_id(folder: str) -> str | None:
    """``ORG/NAME`` of the name of a repository's folder in the cache."""
    kind, _, rest = folder.partition("--")
    return rest.replace("--", "/", 1) if kind == "models" else None
