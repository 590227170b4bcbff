"""Token ids from text and back: ``Tokenizer``, over Hugging Face's ``tokenizers`` library.

Owns: one model's vocabulary, its special tokens and its chat template.
Must not know: where the files came from (weights), what a request is (core), who decodes (engine).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import tokenizers

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.detokenize import IncrementalDetokenizer
from jaxinfer.text.gguf_tokenizer import build_gguf_tokenizer
from jaxinfer.text.pieces import PieceTable
from jaxinfer.text.spec import TokenizerSpec

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def load_tokenizer(
    spec: TokenizerSpec, *, clock: Callable[[], datetime] = datetime.now
) -> Tokenizer:
    """Build the tokenizer that ``spec`` describes. ``clock`` is the date that templates may print.

    Raises ``TokenizerError`` when it is missing, unreadable or of a kind we do not support.
    """
    if (spec.tokenizer_json is None) == (spec.gguf_metadata is None):
        raise TokenizerError(
            "A tokenizer needs either a tokenizer.json or GGUF metadata; "
            "put tokenizer.json beside the weights."
        )
    templates = _named_templates(spec.tokenizer_config.get("chat_template"))
    special_tokens = _special_tokens(spec.tokenizer_config)
    if spec.gguf_metadata is not None:
        built = build_gguf_tokenizer(spec.gguf_metadata)
        tokenizer = built.tokenizer
        special_tokens = built.special_tokens | special_tokens
        if built.chat_template is not None:
            templates = {"default": built.chat_template} | templates
    else:
        assert spec.tokenizer_json is not None
        try:
            tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
    if spec.chat_template is not None:
        templates["default"] = spec.chat_template
    return Tokenizer(tokenizer, special_tokens, templates, clock)


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads. Made by ``load_tokenizer``."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        clock: Callable[[], datetime],
    ) -> None:
        # Some published files cut or pad every text to a training length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._templates = dict(templates)
        self._clock = clock
        self._pieces = PieceTable(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that ``skip_special_tokens`` leaves out of decoded text."""
        return self._pieces.special_ids

    @cached_property
    def max_token_characters(self) -> int:
        """The longest token's length: a text of n tokens has at most n times as many characters."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought a chat template."""
        return bool(self._templates)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens spelt out in it become their ids.

        ``add_special_tokens`` adds what the model expects around a text, such as bos. Raises
        ``RequestError`` when the text has no UTF-8 form.
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """``encode`` for many texts, in parallel."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"The text holds half of a surrogate pair at position {error.start}, "
                    "which is no character; remove it."
                ) from None
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def encode_located(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """``encode``, and where each token begins in ``text``, in characters. Parts of one
        character share its place; a special token that was added takes none.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        places: list[int] = []
        end = 0  # of the text's tokens so far
        spans = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
        for token_id, (first, last), is_added in spans:
            if is_added:
                places.append(len(text) if end else 0)
                continue
            # byte-level tokenizers leave the spaces before a token's text out of its span
            piece = self.token_piece(token_id)
            earliest = max(first - (len(piece) - len(piece.lstrip())), end)
            while first > earliest and text[first - 1].isspace():
                first -= 1
            places.append(first)
            end = max(end, last)
        return encoding.ids, places

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``. Ids outside the vocabulary are nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character."""
        return self._pieces[token_id].data

    def token_piece(self, token_id: int) -> str:
        """One token as text to show beside its logprob; a part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A stream decoder for one sequence that follows ``prompt_token_ids``."""
        return IncrementalDetokenizer(self._pieces, prompt_token_ids, skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt for ``messages``; encode it with ``add_special_tokens=False``.

        ``chat_template`` replaces the model's own: the name of one of its templates, or a
        template. See ``ChatTemplate.render`` for the rest, and for the errors.
        """
        variables = {**self._special_tokens, **(template_kwargs or {})}
        return self._template(chat_template, bool(variables.get("tools"))).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def _template(self, chosen: str | None, has_tools: bool) -> ChatTemplate:
        if chosen is not None and chosen not in self._templates:
            return ChatTemplate(chosen, self._clock)
        if chosen is None:
            chosen = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if chosen not in self._templates:
            named = f" named default (it has {', '.join(self._templates)})"
            raise TokenizerError(
                f"The model has no chat template{named if self._templates else ''}; "
                "pass chat_template."
            )
        return self._compiled[chosen]

    @cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        # On first use: a model with a broken template still completes plain prompts.
        return {name: ChatTemplate(source, self._clock) for name, source in self._templates.items()}

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise TokenizerError(
                f"tokenizer_config.json names the {name} {token!r}, "
                "which is not in the vocabulary of tokenizer.json."
            )
        return token_id


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``{"bos_token": "<s>", ...}``; the file holds strings or ``{"content": ...}``."""
    named: dict[str, str] = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_NAMES):
        value = config.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(token, str):
            named[name] = token
    return named


def _named_templates(entry: Any) -> dict[str, str]:
    """The config's ``chat_template``: one template, or a list of ``{"name", "template"}``."""
    match entry:
        case None:
            return {}
        case str():
            return {"default": entry}
        case [*items]:
            return {item["name"]: item["template"] for item in items}
        case _:
            raise TokenizerError(
                "tokenizer_config.json's chat_template must be a string or a list of named "
                f"templates, not {type(entry).__name__}."
            )
