"""Which files of a repository a model needs, from their names alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jaxinfer.core.errors import SourceError
from jaxinfer.weights.hub.names import HubName
from jaxinfer.weights.names import part_of

CONFIG = "config.json"
INDEX_END = ".safetensors.index.json"
_TOKENIZER = re.compile(
    r"(added_tokens|special_tokens_map|tokenizer|tokenizer_config)\.json|chat_template\.jinja"
    r"|chat_template\.json|additional_chat_templates/[^/]+\.jinja"
)
_OLDER = (
    "tiktoken.model",
    "tokenizer.model",
)  # vocabularies, read where there is no tokenizer.json
# of embedding models: a list of modules, and a config in the folder of each
_OTHERS = re.compile(
    r"generation_config\.json|modules\.json|sentence_bert_config\.json|\d+_\w+/config\.json"
)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|(?:MX|NV)FP4\w*))$", re.I
)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)  # in names of GGUF files next to a model's own
_GGUF = ".gguf"


def small_files(names: Iterable[str], *, tokenizer_only: bool = False) -> tuple[str, ...]:
    """The files that are no weights: configs, indices, the tokenizer and chat templates."""
    names = tuple(names)
    older = () if "tokenizer.json" in names else _OLDER
    return tuple(
        name
        for name in names
        if _TOKENIZER.fullmatch(name)
        or name in older
        or (not tokenizer_only and (name == CONFIG or is_index(name) or _OTHERS.fullmatch(name)))
    )


def is_index(name: str) -> bool:
    """True if a file is the index of safetensors files, in the repository's own folder."""
    return name.endswith(INDEX_END) and "/" not in name


def gguf_files(names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """The GGUF files by their quantisation, with which their own name ends, or their folder's.

    Files that share one or have none go by their stem. A file in parts is a tuple of several names.
    """
    parts: dict[str, list[str]] = {}  # by the path without the part's number
    for name in sorted(names):
        if name.lower().endswith(_GGUF) and not _NO_MODEL.search(name.rpartition("/")[2]):
            path = name[: -len(_GGUF)]
            part = part_of(path)
            parts.setdefault(part.name if part else path, []).append(name)
    quants = {path: _quant(path) for path in parts}
    counts = Counter(quants.values())
    found: dict[str, list[str]] = {}
    for path, files in parts.items():
        quant = quants[path]
        own = quant if quant is not None and counts[quant] == 1 else path.rpartition("/")[2]
        found.setdefault(own, []).extend(files)
    return MappingProxyType({own: tuple(files) for own, files in found.items()})


def _quant(path: str) -> str | None:
    folder, _, stem = path.rpartition("/")
    match = _QUANT.search(stem) or _QUANT.search(folder)
    return match[1].upper() if match else None


def files_of[T](quant: str, found: Mapping[str, T]) -> T | None:
    """The files in ``found``, by the names of ``gguf_files``, that a quantisation or a stem stands
    for; None if there are none.

    Case does not matter. The end of a name stands for the only one with that end: ``Q4_K_XL`` for
    ``UD-Q4_K_XL``.
    """
    given = quant.lower()
    same = [own for own in found if own.lower() == given]
    fitting = same or [own for own in found if own.lower().endswith(f"-{given}")]
    return found[fitting[0]] if len(fitting) == 1 else None


def gguf_parts(name: HubName, names: Iterable[str]) -> tuple[str, ...]:
    """The one file of a quantisation, or its parts in order; raises ``SourceError`` that names
    those of the repository.
    """
    found = gguf_files(names)
    if not found:
        raise SourceError(f"{name.repo} has no GGUF file; leave out :{name.quant}")
    files = files_of(str(name.quant), found)
    if files is None:
        raise SourceError(
            f"{name.repo} has no quantisation {name.quant}; it has {', '.join(found)}"
        )
    parts = [part_of(file[: -len(_GGUF)]) for file in files]
    if len({part and (part.name, part.count) for part in parts}) > 1 or (
        parts[0] is None and len(files) > 1
    ):
        raise SourceError(
            f"{name} is several files ({', '.join(files)}); download one, and give its path"
        )
    if parts[0] is not None and len(files) != parts[0].count:
        raise SourceError(
            f"{name.repo} has {len(files)} of the {parts[0].count} parts of {name}; name another "
            f"quantisation ({', '.join(found)})"
        )
    return files


def without_folder_weights(name: HubName, names: Iterable[str]) -> SourceError | None:
    """The error for a repository that is no Hugging Face folder with safetensors, if it is none."""
    names = tuple(names)
    own = [one for one in names if "/" not in one]
    if CONFIG in own and any(one.endswith(".safetensors") for one in own):
        return None
    if quants := gguf_files(names):
        return SourceError(
            f"{name} holds GGUF files only; name one of its quantisations, such as "
            f"{name}:{_preferred(quants)} ({', '.join(quants)})"
        )
    if any(one.endswith((".bin", ".pt", ".pth")) for one in own):
        return SourceError(
            f"{name} holds only pickled weights, which can run code when read; use a repository "
            "with safetensors, or convert them (save_pretrained of transformers)"
        )
    lacks = "no config.json" if CONFIG not in own else "no safetensors"
    return SourceError(
        f"{name} holds {lacks}, so it is no model that can be loaded; name another repository"
    )


def _preferred(quants: Iterable[str]) -> str:
    """Q4_K_M if there is one, as in llama.cpp, else the first."""
    return min(quants, key=lambda quant: quant != "Q4_K_M")
