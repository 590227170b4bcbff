"""What a tokenizer is made of, before it is made.

Owns: ``TokenizerSpec``. Must not know: the libraries that read it, Jinja among them: importing
those waits until somebody does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenizerSpec:
    """What a model's files say about text. One of ``tokenizer_json`` and ``gguf_metadata`` is set.

    ``tokenizer_json`` is the text of that file, ``tokenizer_config`` the parsed file of that name,
    ``chat_template`` the text of chat_template.jinja (it wins over the one in the config), and
    ``gguf_metadata`` the ``tokenizer.*`` entries of a GGUF file as plain Python values.
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    gguf_metadata: Mapping[str, Any] | None = None
