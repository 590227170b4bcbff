"""The beginning of one answer: its thoughts, the budget that ends them, the mark of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from jaxinfer.core.structured import Thinking

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

type TokenBytes = Callable[[int], bytes]


def token_bytes_of(tokenizer: Tokenizer | None) -> TokenBytes:
    """The bytes of each token, as marks are compared; a token without text, or of an engine without
    a tokenizer, has bytes that no text contains.
    """
    if tokenizer is None:
        return _own_bytes
    return lambda token_id: tokenizer.token_bytes(token_id) or _own_bytes(token_id)


def _own_bytes(token_id: int) -> bytes:
    return b"\xff%d\xff" % token_id


class Mark:
    """A mark in the text of tokens, which may have been divided otherwise than the mark itself: a
    model whose vocabulary has no token ``</think>`` writes ``</``, ``think`` and ``>\\n\\n``.
    """

    def __init__(self, token_ids: Sequence[int], token_bytes: TokenBytes) -> None:
        self._token_ids = token_ids
        beginnings = accumulate(map(token_bytes, token_ids), initial=b"")
        # sentencepiece puts a space before a text that it encodes
        self._beginnings = [one.lstrip(b" ") for one in beginnings]
        self.text = self._beginnings[-1]
        self._seen = b""  # the longest end of the text that the mark begins with

    def push(self, data: bytes) -> bytes | None:
        """Take more text; once the mark is whole, what follows it, and the next search begins."""
        text = self._seen + data
        if self.text in text:
            self._seen = b""
            return text.partition(self.text)[2]
        longest = min(len(text), len(self.text) - 1)
        ends = (text[len(text) - size :] for size in range(longest, -1, -1))
        self._seen = next(one for one in ends if self.text.startswith(one))
        return None

    @property
    def num_seen(self) -> int:
        """Bytes of the mark that the text ends with."""
        return len(self._seen)

    @property
    def next_token(self) -> int:
        """The token of the mark after those that the text ends with."""
        counts = range(len(self._token_ids) - 1, -1, -1)
        count = next(one for one in counts if self._seen.endswith(self._beginnings[one]))
        return self._token_ids[count]

    def token_after(self, text: bytes) -> int | None:
        """The token that continues a text of the first tokens of the mark; None for another one."""
        found = zip(self._beginnings, self._token_ids, strict=False)
        return next((token_id for beginning, token_id in found if beginning == text), None)


class ThoughtTracker:
    """Follows the tokens of an answer until its form begins."""

    def __init__(self, thinking: Thinking, token_bytes: TokenBytes) -> None:
        self._thinking = thinking
        self._token_bytes = token_bytes
        self._num_tokens = 0  # of the thoughts
        self._begin = Mark(thinking.begin, token_bytes)
        self._end = Mark(thinking.end, token_bytes)
        self._head = b""  # the answer's text, while it may be the mark that opens the thoughts
        self._answered = 0  # tokens of the mark before the answer
        self._in_call = False  # within the thoughts
        self._call_begin = Mark(thinking.call_begin, token_bytes)
        self._call_end = Mark(thinking.call_end, token_bytes)
        self.is_open = thinking.is_open
        self._may_think = bool(thinking.begin) and not self.is_open
        self._may_answer = True  # the tokens since the beginning, or the thoughts, are its mark's
        self.is_over = not (self.is_open or self._may_think or thinking.answer)

    @property
    def opening(self) -> int | None:
        """The next token of the mark that opens thoughts, while they may still begin."""
        return self._begin.token_after(self._head) if self._may_think else None

    @property
    def num_end_bytes(self) -> int:
        """Bytes of the mark that ends the thoughts with which they end so far."""
        return self._end.num_seen

    @property
    def required(self) -> tuple[int, ...]:
        """The tokens of which the next one must be: of the mark before the answer, or of thoughts.
        Empty if the model thinks or the answer's form holds.
        """
        answer = self._thinking.answer
        if self.is_open or self.is_over or not answer:
            return ()
        of_answer = (answer[self._answered],) if self._may_answer else ()
        return of_answer if self.opening is None else (*of_answer, self.opening)

    @property
    def forced(self) -> int | None:
        """The only token that may be next: past the budget that of the mark that ends thoughts, but
        not in the middle of a call.
        """
        budget = self._thinking.budget
        if not self.is_open or budget is None or self._num_tokens < budget or self._in_call:
            return None
        return self._end.next_token

    def push(self, token_id: int) -> None:
        """Take note of a token."""
        if self.is_over:
            return
        data = self._token_bytes(token_id)
        if self.is_open:
            self._num_tokens += 1
            self._push_thought(data)
            return
        thinking = self._thinking
        if self._may_think:
            self._head = (self._head + data).lstrip(b" ")
            mark = self._begin.text
            if self._head.startswith(mark):
                self._may_think, self.is_open = False, True
                self._push_thought(self._head.removeprefix(mark))
                return
            self._may_think = mark.startswith(self._head)
        if thinking.answer and self._may_answer:
            self._may_answer = token_id == thinking.answer[self._answered]
            self._answered += self._may_answer
        is_answered = self._may_answer and self._answered == len(thinking.answer)
        # thoughts may begin like the answer's own mark, or without one like the answer
        self.is_over = is_answered if thinking.answer else not self._may_think

    def _push_thought(self, data: bytes) -> None:
        if self._thinking.call_end if self._in_call else self._thinking.call_begin:
            mark = self._call_end if self._in_call else self._call_begin
            self._in_call ^= mark.push(data) is not None
        if self._end.push(data) is not None:
            self.is_open = False
            self._answered, self._may_answer = 0, True
            self.is_over = not self._thinking.answer


def tokens_past(
    tokenizer: Tokenizer, vocab_size: int, mark: Sequence[int]
) -> Mapping[int, Sequence[int]]:
    """The tokens that hold the rest of a mark and text behind it, by the number of bytes of the
    mark before them. What follows thoughts has a form from its first character on, and tokens are
    not divided. White space is no part of the text.
    """
    text = Mark(mark, token_bytes_of(tokenizer)).text
    rests = {size: text[size:] for size in range(len(text))}
    found: dict[int, list[int]] = {size: [] for size in rests}
    firsts = {bytes([byte]) for byte in text}
    for token_id, data in enumerate(tokenizer.vocabulary_bytes(vocab_size)):
        if data[:1] not in firsts:
            continue
        for size, rest in rests.items():
            if data.startswith(rest) and data[len(rest) :].strip():
                found[size].append(token_id)
    return found
