"""``ConstraintCompiler``: what a request's tokens must obey, from its sampling parameters."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.core.constraint import BITS
from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.structured import DEFAULT_FORM_LIMITS, FormLimits, Thinking
from jaxinfer.text.grammar.constraint import Constraint, Grammar, token_ids_of
from jaxinfer.text.grammar.forms import FormCompiler
from jaxinfer.text.grammar.table import GrammarTable
from jaxinfer.text.grammar.thinking import token_bytes_of, tokens_past

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

MAX_BEGINNINGS = 64  # of answers that are tried with a request's conditions; a mask takes 0.1 ms
MAX_SECONDS_OF_BEGINNINGS = 0.1
MAX_MARKS = 4  # of ends of thoughts: those of the model, and what requests of ``LLM`` have
# of compiled forms, see ``Grammars``: as many of the largest, and for each sequence
NUM_LARGEST, BYTES_OF_SEQUENCE = 3, 2 << 20


class ConstraintCompiler:
    """Compiles constraints for one model, on threads of its own and in processes that these start
    for the first form. It may be used from several threads.

    ``max_num_seqs``: sequences that may each have a grammar of their own, within ``limits``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 32,
        limits: FormLimits = DEFAULT_FORM_LIMITS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._token_bytes = token_bytes_of(tokenizer)
        if tokenizer is not None:
            self._tokens_past = lru_cache(MAX_MARKS)(partial(tokens_past, tokenizer, vocab_size))
        table = GrammarTable(tokenizer, vocab_size, eos_token_ids, limits)
        most_bytes = NUM_LARGEST * limits.num_bytes + max_num_seqs * BYTES_OF_SEQUENCE
        self._forms = FormCompiler(table, most_bytes)
        self.close = weakref.finalize(self, self._forms.close)  # its threads do not know ``self``

    def prepare(self) -> None:
        """Begin what the first form would wait for (seconds, and 0.2 to 0.6 s of the GIL), if forms
        can be compiled here; returns at once.
        """
        self._forms.prepare()

    def submit(self, sampling: SamplingParams, client: str = "") -> Future[Constraint | None]:
        """A future of the constraint of a request, None if it has none. Cancel it if the request
        is not needed any more.

        It has a ``RequestError`` if the request is refused. Forms of several clients are compiled
        in turn; a ``QueueFullError`` says that too many wait. The first form makes the table of the
        vocabulary. A later one takes milliseconds, a large or complex one up to 2 s, without the
        GIL. A form without a ``client`` is one of this process.
        """
        if not sampling.is_constrained:
            done: Future[Constraint | None] = Future()
            done.set_result(None)
            return done
        finish = partial(self._constraint, sampling)
        return self._forms.submit(sampling.structured_outputs, client, finish)

    def compile(self, sampling: SamplingParams) -> Constraint | None:
        """Wait for ``submit``; raises ``RequestError``."""
        return self.submit(sampling).result()

    @property
    def trial_pid(self) -> int | None:
        """The id of the process that forks trials of forms; None before the first form."""
        return self._forms.trial_pid

    def _constraint(self, sampling: SamplingParams, grammar: Grammar | None) -> Constraint:
        found = Constraint(
            grammar=grammar,
            allowed=self._mask_of(sampling.allowed_token_ids),
            bad_words=self._bad_words(sampling.bad_words),
            eos_token_ids=self._eos_token_ids,
            avoids_end=sampling.ignore_eos,
            vocab_size=self._vocab_size,
            thinking=sampling.thinking,
            token_bytes=self._token_bytes,
            past_thoughts=self._past_thoughts(sampling.thinking) if grammar else {},
        )
        if found.allowed is not None or found.bad_words:
            # a stop string or token may end an answer after any token
            may_stop = bool(sampling.stop or sampling.stop_token_ids)
            self._check_some_answer(found, 1 if may_stop else sampling.max_tokens)
        return found

    def _past_thoughts(self, thinking: Thinking | None) -> Mapping[int, Sequence[int]]:
        """``tokens_past`` of a mark of several tokens; no token has more than a whole one."""
        if thinking is None or len(thinking.end) < 2:
            return {}
        return self._tokens_past(thinking.end)

    def _check_some_answer(self, constraint: Constraint, longest: int | None) -> None:
        """Raise ``RequestError`` if each of a few beginnings leads to a token after which none is
        allowed. An answer may end after ``longest`` tokens, None if that is not known yet.

        With many beginnings nothing is proven, and a dead end is an error where it is met.
        """
        beginnings: list[tuple[int, ...]] = [()]
        mask = np.zeros(cdiv(self._vocab_size, BITS), np.uint32)
        end = time.thread_time() + MAX_SECONDS_OF_BEGINNINGS
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
            if may_end or len(following) > MAX_BEGINNINGS or time.thread_time() > end:
                return
            beginnings += [(*drawn, token_id) for token_id in following.tolist()]

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
