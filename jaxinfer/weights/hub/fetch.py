"""Finds a hub's model in the cache of huggingface-hub, and fetches what is missing of it.

A model that is complete in the cache is used without a request: ``pull`` (``refresh``) asks for a
newer one. huggingface-hub's settings apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from jaxinfer.core.errors import CacheError, SourceError, UnknownArchitectureError
from jaxinfer.core.progress import Progress
from jaxinfer.weights.folder_files import checkpoint_files
from jaxinfer.weights.hub.failures import OFFLINE, not_here, sentences
from jaxinfer.weights.hub.files import (
    CONFIG,
    gguf_parts,
    is_index,
    small_files,
    without_folder_weights,
)
from jaxinfer.weights.hub.names import HubName
from jaxinfer.weights.hub.transfer import Blob, transfer
from jaxinfer.weights.tokenizer_files import read_json_object

_SPARE_BYTES = 64 << 20  # of the disk, for other files that are written at the same time


@dataclass(frozen=True)
class Request:
    """The needed files of a model: all, or without its weights, or its tokenizer alone."""

    name: HubName
    download_dir: Path | None = None  # None: huggingface-hub's cache
    weights: bool = True
    tokenizer_only: bool = False

    @property
    def cache(self) -> Path:
        """The cache folder."""
        return cache_folder(self.download_dir)

    @property
    def repo_folder(self) -> Path:
        """The repository's folder in the cache."""
        from huggingface_hub.file_download import repo_folder_name

        return self.cache / repo_folder_name(repo_id=self.name.repo, repo_type="model")

    def needed(self, names: Iterable[str], snapshot: Path) -> tuple[str, ...]:
        """The files that are needed, of all ``names``; config and indices are in ``snapshot``.

        Raises ``SourceError`` if the repository does not have them.
        """
        names = tuple(names)
        if self.name.quant is not None:
            return gguf_parts(self.name, names)
        small = small_files(names, tokenizer_only=self.tokenizer_only)
        if self.tokenizer_only or not self.weights:
            return small
        if (error := without_folder_weights(self.name, names)) is not None:
            raise error
        named = read_json_object(snapshot / CONFIG).get("transformers_weights")
        weights = checkpoint_files(snapshot, named, frozenset(names))
        return (*small, *(str(path.relative_to(snapshot)) for path in weights))


def cache_folder(download_dir: Path | None) -> Path:
    """The folder of the hub's models: the setting's, or huggingface-hub's own."""
    from huggingface_hub import constants

    return Path(download_dir or constants.HF_HUB_CACHE).expanduser().resolve()


def locate(
    request: Request, progress: Progress, *, refresh: bool = False, offline: bool = False
) -> Path:
    """The folder or GGUF file of a model, fetched if it is not in the cache and not ``offline``.

    Raises ``SourceError``, ``CacheError``, and ``UnknownArchitectureError`` before weights are
    fetched.
    """
    if not refresh and (found := in_cache(request)) is not None:
        return found
    from huggingface_hub import constants

    if offline or constants.is_offline_mode():
        if (found := in_cache(request, of_others=True)) is not None:
            return found
        raise not_here(request.name, "nothing is fetched here" if offline else OFFLINE)
    return _fetched(request, progress)


def in_cache(request: Request, *, of_others: bool = False) -> Path | None:
    """The model's folder or GGUF file if all of it is in the cache; without a request to the hub.

    The list of the repository's files is known if this or another program fetched a snapshot.
    ``of_others``: without it, files that are there are taken as all of them.
    """
    from huggingface_hub import errors, resolve_revision

    name, cache = request.name, request.cache
    try:
        commit = resolve_revision(
            name.repo, revision=name.revision, cache_dir=cache, local_files_only=True
        ).resolved
        snapshot = request.repo_folder / "snapshots" / commit
        sizes = known_sizes(name.repo, commit, cache)
        if sizes is None:
            if not of_others:
                return None
            sizes = dict.fromkeys(str(one.relative_to(snapshot)) for one in snapshot.rglob("*"))
        needed = request.needed(sizes, snapshot)
    except (errors.RevisionResolutionError, errors.HFValidationError, SourceError, OSError):
        return None
    if not needed or not all(_is_whole(snapshot / one, sizes[one]) for one in needed):
        return None
    return snapshot if name.quant is None else snapshot / needed[0]


def known_sizes(repo: str, commit: str, cache: Path) -> Mapping[str, int | None] | None:
    """The bytes of all files of a commit, by name; None if its list is not in the cache."""
    from huggingface_hub import errors, get_cached_repo_tree

    try:
        files = get_cached_repo_tree(repo, revision=commit, cache_dir=cache)
    except errors.CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


@dataclass(frozen=True)
class _Listing:
    """A revision on the hub: its commit, its files, and metadata of its GGUF files."""

    commit: str
    files: Mapping[str, Any]
    gguf: Mapping[str, Any]


def _fetched(request: Request, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    name = request.name
    with sentences(name, "ask"), progress.phase(f"ask the hub about {name}"):
        listing = _listing(name)
    snapshot, files = request.repo_folder / "snapshots" / listing.commit, listing.files
    _remove_damaged(request, listing)
    if name.quant is not None:
        _check_gguf(name, listing.gguf.get("architecture"))
    elif not request.tokenizer_only:
        if request.weights and (error := without_folder_weights(name, files)) is not None:
            raise error
        _get_config(request, listing, progress)
        _check_config(name, snapshot / CONFIG)
    needed = request.needed(files, snapshot)
    if not needed:
        raise SourceError(f"{name} holds no tokenizer; name another repository")
    large = [_blob(request, listing, one) for one in needed if _is_large(files[one])]
    left = [one for one in needed if not (snapshot / one).exists()]
    plain = sum(files[one].size or 0 for one in left if not _is_large(files[one]))
    _check_disk(request, plain + sum(blob.missing_bytes() for blob in large))
    _transfer(name, large, progress)
    with sentences(name, "its small files"), progress.phase(f"get the small files of {name}"):
        folder = snapshot_download(
            name.repo,
            revision=name.revision,
            cache_dir=request.cache,
            allow_patterns=[escape(one) for one in needed],
            tqdm_class=_silent(),
        )
    return Path(folder) if name.quant is None else Path(folder, needed[0])


def _listing(name: HubName) -> _Listing:
    """Ask the hub; raises ``ValueError`` if hashes are none, since they name files in the cache."""
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        name.repo,
        revision=name.revision or constants.DEFAULT_REVISION,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
    files = {file.rfilename: file for file in info.siblings or ()}
    large = [file.lfs.sha256 for file in files.values() if file.lfs is not None]
    small = [file.blob_id for file in files.values() if file.blob_id is not None]
    commit = info.sha or ""
    if not all(re.fullmatch("[0-9a-f]{40}", one) for one in (commit, *small)):
        raise ValueError("no SHA-1")
    if not all(re.fullmatch("[0-9a-f]{64}", one) for one in large):
        raise ValueError("no SHA-256")
    return _Listing(commit, files, info.gguf or {})


def _remove_damaged(request: Request, listing: _Listing) -> None:
    """Remove files of the cache that have another size than the hub says, as after a loss of power;
    huggingface-hub would keep them.
    """
    for file in listing.files.values():
        blob = request.repo_folder / "blobs" / str(file.lfs.sha256 if file.lfs else file.blob_id)
        if blob.is_file() and not _is_whole(blob, file.size):
            blob.unlink()


def _get_config(request: Request, listing: _Listing, progress: Progress) -> None:
    """Fetch config.json and the indices of safetensors, which say what else is needed."""
    from huggingface_hub import hf_hub_download

    name = request.name
    options: dict[str, Any] = {"cache_dir": request.cache, "tqdm_class": _silent()}
    with sentences(name, CONFIG), progress.phase(f"get the config of {name}"):
        for one in listing.files:
            if one == CONFIG or is_index(one):
                hf_hub_download(name.repo, one, revision=listing.commit, **options)


def _check_gguf(name: HubName, architecture: object) -> None:
    """Raise ``UnknownArchitectureError`` if the hub knows the files' architecture, and it is not
    supported.
    """
    if not isinstance(architecture, str):
        return
    from jaxinfer.weights.gguf.config import known_architectures, known_words  # imports JAX

    if architecture not in known_architectures():
        raise UnknownArchitectureError(
            f"{name} is a GGUF of architecture {architecture[:60]}; {known_words(architecture)}"
        )


def _check_config(name: HubName, config: Path) -> None:
    """Raise the error of an architecture that is not supported, with the model's name."""
    from jaxinfer.models.registry import decoder_config, family_for, text_config  # imports JAX

    if config.is_file():
        try:
            family_for(decoder_config(text_config(read_json_object(config))))
        except UnknownArchitectureError as error:
            raise UnknownArchitectureError(f"{name}: {error}") from error


def _is_large(file: Any) -> bool:
    """True if the hub stores a file by its hash, and serves it whole over HTTP."""
    from huggingface_hub import constants

    return file.lfs is not None and (file.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE


def _blob(request: Request, listing: _Listing, file: str) -> Blob:
    from huggingface_hub import hf_hub_url

    lfs, repo = listing.files[file].lfs, request.repo_folder
    return Blob(
        name=file,
        url=hf_hub_url(request.name.repo, file, revision=listing.commit),
        size=lfs.size,
        sha256=lfs.sha256,
        path=repo / "blobs" / lfs.sha256,
        lock=request.cache / ".locks" / repo.name / f"{lfs.sha256}.lock",
    )


def _check_disk(request: Request, num_bytes: int) -> None:
    """Raise ``CacheError`` if the cache's disk has no room for so many bytes."""
    folder = next(one for one in (request.cache, *request.cache.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    if num_bytes and num_bytes + _SPARE_BYTES > free:
        raise CacheError(
            f"{request.name} needs {num_bytes / 1e9:.1f} GB more, and the disk of {folder} has "
            f"{free / 1e9:.1f} GB free; make room, or choose another folder with HF_HOME or "
            "download_dir (--download-dir)"
        )


def _transfer(name: HubName, blobs: Sequence[Blob], progress: Progress) -> None:
    missing = [blob for blob in blobs if blob.missing_bytes()]
    left, whole = sum(blob.missing_bytes() for blob in missing), sum(blob.size for blob in missing)
    if not missing:
        return
    if left < whole:
        here = (whole - left) / 1e6
        progress.note(f"{here:.1f} of {whole / 1e6:.1f} MB of {name} are here already")
    with (
        sentences(name, " and ".join(blob.name for blob in missing[:2])),
        progress.task(f"download {name}", left, "B") as advance,
    ):
        transfer(missing, advance)


def _silent() -> Any:
    """A maker of progress bars that show nothing."""
    from huggingface_hub.utils import tqdm

    return partial(tqdm, disable=True)
