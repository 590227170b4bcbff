"""The special tokens and chat templates in a model's files, read as in transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.core.checks import as_float, short
from jaxinfer.core.errors import TokenizerError

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_GGUF_TEMPLATE = "tokenizer.chat_template"
NO_LENGTH = int(1e30)  # transformers' model_max_length of a tokenizer that sets none


@dataclass(frozen=True)
class TokenizerSpec:
    """A model's files about text. One of ``tokenizer_json`` and ``gguf_metadata`` is set.

    ``tokenizer_json`` is the text of that file, ``tokenizer_config`` and ``special_tokens_map`` the
    parsed files of these names, ``chat_template`` the text of chat_template.jinja,
    ``additional_chat_templates`` the texts in the folder of that name (these templates replace
    those in the config), and ``gguf_metadata`` the ``tokenizer.*`` entries of a GGUF file as plain
    Python values, also those that ``model_files`` makes of other files.
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    additional_chat_templates: Mapping[str, str] = field(default_factory=dict)
    gguf_metadata: Mapping[str, Any] | None = None


def special_tokens(spec: TokenizerSpec) -> dict[str, str]:
    """``{"bos_token": "<s>", ...}``; the files hold strings or ``{"content": ...}``.

    special_tokens_map.json wins over tokenizer_config.json, unless the config has
    ``added_tokens_decoder``: then transformers reads no map.
    """
    entries = {**spec.tokenizer_config}
    if "added_tokens_decoder" not in entries:
        entries |= spec.special_tokens_map
    named: dict[str, str] = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_NAMES):
        value = entries.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str):
            named[name] = token
    return named


def max_length(config: Mapping[str, Any]) -> int:
    """``model_max_length`` of tokenizer_config.json; raises ``TokenizerError`` unless it is one."""
    given = config.get("model_max_length")
    if given is None:
        return NO_LENGTH
    number = as_float(given)
    if number is None or not 1 <= number < math.inf:
        raise TokenizerError(
            f"model_max_length of tokenizer_config.json is {short(given)}; it must be a positive "
            "number, correct it or remove it"
        )
    return int(given)


def saved_config(
    config: Mapping[str, Any], special: Mapping[str, str], length: int
) -> dict[str, Any]:
    """The tokenizer_config.json of a tokenizer whose chat templates are in files of their own.

    ``config`` is the file that the tokenizer was read from, empty for a GGUF file, ``special`` the
    tokens by the names of ``special_tokens``.
    """
    made = {key: value for key, value in config.items() if key != "chat_template"}
    made.setdefault("tokenizer_class", "PreTrainedTokenizerFast")  # reads only tokenizer.json
    made.setdefault("clean_up_tokenization_spaces", False)
    if length != NO_LENGTH:
        made["model_max_length"] = length
    for name, token in special.items():
        entry = made.get(name)
        if not (isinstance(entry, Mapping) and entry.get("content") == token):
            made[name] = token
    return made


def write_files(
    folder: Path, definition: str, config: Mapping[str, Any], templates: Mapping[str, str]
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the templates; raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition, "utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", "utf-8")
    for name, template in templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(template, "utf-8")


def chat_templates(spec: TokenizerSpec) -> dict[str, str]:
    """The templates by name; a model's only template is named ``default``.

    Templates in files of their own replace those in the config, which replace those of a GGUF file.
    Raises ``TokenizerError`` if the config's entry has another form than transformers writes.
    """
    in_files = dict(spec.additional_chat_templates)
    if spec.chat_template is not None:
        in_files["default"] = spec.chat_template
    return (
        in_files
        or _in_config(spec.tokenizer_config.get("chat_template"))
        or _in_gguf(spec.gguf_metadata or {})
    )


def _in_config(entry: Any) -> dict[str, str]:
    """The config's ``chat_template``: one template, or a list of ``{"name", "template"}``."""
    match entry:
        case None:
            return {}
        case str():
            return {"default": entry}
        case [*items] if all(map(_is_template, items)):
            return {item["name"]: item["template"] for item in items}
        case _:
            raise TokenizerError(
                "tokenizer_config.json's chat_template must be a string or a list of "
                f'{{"name", "template"}}, not {type(entry).__name__}.'
            )


def _is_template(item: Any) -> bool:
    parts = [item.get(key) for key in ("name", "template")] if isinstance(item, Mapping) else [None]
    return all(isinstance(part, str) for part in parts)


def _in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template``, and ``tokenizer.chat_template.NAME`` of further ones.

    Raises ``TokenizerError`` for a template that is not a string.
    """
    named = {
        key.removeprefix(f"{_GGUF_TEMPLATE}."): template
        for key, template in metadata.items()
        if key.startswith(f"{_GGUF_TEMPLATE}.")
    }
    if _GGUF_TEMPLATE in metadata:
        named["default"] = metadata[_GGUF_TEMPLATE]
    for name, template in named.items():
        if not isinstance(template, str):
            raise TokenizerError(
                f"The GGUF metadata's chat template {name!r} must be a string, "
                f"got {type(template).__name__}; convert the model again."
            )
    return named
