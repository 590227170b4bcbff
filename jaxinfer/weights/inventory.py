"""The models that are in the caches, and how one is removed with what was made for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxinfer.core.errors import SourceError
from jaxinfer.weights import wheel
from jaxinfer.weights.catalog import find_model, known_models
from jaxinfer.weights.hub.held import Held, held_of_hub, remove_from_hub
from jaxinfer.weights.locate import Places, hub_folder, hub_name
from jaxinfer.weights.uses import folder_bytes, made_for, uses


@dataclass(frozen=True)
class Stored:
    """A model in a cache: its short names, and the bytes of the cache's folders made for it."""

    held: Held
    short_names: tuple[str, ...]
    converted_bytes: int
    executable_bytes: int


def stored_models(places: Places) -> list[Stored]:
    """The models in wheels and from the hub that are in the caches, by name."""
    held = [*_held_of_wheels(places.cache_dir), *held_of_hub(hub_folder(places))]
    known = uses(places.cache_dir)
    found: list[Stored] = []
    for one in held:
        made = {path for use in known if use.files & one.files for path in use.made}
        sizes = [
            sum(folder_bytes(path) for path in made if path.parent.name == kind)
            for kind in ("converted", "executables")
        ]
        found.append(Stored(one, _short_names(one.name), *sizes))
    return found


def remove(reference: str, places: Places) -> tuple[Held, int]:
    """Remove a model from its cache, and what was made for it alone.

    Returns what was removed and the bytes of what was made for it. Raises ``SourceError`` if the
    model is not in a cache, or cannot be removed.
    """
    try:
        return _removed(reference, places)
    except OSError as error:
        raise SourceError(
            f"cannot remove {reference[:200]} ({error.strerror}); correct the name or the "
            "permissions"
        ) from error


def _removed(reference: str, places: Places) -> tuple[Held, int]:
    entry = find_model(reference)
    source = reference if entry is None else entry.source
    if (name := hub_name(source, places.revision)) is not None:
        held = remove_from_hub(name, hub_folder(places))
    elif source.startswith(wheel.PREFIX):
        held = _remove_wheel(source, places.cache_dir)
    elif Path(source).exists():
        raise SourceError(f"{reference} is a file or folder of your own; remove it yourself")
    else:
        raise SourceError(f"{reference} is in no cache; `jaxinfer list` shows what is")
    records, folders = made_for(held.files, uses(places.cache_dir))
    size = sum(folder_bytes(folder) for folder in folders)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for use in records:
        use.record.unlink(missing_ok=True)
    return replace(held, name=reference), size


def _held_of_wheels(cache_dir: Path) -> Iterator[Held]:
    for file in sorted(cache_dir.glob(f"{wheel.DOWNLOADS}/*/*/*.gguf")):
        package, _, version = file.parents[1].name.rpartition("-")
        name = f"{wheel.PREFIX}{package}=={version}/{file.name}"
        yield Held(name, file.stat().st_size, frozenset((file.resolve(),)))


def _remove_wheel(source: str, cache_dir: Path) -> Held:
    entry = wheel.entry_folder(wheel.parse_reference(source), cache_dir)
    if not entry.is_dir():
        raise SourceError(f"{source} is not in the cache; `jaxinfer list` shows what is")
    files = frozenset(file.resolve() for file in entry.iterdir())
    size = folder_bytes(entry)
    shutil.rmtree(entry)
    if not any(entry.parent.iterdir()):
        entry.parent.rmdir()
    return Held(source, size, files)


def _short_names(name: str) -> tuple[str, ...]:
    entries = ((short, find_model(short)) for short in known_models())
    return tuple(short for short, entry in entries if entry is not None and entry.source == name)
