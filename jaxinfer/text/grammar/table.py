"""``GrammarTable``: llguidance's table of an engine's vocabulary, and the grammars made with it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from jaxinfer.core.constraint import BITS
from jaxinfer.core.errors import RequestError
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.structured import DEFAULT_FORM_LIMITS, FIELD, FormLimits
from jaxinfer.text.grammar.constraint import Grammar
from jaxinfer.text.grammar.library import load_llguidance
from jaxinfer.text.grammar.source import limits, unusable
from jaxinfer.text.grammar.trial import FORCED_CHARACTERS, Accepted, Vocabulary

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class GrammarTable:
    """Makes grammars for one model. Its table is made by ``prepare``, on the thread that compiles.

    The table takes 0.2 s for 50,000 tokens and 0.6 s for 150,000, with the GIL.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        form_limits: FormLimits = DEFAULT_FORM_LIMITS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: Future[bytes] = Future()  # for the process of trials
        self._table: Any = None  # llguidance.LLTokenizer
        self._form_limits = form_limits
        self._limits: Any = None  # llguidance.LLParserLimits

    def check(self) -> None:
        """Raise ``RequestError`` if no grammar can be made for this model."""
        if self._tokenizer is None:
            raise RequestError(f"{FIELD} needs a tokenizer, which this engine was built without")
        if not self._eos_token_ids:
            raise RequestError(
                f"{FIELD} needs a token that ends a text, and this model names none; add "
                "eos_token_id to its generation_config.json"
            )

    def prepare(self) -> None:
        """Read the vocabulary and make the table, which both happen once."""
        try:
            library, vocabulary = load_llguidance(), self._read()
            self._vocabulary.set_result(msgspec.msgpack.encode(vocabulary))
            assert self._tokenizer is not None, "``check`` comes first"
            encoder = _Encoder(self._tokenizer, vocabulary)
            self._table = library.LLTokenizer(encoder, eos_token=vocabulary.eos_token_ids)
            encoder.tokens = ()  # the table has copied them
            encoder("a")  # the tokenizer may be built only now, for the first text
            self._limits = limits()
        except Exception as error:
            if not self._vocabulary.done():
                self._vocabulary.set_exception(error)
            raise

    def vocabulary(self) -> bytes:
        """The ``Vocabulary`` in msgpack's form; waits for ``prepare``, and raises its errors."""
        return self._vocabulary.result()

    def grammar(self, kind: str, accepted: Accepted) -> Grammar:
        """Compile a form that a trial has accepted; raises ``RequestError``."""
        if self._table is None:
            raise RequestError(f"{FIELD} cannot be used: the table of the vocabulary is not made")
        matcher = load_llguidance().LLMatcher
        build = partial(matcher, self._table, accepted.source, log_level=0, limits=self._limits)
        found = Grammar(build, cdiv(self._vocab_size, BITS), accepted.num_bytes)
        if found.error:
            raise unusable(kind, found.error)
        found.first_mask  # noqa: B018, computed here and not in the engine's loop
        return found

    def _read(self) -> Vocabulary:
        assert self._tokenizer is not None, "``check`` comes first"
        ids = self._tokenizer.all_special_ids
        texts = self._tokenizer.convert_ids_to_tokens(ids)
        return Vocabulary(
            self._tokenizer.vocabulary_bytes(self._vocab_size),
            {text: token_id for token_id, text in zip(ids, texts, strict=True) if text},
            [token_id for token_id in ids if token_id < self._vocab_size],
            list(self._eos_token_ids),
            self._form_limits,
        )


class _Encoder:
    """The vocabulary as ``llguidance.LLTokenizer`` reads it: the bytes of each token.

    They are those of the detokenizer, for tokenizers of any kind. Ids beyond the tokenizer's have
    no bytes, so no grammar allows them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of the beginning of a text that must follow."""
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text[:FORCED_CHARACTERS], add_special_tokens=False)
