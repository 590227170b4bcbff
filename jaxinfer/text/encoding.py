"""The result and the options of a tokenizer's call, under transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.errors import RequestError

# options of transformers; a false value has no effect
NOT_SUPPORTED = (
    *("padding", "return_tensors", "return_assistant_tokens_mask"),
    *("sanitize_control_tokens", "tokenizer_kwargs"),
)
# neither changes transformers' result for a byte-level tokenizer; the mask is always returned
_IGNORED = ("clean_up_tokenization_spaces", "return_attention_mask")


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask`` of a text, or of several, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has no {name}; it has {', '.join(self)}") from None


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` for an option that would change the result."""
    for name, value in options.items():
        if value and name not in _IGNORED:
            raise RequestError(
                f"the tokenizer does not support {name}; leave it out and make what it does "
                "from input_ids."
            )
