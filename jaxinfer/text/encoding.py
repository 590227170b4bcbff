"""The result, the options and the failures of a tokenizer's call, under transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from jaxinfer.core.checks import short
from jaxinfer.core.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

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


def is_failure(error: BaseException) -> bool:
    """True for a failure of the library: a plain ``Exception``, or a panic, which is none.

    A panic ends nothing: the library unwinds, and its next call works.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"


def guarded(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, whose methods raise failures of the library as ``TokenizerError``.

    One is a pattern of a pre-tokenizer that backtracks without end on some text.
    """
    return cast("tokenizers.Tokenizer", _Guarded(tokenizer))


class _Guarded:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tokenizer, name)
        if not callable(method):
            return method

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise TokenizerError(
                    f"The model's tokenizer fails on this text ({short(str(error), 200)}); use "
                    "another text, or another tokenizer."
                ) from None

        return call


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` for an option that would change the result."""
    for name, value in options.items():
        if value and name not in _IGNORED:
            raise RequestError(
                f"the tokenizer does not support {name}; leave it out and make what it does "
                "from input_ids."
            )


def offsets_in(
    text: str, encoding: tokenizers.Encoding, piece_of: Callable[[int], str]
) -> list[int]:
    """The offset of each token of ``encoding`` in ``text``, in characters.

    Parts of one character have the same offset; an added special token has no length.
    """
    offsets: list[int] = []
    end = 0  # of the text's tokens so far
    spans = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
    for token_id, (first, last), is_added in spans:
        if is_added:
            offsets.append(len(text) if end else 0)
            continue
        # byte-level tokenizers leave the spaces before a token's text out of its span
        piece = piece_of(token_id)
        earliest = max(first - (len(piece) - len(piece.lstrip())), end)
        while first > earliest and text[first - 1].isspace():
            first -= 1
        offsets.append(first)
        end = max(end, last)
    return offsets
