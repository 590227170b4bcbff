"""What a model's files say about its special tokens and chat templates.

Owns: the forms of these entries, and which file wins, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.errors import TokenizerError
from jaxinfer.text.spec import TokenizerSpec

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_GGUF_TEMPLATE = "tokenizer.chat_template"
NO_LENGTH = int(1e30)  # transformers' model_max_length of a tokenizer that names none


def special_tokens(spec: TokenizerSpec) -> dict[str, str]:
    """``{"bos_token": "<s>", ...}``; the files hold strings or ``{"content": ...}``.

    special_tokens_map.json wins over tokenizer_config.json, unless that has
    ``added_tokens_decoder``: then it was saved whole, and transformers reads no map.
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


def chat_templates(spec: TokenizerSpec) -> dict[str, str]:
    """The templates by name; that of a model with one is ``default``.

    Templates in files of their own replace those in the config, which replace those of a GGUF file.
    Raises ``TokenizerError`` when the config's entry has another form than transformers writes.
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
        case [*items] if all(
            isinstance(item, Mapping) and {"name", "template"} <= item.keys() for item in items
        ):
            return {item["name"]: item["template"] for item in items}
        case _:
            raise TokenizerError(
                "tokenizer_config.json's chat_template must be a string or a list of "
                f'{{"name", "template"}}, not {type(entry).__name__}.'
            )


def _in_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template``, and ``tokenizer.chat_template.NAME`` of further ones.

    Raises ``TokenizerError`` for one that is no string.
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
