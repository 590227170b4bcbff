"""How the files of a sentence-transformers folder say that a model makes embeddings.

``modules.json`` lists what follows the decoder: a pooling, whose folder has a ``config.json``, and
perhaps a normalisation. What would change the vectors and is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError, SourceError
from jaxinfer.core.json_text import read_json
from jaxinfer.core.pooling import Pooling
from jaxinfer.weights.folder_files import is_outside

_KINDS: Mapping[str, str] = MappingProxyType(
    {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
)
_MODE = "pooling_mode"  # alone, or the beginning of a flag for each kind


def pooling_of_folder(folder: Path) -> Pooling | None:
    """The pooling that a folder's ``modules.json`` describes; None if there is none.

    Raises ``SourceError`` for a file that cannot be read, and ``ConfigError`` for a module or a
    kind of pooling that is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        return None
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(
                f"{path} has a module {short(kind)}, which is not supported; embeddings are made "
                "of the modules Transformer, Pooling and Normalize"
            )
    _refuse_lower_case(folder / "sentence_bert_config.json")
    own = dict(modules)["Pooling"]
    if is_outside(own):
        raise SourceError(
            f"{path} names the folder {short(own)}, which is outside its own; get the file again"
        )
    config = folder / own / "config.json"
    return Pooling(_pooling_kind(config), normalize="Normalize" in kinds)


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    listed = _read(path)
    if not isinstance(listed, list):
        raise SourceError(f"{path} is no list of modules; get the file again")
    found: list[tuple[str, str]] = []
    for module in cast("list[Any]", listed):
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str):
            raise SourceError(f"{path} has a module without a type; get the file again")
        found.append((kind.rpartition(".")[2], str(cast("Any", module).get("path") or "")))
    return found


def _pooling_kind(path: Path) -> str:
    config = _read(path)
    if not isinstance(config, dict):
        raise SourceError(f"{path} is no JSON object; get the file again")
    given = cast("dict[str, Any]", config)
    mode = given.get(_MODE)
    flags = [key.removeprefix(f"{_MODE}_") for key, on in given.items() if on is True]
    modes = [mode] if isinstance(mode, str) else [one for one in flags if f"{_MODE}_{one}" in given]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ConfigError(
            f"{path} asks for the pooling {' and '.join(modes)[:60] or 'of no kind'}, which is not "
            "supported; use one of lasttoken, mean and cls"
        )
    return _KINDS[modes[0]]


def _refuse_lower_case(path: Path) -> None:
    """Raise ``ConfigError`` if texts are to be in lower case before they are tokenised."""
    config = _read(path) if path.is_file() else None
    if isinstance(config, dict) and cast("dict[str, Any]", config).get("do_lower_case"):
        raise ConfigError(
            f"{path} has do_lower_case, which is not supported; set it to false, and send texts in "
            "lower case"
        )


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read ({error}); get the file again") from error
