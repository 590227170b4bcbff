"""``ConstraintCompiler``: what a request's tokens must obey, from its sampling parameters.

Owns: llguidance's table of the vocabulary, made when a request first has a grammar, and the cache
of compiled grammars.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.core.constraint import BITS
from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.structured import FIELD, StructuredOutputsParams
from jaxinfer.text.grammar.constraint import Constraint, Grammar, token_ids_of
from jaxinfer.text.grammar.source import grammar_source, load_llguidance, unusable

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

MAX_GRAMMARS = 128  # compiled ones that are kept; a large schema takes some MB
MAX_BEGINNINGS = 64  # of answers that are tried with a request's conditions; a mask takes 0.1 ms


class ConstraintCompiler:
    """Compiles constraints for one model. It may be used from several threads."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._special: dict[str, int] | None = None
        self._table: Any = None  # llguidance.LLTokenizer
        self._table_lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, sampling: SamplingParams) -> Constraint | None:
        """The constraint of a request, None if it has none; raises ``RequestError``.

        With a grammar the first call makes the table, which takes about 0.3 s for 50,000 tokens and
        0.9 s for 150,000, of which 0.1 and 0.4 s hold the GIL. A later call takes milliseconds, a
        large or complex grammar up to 2 s without the GIL.
        """
        if not sampling.is_constrained:
            return None
        structured = sampling.structured_outputs
        found = Constraint(
            grammar=None if structured is None else self._grammar(structured),
            allowed=self._mask_of(sampling.allowed_token_ids),
            bad_words=self._bad_words(sampling.bad_words),
            eos_token_ids=self._eos_token_ids,
            avoids_end=sampling.ignore_eos,
            vocab_size=self._vocab_size,
            thinking=sampling.thinking,
        )
        if found.allowed is not None or found.bad_words:
            # a stop string or token may end an answer after any token
            may_stop = bool(sampling.stop or sampling.stop_token_ids)
            self._check_some_answer(found, 1 if may_stop else sampling.max_tokens)
        return found

    def _check_some_answer(self, constraint: Constraint, longest: int | None) -> None:
        """Raise ``RequestError`` if each of a few beginnings leads to a token after which none is
        allowed. An answer may end after ``longest`` tokens, None if that is not known yet.

        With many beginnings nothing is proven, and a dead end is an error where it is met.
        """
        beginnings: list[tuple[int, ...]] = [()]
        mask = np.zeros(cdiv(self._vocab_size, BITS), np.uint32)
        for _ in range(MAX_BEGINNINGS):
            drawn = beginnings.pop()
            try:
                constraint.begin(drawn).fill(mask)
            except RequestError:
                if not beginnings:
                    raise
                continue
            following = token_ids_of(mask)
            may_end = len(drawn) + 1 == longest or np.isin(following, self._eos_token_ids).any()
            if may_end or len(following) > MAX_BEGINNINGS:
                return
            beginnings += [(*drawn, token_id) for token_id in following.tolist()]

    def _grammar(self, params: StructuredOutputsParams) -> Grammar:
        with self._lock:
            known = self._grammars.get(params)
            if known is not None:
                self._grammars.move_to_end(params)
        if known is not None:
            known.grow()
            return known
        library, source = load_llguidance(), self._source(params)
        build = partial(library.LLMatcher, self._vocabulary(), source, log_level=0)
        grammar = Grammar(build, cdiv(self._vocab_size, BITS))
        if grammar.error:
            raise unusable(params.kind, grammar.error)
        if not grammar.fits_some_text:
            raise RequestError(f"{FIELD}.{params.kind} fits no text; check it for contradictions")
        if reason := grammar.rehearse(self._eos_token_ids):
            raise unusable(params.kind, f"it is too complex: {reason}")
        with self._lock:
            self._grammars[params] = grammar
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _source(self, params: StructuredOutputsParams) -> str:
        if self._tokenizer is None:
            raise RequestError(f"{FIELD} needs a tokenizer, which this engine was built without")
        if not self._eos_token_ids:
            raise RequestError(
                f"{FIELD} needs a token that ends a text, and this model names none; add "
                "eos_token_id to its generation_config.json"
            )
        if self._special is None:
            ids = self._tokenizer.all_special_ids
            texts = self._tokenizer.convert_ids_to_tokens(ids)
            self._special = {text: i for i, text in zip(ids, texts, strict=True) if text}
        return grammar_source(params, self._special)

    def _vocabulary(self) -> Any:
        """llguidance's table of the vocabulary, made by the first call."""
        with self._table_lock:
            if self._table is None:
                assert self._tokenizer is not None, "``_source`` comes first"
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
                self._table = load_llguidance().LLTokenizer(
                    vocabulary, eos_token=list(self._eos_token_ids)
                )
            return self._table

    def _mask_of(self, token_ids: Sequence[int] | None) -> np.ndarray | None:  # uint32[W]
        if token_ids is None:
            return None
        ids = np.unique(np.array(token_ids, np.int64))
        mask = np.zeros(cdiv(self._vocab_size, BITS), np.uint32)
        np.bitwise_or.at(mask, ids // BITS, np.uint32(1) << (ids % BITS).astype(np.uint32))
        return mask

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the start of a text and after a space, as in vLLM."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer; use logit_bias instead")
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


class _Vocabulary:
    """The vocabulary as ``llguidance.LLTokenizer`` reads it: the bytes of each token.

    They are those of the detokenizer, for tokenizers of any kind. Ids beyond the tokenizer's have
    no bytes, so no grammar allows them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in tokenizer.all_special_ids if i < vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)
