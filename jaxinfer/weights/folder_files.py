"""Which safetensors files of a Hugging Face folder belong to its model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError, SourceError
from jaxinfer.core.json_text import read_json

FILE_NAME = "model.safetensors"
_INDEX_END = ".safetensors.index.json"
INDEX_NAME = "model" + _INDEX_END
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Files next to a model's own that do not belong to it: Mistral's own layout, adapters, and the same
# weights in another dtype.
_OTHER_LAYOUT = re.compile(r"consolidated|adapter_")
_VARIANT = re.compile(r"model\.\w+(-\d+-of-\d+)?\.safetensors|model-\d+-of-\d+\.\w+\.safetensors")


def checkpoint_files(
    folder: Path, named: object = None, names: Collection[str] | None = None
) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face folder that hold its model, in order.

    As in transformers: the file or index that config.json names (``named``, the value of its key
    ``transformers_weights``), else model.safetensors, else the files that the index lists. Without
    any of these, the numbered shards, or else all safetensors files that are not of another layout.
    ``names`` are those of all files of a folder that has only its indices yet (None: those in it).
    Raises ``SourceError`` if there is none and ``CheckpointError`` if a shard is missing.
    """

    def is_there(path: Path) -> bool:
        return path.is_file() if names is None else str(path.relative_to(folder)) in names

    if named is not None:
        return _named_files(folder, named, is_there)
    if is_there(folder / FILE_NAME):
        return (folder / FILE_NAME,)
    if is_there(folder / INDEX_NAME):
        return _indexed_files(folder / INDEX_NAME, is_there)
    all_names = [path.name for path in folder.iterdir()] if names is None else names
    found = sorted(name for name in all_names if name.endswith(".safetensors") and "/" not in name)
    if shards := [name for name in found if _SHARD.fullmatch(name)]:
        return _all_shards(folder, shards)
    own = [name for name in found if not _OTHER_LAYOUT.match(name)]
    plain = [name for name in own if not _VARIANT.fullmatch(name)]
    if plain or own:
        return tuple(folder / name for name in plain or own)
    raise SourceError(_no_files_message(folder, found))


def _no_files_message(folder: Path, others: list[str]) -> str:
    if others:
        return (
            f"{folder} holds {', '.join(others)}, another layout or an adapter, and no "
            f"{FILE_NAME}; add the model's own files (save_pretrained of transformers writes them)"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{folder} holds only pickled weights, which can run code when read; convert them to "
            "safetensors (save_pretrained of transformers writes them)"
        )
    return (
        f"{folder} holds no *.safetensors file; copy the weights there, "
        "or use load_format='dummy' for random ones"
    )


def _named_files(folder: Path, named: object, is_there: Callable[[Path], bool]) -> tuple[Path, ...]:
    """The file or indexed files that config.json names, which must be inside the folder."""
    if not isinstance(named, str) or not named.endswith((".safetensors", _INDEX_END)):
        raise SourceError(
            f"config key 'transformers_weights' is {short(named)}; it must name a .safetensors "
            "file or an index of such files"
        )
    path = folder / named
    if is_outside(named) or not is_there(path):
        raise SourceError(
            f"config key 'transformers_weights' names {named[:200]}, and {folder} holds no "
            "such file; copy it there or remove the key"
        )
    return _indexed_files(path, is_there) if named.endswith(_INDEX_END) else (path,)


def _all_shards(folder: Path, names: list[str]) -> tuple[Path, ...]:
    """Shards without an index; their names contain their number."""
    total = names[0].removesuffix(".safetensors").rpartition("-")[2]
    expected = [f"model-{i + 1:0{len(total)}d}-of-{total}.safetensors" for i in range(int(total))]
    if names != expected:
        odd = sorted(set(expected) ^ set(names))[0]
        raise CheckpointError(
            f"{folder} holds {len(names)} shards of {total}, and {odd} is "
            f"{'missing; download it' if odd in expected else 'of another checkpoint; remove it'}"
        )
    return tuple(folder / name for name in names)


def _indexed_files(index: Path, is_there: Callable[[Path], bool]) -> tuple[Path, ...]:
    """The files that an index lists, which must be inside its folder."""
    try:
        content = read_json(index)
    except ValueError as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({error}); download it again or delete it"
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    named: list[Any] = [*weight_map.values()] if isinstance(weight_map, dict) else []
    if not named or not all(isinstance(name, str) for name in named):
        raise CheckpointError(
            f"{index} is not a safetensors index: its weight_map does not name a file for each "
            "tensor; download it again or delete it"
        )
    names = sorted(set(named))
    for name in names:
        if is_outside(name):
            raise CheckpointError(
                f"{index} names {short(name)}, which is outside its folder; use an index that "
                "names files next to it"
            )
        if not is_there(index.parent / name):
            raise CheckpointError(
                f"{index.parent / name} is missing although {index.name} names it; "
                "download that shard"
            )
    return tuple(index.parent / name for name in names)


def is_outside(name: str) -> bool:
    """True if a file's name leads out of the folder that it is relative to.

    Only the name counts: in Hugging Face's cache a folder holds links that lead out.
    """
    return os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir
