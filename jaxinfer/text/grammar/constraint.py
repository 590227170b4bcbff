"""The filter of a sequence's next token: a grammar's matcher, allowed ids and bad words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count
from typing import Any

import numpy as np

from jaxinfer.core.constraint import BITS, TokenFilter
from jaxinfer.core.errors import RequestError
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.structured import FIELD, Thinking
from jaxinfer.text.grammar.library import load_llguidance
from jaxinfer.text.grammar.thinking import ThoughtTracker, TokenBytes, token_bytes_of

MIN_PARALLEL = 4  # masks; for fewer, to wake other threads takes longer than it saves
# matchers of a grammar that sequences copy: no more than threads that compute masks
MAX_ORIGINALS = min(16, os.cpu_count() or 1)
MAX_SECONDS_OF_ORIGINAL = 0.02  # to make one; most schemas take 0.3 to 2 ms
MAX_BYTES_OF_ORIGINALS = 8 << 20  # of one grammar, unless one alone has more
MIN_BYTES = 128 << 10  # of an original: most take 40 to 170 KB, and grow while they are followed
MAX_COPIES = 64  # of an original, whose lexer keeps the states that all of them have visited


class Grammar:
    """A compiled grammar; sequences copy matchers that are never changed.

    Copies of one matcher lock each other out while they compute masks: 64 masks of bounded strings
    took 14 threads 5.5 ms, as long as one. So further matchers are made, which copies take in turn.
    One that has been copied many times is replaced, as copies share a lexer, which only grows.
    """

    def __init__(
        self, build: Callable[[], Any], num_words: int, num_bytes: int = MIN_BYTES
    ) -> None:
        self._bytes_of_original = max(num_bytes, MIN_BYTES)
        started = time.perf_counter()
        self._originals = [build()]  # llguidance.LLMatcher
        seconds = time.perf_counter() - started
        self._build = build
        most = max(MAX_BYTES_OF_ORIGINALS // self._bytes_of_original, 1)
        self._most = min(most, MAX_ORIGINALS) if seconds < MAX_SECONDS_OF_ORIGINAL else 1
        self._turns = count()
        self._num_copies = 0  # since an original was replaced
        self._num_words = num_words
        self.has_failed = False  # llguidance's bounds have ended an answer, and may end others

    @property
    def num_bytes(self) -> int:
        """The memory of its originals."""
        return len(self._originals) * self._bytes_of_original

    @property
    def error(self) -> str:
        """Why the grammar cannot be used, or none."""
        first = self._originals[0]
        return str(first.get_error()) if first.is_error() else ""

    def grow(self) -> None:
        """Make a further matcher to copy from, or one in place of one that has been copied often;
        each request does so beside the loop.
        """
        if len(self._originals) < self._most:
            self._originals = [*self._originals, self._build()]
        elif self._num_copies > MAX_COPIES * len(self._originals):
            self._originals = [*self._originals[1:], self._build()]
            self._num_copies -= MAX_COPIES

    def matcher(self) -> Any:
        """A new llguidance.LLMatcher at the start."""
        self._num_copies += 1
        originals = self._originals
        return originals[next(self._turns) % len(originals)].deep_copy()

    @cached_property
    def first_mask(self) -> np.ndarray:  # uint32[W]
        """The mask of the first token.

        It is computed before the first sequence begins, as it takes longest (some large schemas
        80 ms).
        """
        mask = np.zeros(self._num_words, np.uint32)
        fill_mask(self.matcher(), mask)
        return mask


def fill_mask(matcher: Any, mask: np.ndarray) -> None:  # uint32[W]
    """Write a matcher's mask; raises ``RequestError`` if it has failed or no token can follow."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    _check(matcher)


def _check(matcher: Any) -> None:
    """Raise ``RequestError`` if a matcher could not write its mask: its grammar takes more than
    llguidance's bounds.
    """
    if matcher.is_error():
        raise RequestError(f"{FIELD} cannot be followed to the end: {_reason(matcher)}")


def _reason(matcher: Any) -> str:
    """The first line of a matcher's error, without the dump of its state."""
    return matcher.get_error().partition("\n")[0]


@dataclass(frozen=True)
class Constraint:
    """Everything that limits the tokens of a request; see ``core.constraint``."""

    grammar: Grammar | None
    allowed: np.ndarray | None  # uint32[W]
    bad_words: tuple[tuple[int, ...], ...]  # token ids, none of which may be completed
    eos_token_ids: tuple[int, ...]  # of the model; not allowed before the grammar begins
    avoids_end: bool  # with ``ignore_eos``: they end a complete text only where it cannot go on
    vocab_size: int
    thinking: Thinking | None = None  # the grammar holds after the thoughts
    token_bytes: TokenBytes = token_bytes_of(None)
    # that no thoughts may end with, by the bytes of the mark before them; see ``tokens_past``
    past_thoughts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def begin(self, drawn: Sequence[int]) -> SequenceFilter:
        """A filter for a sequence that has drawn these tokens; raises ``ValueError``."""
        found = SequenceFilter(self)
        for token_id in drawn:
            found.push(token_id)
        return found

    @cached_property
    def every_token(self) -> np.ndarray:  # uint32[W]
        """The mask of the whole vocabulary."""
        mask = np.full(cdiv(self.vocab_size, BITS), 0xFFFF_FFFF, np.uint32)
        if rest := self.vocab_size % BITS:
            mask[-1] = (1 << rest) - 1
        return mask

    @cached_property
    def longest_word(self) -> int:
        """Tokens of the longest bad word."""
        return max(map(len, self.bad_words), default=0)

    @cached_property
    def is_grammar_alone(self) -> bool:
        """True if masks are those of a matcher, perhaps without the tokens that end a text."""
        others = self.allowed is not None or self.bad_words or self.thinking
        return self.grammar is not None and not others

    @cached_property
    def end_bits(self) -> tuple[np.ndarray, np.ndarray]:  # int64[E], uint32[E]
        """The words of a mask that hold tokens that end a text, and their bits."""
        bits: dict[int, int] = {}
        for token_id in self.eos_token_ids:
            if token_id < self.vocab_size:
                bits[token_id // BITS] = bits.get(token_id // BITS, 0) | 1 << token_id % BITS
        return np.array([*bits], np.int64), np.array([*bits.values()], np.uint32)


class SequenceFilter:
    """The tokens that one sequence may draw; see ``core.constraint.TokenFilter``."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._last: tuple[int, ...] = ()  # as many as bad words look at
        self._num_kept = max(constraint.longest_word - 1, 0)
        self._matcher: Any = None  # set where the grammar begins
        self._is_at_start = False
        thinking = constraint.thinking
        self._thoughts = (
            None if thinking is None else ThoughtTracker(thinking, constraint.token_bytes)
        )
        if not (thinking and (thinking.is_open or thinking.answer)):
            self._begin_grammar()

    def push(self, token_id: int) -> None:
        """Take note of a drawn token; raises ``ValueError`` if the grammar does not allow it."""
        thoughts = self._thoughts
        was_before = thoughts is not None and (thoughts.is_open or bool(thoughts.required))
        if thoughts is not None:
            self._check_required(thoughts, token_id)
            thoughts.push(token_id)
        if thoughts is not None and (was_before or thoughts.is_open):
            self._matcher = None  # it had begun in case that there would be no thoughts
            if thoughts.is_over:
                self._begin_grammar()
        elif self._matcher is not None:
            self._is_at_start = False
            if not self._matcher.consume_token(token_id):
                if thoughts is None or thoughts.opening is None:
                    self._note_failure()
                    raise ValueError(_reason(self._matcher))
                self._matcher = None  # only thoughts begin like this
        elif thoughts is not None and thoughts.is_over and self.constraint.grammar is not None:
            raise ValueError("the answer has begun like thoughts and gone on without them")
        if self._num_kept:
            self._last = (*self._last, token_id)[-self._num_kept :]

    def _check_required(self, thoughts: ThoughtTracker, token_id: int) -> None:
        if (required := thoughts.required) and token_id not in required:
            raise ValueError("the answer's mark is missing")

    @property
    def matcher_to_ask(self) -> Any:
        """The llguidance.LLMatcher that computes the next mask; None if no matcher has to."""
        is_forced = self._thoughts is not None and self._thoughts.forced is not None
        return None if is_forced or self._is_at_start else self._matcher

    def fill(self, mask: np.ndarray) -> None:  # uint32[W]
        """Write the mask of the next token; raises ``RequestError`` if no token is allowed.

        A complete text may end where allowed ids and bad words leave nothing else, whatever they
        say of the tokens that end it.
        """
        constraint, thoughts = self.constraint, self._thoughts
        if thoughts is not None and thoughts.forced is not None:
            mask[:] = 0
            _set(mask, thoughts.forced)
            return
        if thoughts is not None and (required := thoughts.required):
            mask[:] = 0
            for token_id in required:
                _set(mask, token_id)
            return
        opening = None if thoughts is None else thoughts.opening
        if self._matcher is None and constraint.grammar is not None and opening is not None:
            mask[:] = 0
        elif self._matcher is None:
            mask[:] = constraint.every_token
            if constraint.grammar is not None:
                for token_id in constraint.eos_token_ids:
                    _clear(mask, token_id)
            if thoughts is not None and thoughts.is_open:
                for token_id in constraint.past_thoughts.get(thoughts.num_end_bytes, ()):
                    _clear(mask, token_id)
        elif self._is_at_start:
            assert constraint.grammar is not None
            mask[:] = constraint.grammar.first_mask
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._note_failure()
            _check(self._matcher)
        self._complete(mask)

    def finish(self, mask: np.ndarray) -> None:  # uint32[W]
        """``fill`` where ``matcher_to_ask`` has written its mask already."""
        self._note_failure()
        _check(self._matcher)
        self._complete(mask)

    def _note_failure(self) -> None:
        """Later requests get another grammar if this one's matcher has failed."""
        if self._matcher.is_error() and self.constraint.grammar is not None:
            self.constraint.grammar.has_failed = True

    def _complete(self, mask: np.ndarray) -> None:  # uint32[W]
        """Add the token that opens thoughts, and apply allowed ids and bad words."""
        constraint, thoughts = self.constraint, self._thoughts
        opening = None if thoughts is None else thoughts.opening
        if opening is not None:
            _set(mask, opening)
        ends = () if self._matcher is None else _held(mask, constraint.eos_token_ids)
        if constraint.allowed is not None:
            mask &= constraint.allowed
        for word in constraint.bad_words:
            before = word[:-1]
            if not before or self._last[-len(before) :] == before:
                _clear(mask, word[-1])
        if constraint.avoids_end:
            for token_id in ends:
                _clear(mask, token_id)
        if not mask.any():
            if not ends:
                raise RequestError(self._dead_end)
            for token_id in ends:
                _set(mask, token_id)

    @property
    def _dead_end(self) -> str:
        """Why no token is allowed, and the remedy."""
        constraint = self.constraint
        if constraint.allowed is None and not constraint.bad_words:
            return f"{FIELD} allows no further token here; check it for contradictions"
        name = "bad_words" if constraint.allowed is None else "allowed_token_ids"
        remedy = "" if constraint.grammar is None else ", or the form of the answer"
        return f"{name} leaves no token that the answer can go on with; change it{remedy}"

    def _begin_grammar(self) -> None:
        grammar = self.constraint.grammar
        if grammar is not None:
            self._matcher, self._is_at_start = grammar.matcher(), True


def fill_masks(
    filters: Mapping[int, TokenFilter],  # by row
    masks: np.ndarray,  # uint32[N, W]
) -> dict[int, Exception]:
    """``fill`` of several filters into their rows of ``masks``; returns the errors by row.

    llguidance computes the masks of several grammars in parallel, without Python's lock.
    """
    finished: Set[int] = frozenset()
    asked = {
        row: one
        for row, one in filters.items()
        if isinstance(one, SequenceFilter) and one.matcher_to_ask is not None
    }
    if len(asked) < MIN_PARALLEL:
        asked = {}
    else:
        targets = [(one.matcher_to_ask, row) for row, one in asked.items()]
        _threads().unsafe_compute_mask_ptr(targets, masks.ctypes.data, masks.strides[0], len(masks))
        finished = _finish_together(asked, masks)
    errors: dict[int, Exception] = {}
    for row, one in filters.items():
        if row in finished:
            continue
        try:
            if row in asked:
                asked[row].finish(masks[row])
            else:
                one.fill(masks[row])
        except Exception as error:
            errors[row] = error
    return errors


def _finish_together(asked: Mapping[int, SequenceFilter], masks: np.ndarray) -> Set[int]:
    """``finish`` of the filters that are a grammar alone; returns the rows that are finished.

    One by one they took 0.5 ms for 64 rows, during which the next step could not be launched. The
    rows of failed matchers and of masks without a token are left as they are.
    """
    rows = {row: one for row, one in asked.items() if one.constraint.is_grammar_alone}
    rows = {row: one for row, one in rows.items() if not one.matcher_to_ask.is_error()}
    if not rows:
        return rows.keys()
    avoiding = np.array([row for row, one in rows.items() if one.constraint.avoids_end], np.int64)
    words, bits = next(iter(rows.values())).constraint.end_bits  # of the model, as of all filters
    ends = masks[avoiding[:, None], words]
    masks[avoiding[:, None], words] = ends & ~bits
    first = min(rows)
    largest = masks[first : max(rows) + 1].max(axis=1)  # a slice is not copied
    empty = {row for row in rows if not largest[row - first]}
    for row, held in zip(avoiding.tolist(), ends, strict=True):
        if row in empty:
            masks[row, words] = held
    return rows.keys() - empty


@cache
def _threads() -> Any:
    """llguidance's threads, which are started once."""
    return load_llguidance().LLExecutor()


def token_ids_of(mask: np.ndarray) -> np.ndarray:  # uint32[W] -> int64[N]
    """The tokens that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _held(mask: np.ndarray, token_ids: Sequence[int]) -> tuple[int, ...]:  # mask: uint32[W]
    """Those of the tokens that a mask allows."""
    known = [i for i in token_ids if i // BITS < len(mask)]
    return tuple([i for i in known if int(mask[i // BITS]) >> i % BITS & 1])


def _set(mask: np.ndarray, token_id: int) -> None:  # uint32[W]
    mask[token_id // BITS] |= np.uint32(1 << token_id % BITS)


def _clear(mask: np.ndarray, token_id: int) -> None:  # uint32[W]
    if token_id // BITS < len(mask):
        mask[token_id // BITS] &= np.uint32(~(1 << token_id % BITS) & 0xFFFF_FFFF)
