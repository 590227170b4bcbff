"""Collects the definition of a tokenizer from a model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import NoTokenizerError, SourceError, TokenizerError
from jaxinfer.core.json_text import read_json, read_text
from jaxinfer.text.model_files import (
    sentencepiece_metadata,
    tiktoken_metadata,
    with_added_tokens,
)
from jaxinfer.text.tokenizer_config import TokenizerSpec

if TYPE_CHECKING:
    from jaxinfer.weights.gguf.header import GGUFHeader

# A folder's files with a vocabulary, the first one found counts; those of other libraries are read
# as the metadata of a GGUF file.
type _Reader = Callable[[bytes, Mapping[str, Any]], dict[str, Any]]
VOCABULARIES: Mapping[str, _Reader | None] = MappingProxyType(
    {
        "tokenizer.json": None,
        "tiktoken.model": tiktoken_metadata,
        "tokenizer.model": sentencepiece_metadata,
    }
)


def spec_from_path(path: Path) -> TokenizerSpec:
    """The tokenizer of a Hugging Face folder, a tokenizer.json (or one of the older files that
    stand for it), or a GGUF file.

    Raises ``TokenizerError`` when there is none or a file cannot be read.
    """
    try:
        path = path.expanduser()
        if path.is_dir():
            return _spec_from_folder(path)
        if path.name in VOCABULARIES and path.is_file():
            return _spec_from_folder(path.parent)
        if path.suffix == ".gguf" and path.is_file():
            # a local import: the package gguf takes 0.03 s, and only GGUF files need it
            from jaxinfer.weights.gguf.header import read_header

            return spec_from_gguf(read_header(path))
    except SourceError as error:
        raise TokenizerError(str(error)) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise TokenizerError(
            f"cannot read tokenizer {path} ({error}); correct the path or its permissions"
        ) from error
    raise TokenizerError(
        f"tokenizer {path} is neither a known name, a folder, a tokenizer.json nor a .gguf file; "
        "correct it"
    )


def spec_from_gguf(header: GGUFHeader) -> TokenizerSpec:
    """The tokenizer inside a GGUF file; raises ``TokenizerError`` if there is none."""
    entries = header.metadata.items()
    metadata = {key: value for key, value in entries if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in metadata:
        raise NoTokenizerError(
            f"{header.path} holds no tokenizer; name a model that has one with tokenizer= "
            "(--tokenizer)"
        )
    return TokenizerSpec(gguf_metadata=metadata)


def _spec_from_folder(folder: Path) -> TokenizerSpec:
    file = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if file is None:
        raise NoTokenizerError(
            f"{folder} holds no tokenizer.json; add it, name a model that has a tokenizer with "
            "tokenizer= (--tokenizer), or pass token ids with skip_tokenizer_init=True"
        )
    read = VOCABULARIES[file.name]
    text = _read(file) if read is None else None
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    metadata = None
    if read is not None:
        added = _read_json(folder / "added_tokens.json")
        metadata = read(file.read_bytes(), with_added_tokens(config, special_map, added))
    return TokenizerSpec(
        tokenizer_json=text,
        gguf_metadata=metadata,
        tokenizer_config=config,
        special_tokens_map=special_map,
        chat_template=_chat_template(folder),
        additional_chat_templates={
            file.stem: _read(file)
            for file in sorted(folder.glob("additional_chat_templates/*.jinja"))
        },
    )


def _chat_template(folder: Path) -> str | None:
    """The template of a separate file; a template in tokenizer_config.json stays there."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return _read(jinja)
    path = folder / "chat_template.json"
    template = _read_json(path).get("chat_template")
    if not isinstance(template, str | None):
        raise TokenizerError(f"chat_template of {path} must be a text; download the file again")
    return template


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; raises ``SourceError`` if the file holds something else."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise SourceError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} must hold a JSON object; download it again")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is absent."""
    return read_json_object(path) if path.is_file() else {}


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}); download it again") from error
