"""Token ids from text and back: ``Tokenizer``, over Hugging Face's ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.chat import MAX_COMPILED_TEMPLATES, ChatTemplate
from jaxinfer.text.detokenize import IncrementalDetokenizer
from jaxinfer.text.encoding import NOT_SUPPORTED, Encoding, guarded, offsets_in, refuse_options
from jaxinfer.text.gguf_metadata import named_tokens
from jaxinfer.text.gguf_special import end_token_ids
from jaxinfer.text.pieces import PieceTable, Vocabulary, vocabulary_of
from jaxinfer.text.tokenizer_config import (
    NO_LENGTH,
    TokenizerSpec,
    chat_templates,
    max_length,
    saved_config,
    special_tokens,
    write_files,
)
from jaxinfer.text.vocabulary import read_vocabulary

if TYPE_CHECKING:
    import tokenizers


def load_tokenizer(
    spec: TokenizerSpec,
    *,
    clock: Callable[[], datetime] = datetime.now,
    encodes: bool = True,
) -> Tokenizer:
    """Build the tokenizer that ``spec`` describes. ``clock``: the date that templates may print.

    Without ``encodes`` only its vocabulary is read, and the rest is built for the first text that
    is encoded. Raises ``TokenizerError`` if it is missing, unreadable or of an unsupported kind.
    """
    if (spec.tokenizer_json is None) == (spec.gguf_metadata is None):
        words = "A tokenizer needs either a tokenizer.json or GGUF metadata; "
        raise TokenizerError(f"{words}put tokenizer.json beside the weights.")
    if encodes:  # the spec, of up to 30 MB, is not kept
        built = _build(spec)
        vocabulary, build = vocabulary_of(built), lambda: built
    else:
        vocabulary, build = read_vocabulary(spec), cache(partial(_build, spec))
    named, ends = special_tokens(spec), None
    if spec.gguf_metadata is not None:
        named = named_tokens(spec.gguf_metadata) | named
        ends = end_token_ids(spec.gguf_metadata)
    return Tokenizer(
        build,
        vocabulary,
        named,
        chat_templates(spec),
        clock,
        max_length(spec.tokenizer_config),
        ends,
        spec.tokenizer_config,
    )


def _build(spec: TokenizerSpec) -> tokenizers.Tokenizer:
    from jaxinfer.text.build import build_tokenizer  # the library, which decoding does not need

    return build_tokenizer(spec)


class Tokenizer:
    """One model's tokenizer, made by ``load_tokenizer``. It may be used from several threads.

    Names and arguments are those of a transformers tokenizer, which scripts for vLLM expect.
    """

    is_fast = True

    def __init__(
        self,
        build: Callable[[], tokenizers.Tokenizer],  # keeps what it has built
        vocabulary: Vocabulary,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        clock: Callable[[], datetime],
        model_max_length: int = NO_LENGTH,
        end_token_ids: frozenset[int] | None = None,
        config: Mapping[str, Any] = MappingProxyType({}),  # tokenizer_config.json
    ) -> None:
        self._build = build
        self._vocabulary = vocabulary
        self.special_tokens_map = dict(special_tokens)
        self.model_max_length = model_max_length
        self._templates = dict(templates)
        self._config = config
        self.response_template: Any = config.get("response_template")  # the form of answers
        # on first use: a model with a broken template still completes plain prompts
        self._compiled = lru_cache(maxsize=MAX_COMPILED_TEMPLATES)(
            lambda template: ChatTemplate(template, clock, self.special_tokens_map)
        )
        self._pieces = PieceTable(vocabulary)
        self.vocab_size: int = vocabulary.size
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.unk_token = special_tokens.get("unk_token")
        self.pad_token = special_tokens.get("pad_token")
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        eos = frozenset(() if self.eos_token_id is None else (self.eos_token_id,))
        # Every token that ends a text: a GGUF vocabulary names them all; a tokenizer.json names
        # only eos.
        self.end_token_ids = eos if end_token_ids is None else end_token_ids
        self.unk_token_id = vocabulary.id_of(self.unk_token or "")
        self.pad_token_id = vocabulary.id_of(self.pad_token or "")

    @property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return guarded(self._build())

    def __len__(self) -> int:
        """``vocab_size``, which here includes added tokens."""
        return self.vocab_size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that ``skip_special_tokens`` leaves out of decoded text."""
        return self._pieces.special_ids

    @cached_property
    def max_token_characters(self) -> int:
        """The longest token's length: a text of n tokens has at most n times as many characters."""
        return max(map(len, self.get_vocab()))

    @property
    def all_special_ids(self) -> list[int]:
        """``special_token_ids``, ascending."""
        return sorted(self.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str | None]:
        """The tokens of ``all_special_ids``."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's chat template; if it has several, all of them by name."""
        if self._templates.keys() == {"default"}:
            return self._templates["default"]
        return dict(self._templates) or None

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **options: Any,
    ) -> Encoding:
        """Token ids and attention mask of a text, or a list of each of several texts.

        See ``encode``. Raises ``RequestError`` for options of transformers that are not supported:
        padding, arrays of a framework (``return_tensors``).
        """
        refuse_options(options)
        texts = [text] if isinstance(text, str) else text
        input_ids = self.encode_batch(texts, add_special_tokens=add_special_tokens)
        if truncation:
            limit = self.model_max_length if max_length is None else max_length
            for number, ids in enumerate(input_ids):
                if len(ids) > limit:
                    input_ids[number] = self._truncated(texts[number], limit, add_special_tokens)
        mask = [[1] * len(ids) for ids in input_ids]
        if isinstance(text, str):
            return Encoding(input_ids=input_ids[0], attention_mask=mask[0])
        return Encoding(input_ids=input_ids, attention_mask=mask)

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids of ``text``; special tokens spelt out in it become their ids.

        ``add_special_tokens`` adds the special tokens that the model expects around a text, such as
        bos. ``options`` are those of a call: ``truncation``, ``max_length``. Raises
        ``RequestError`` if the text has no UTF-8 form.
        """
        if options:
            return self(text, add_special_tokens=add_special_tokens, **options)["input_ids"]
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
        given: dict[str, Any] = {"add_special_tokens": add_special_tokens}
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), **given)]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """``encode``, and the offset of each token in ``text``, in characters.

        See ``offsets_in``.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, offsets_in(text, encoding, self.token_piece)

    def decode(
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = True, **options: Any
    ) -> str:
        """The text of ``token_ids``; ids outside the vocabulary have no text.

        Special tokens are left out by default, as in generated text; transformers keeps them.
        """
        refuse_options(options)
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True, **options: Any
    ) -> list[str]:
        """``decode`` for many sequences."""
        return [self.decode(ids, skip_special_tokens, **options) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Every token's id, by the token as the vocabulary spells it."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """The tokens of ``text`` as the vocabulary spells them."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """The id of a token, or of each; an unknown token has the unknown token's id, or None."""
        if isinstance(tokens, str):
            return self._token_id(tokens)
        return [self._token_id(token) for token in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """The token of an id, or of each, as the vocabulary spells it; None for an unknown id."""
        if isinstance(ids, int):
            return self._vocabulary.token_of(ids)
        return [self._vocabulary.token_of(token_id) for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character."""
        return self._pieces[token_id].data

    def vocabulary_bytes(self, size: int) -> list[bytes]:
        """``token_bytes`` of the ids below ``size``; an unknown id has none."""
        return [self._pieces.data_of(token_id) for token_id in range(size)]

    def token_piece(self, token_id: int) -> str:
        """One token as text, to show next to its logprob; a part of a character is U+FFFD."""
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
        calls: CallText | None = None,
    ) -> str:
        """The prompt for ``messages``; encode it with ``add_special_tokens=False``.

        ``chat_template`` replaces the model's own: the name of one of its templates, or a template.
        For the other arguments and the errors see ``ChatTemplate.render``.
        """
        variables = template_kwargs or {}
        return self._compiled(self.get_chat_template(chat_template, variables.get("tools"))).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            calls=calls,
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        *,
        return_dict: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **variables: Any,
    ) -> str | list[str] | list[int] | list[list[int]] | Encoding:
        """A conversation, or each of a list of them, by the chat template.

        As in transformers 5: returns an ``Encoding``, without ``return_dict`` its token ids,
        without ``tokenize`` the text. ``variables`` are further variables for the template. Errors
        are those of ``render_chat``, and ``RequestError`` for options that are not supported.
        """
        options = {name: variables.pop(name, None) for name in NOT_SUPPORTED}
        variables |= {"tools": tools, "documents": documents}
        several = bool(conversation) and isinstance(conversation[0], (list, tuple))
        render = partial(
            self.render_chat,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=variables,
            chat_template=chat_template,
        )
        text = [render(one) for one in conversation] if several else render(conversation)
        if not tokenize:
            return text
        encoding = self(
            text,
            add_special_tokens=False,
            truncation=truncation,
            max_length=max_length,
            **options,
        )
        return encoding if return_dict else encoding["input_ids"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates into a folder, which
        is made if it is absent. ``load_tokenizer`` and transformers read them, also those of a GGUF
        file's tokenizer. Raises ``OSError``.
        """
        config = saved_config(self._config, self.special_tokens_map, self.model_max_length)
        write_files(Path(folder), self._tokenizer.to_str(pretty=True), config, self._templates)

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The text of the template that ``apply_chat_template`` uses for these arguments."""
        name = chat_template
        if name is None:
            has_own = tools and "tool_use" in self._templates
            name = "tool_use" if has_own else "default"
        if name in self._templates:
            return self._templates[name]
        if chat_template is not None:
            return chat_template
        named = f" named default (it has {', '.join(self._templates)})"
        raise TokenizerError(
            f"The model has no chat template{named if self._templates else ''}; pass chat_template."
        )

    def _truncated(self, text: str, length: int, add_special_tokens: bool) -> list[int]:
        """The first ids of a text, so many that they have this length with the special tokens."""
        added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        encoding.truncate(max(length - added, 0))
        return self._tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids

    def _token_id(self, token: str | None) -> int | None:
        token_id = None if token is None else self._vocabulary.id_of(token)
        return self.unk_token_id if token_id is None else token_id

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        if token is None:
            return None
        token_id = self._vocabulary.id_of(token)
        if token_id is None:
            raise TokenizerError(
                f"The model's files name the {name} {token!r}, which is not in the vocabulary "
                "of tokenizer.json."
            )
        return token_id
