"""What a tokenizer is made of, before it is made.

Owns: ``TokenizerSpec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenizerSpec:
    """What a model's files say about text. One of ``tokenizer_json`` and ``gguf_metadata`` is set.

    ``tokenizer_json`` is the text of that file, ``tokenizer_config`` and ``special_tokens_map`` the
    parsed files of these names, ``chat_template`` the text of chat_template.jinja,
    ``additional_chat_templates`` the texts in the folder of that name (these templates replace
    those in the config), and ``gguf_metadata`` the ``tokenizer.*`` entries of a GGUF file as plain
    Python values.
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    additional_chat_templates: Mapping[str, str] = field(default_factory=dict)
    gguf_metadata: Mapping[str, Any] | None = None
