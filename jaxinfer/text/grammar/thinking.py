"""The beginning of one answer: its thoughts, the budget that ends them, the mark of the answer."""

from __future__ import annotations

from jaxinfer.core.structured import Thinking


class ThoughtTracker:
    """Follows the tokens of an answer until its form begins."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._num_tokens = 0  # of the thoughts
        self._matched = 0  # tokens of the closing mark that the last tokens are
        self._opened = 0  # tokens of the mark that may open the thoughts
        self._answered = 0  # tokens of the mark before the answer
        self._in_call = False  # within the thoughts
        self._called = 0  # tokens of the mark that begins or ends a call that the last tokens are
        self.is_open = thinking.is_open
        self._may_think = bool(thinking.begin) and not self.is_open
        self._may_answer = True  # the tokens since the beginning, or the thoughts, are its mark's
        self.is_over = not (self.is_open or self._may_think or thinking.answer)

    @property
    def opening(self) -> int | None:
        """The next token of the mark that opens thoughts, while they may still begin."""
        return self._thinking.begin[self._opened] if self._may_think else None

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
        return self._thinking.end[self._matched]

    def push(self, token_id: int) -> None:
        """Take note of a token."""
        if self.is_over:
            return
        if self.is_open:
            self._push_thought(token_id)
            return
        thinking = self._thinking
        if self._may_think:
            self._may_think = token_id == thinking.begin[self._opened]
            self._opened += self._may_think
        if self._may_think and self._opened == len(thinking.begin):
            self._may_think, self.is_open = False, True
            return
        if thinking.answer and self._may_answer:
            self._may_answer = token_id == thinking.answer[self._answered]
            self._answered += self._may_answer
        is_answered = self._may_answer and self._answered == len(thinking.answer)
        # thoughts may begin like the answer's own mark, or without one like the answer
        self.is_over = is_answered if thinking.answer else not self._may_think

    def _push_thought(self, token_id: int) -> None:
        self._num_tokens += 1
        self._follow_call(token_id)
        end = self._thinking.end
        self._matched = _matched(end, self._matched, token_id)
        if self._matched == len(end):
            self.is_open = False
            self._answered, self._may_answer = 0, True
            self.is_over = not self._thinking.answer

    def _follow_call(self, token_id: int) -> None:
        thinking = self._thinking
        mark = thinking.call_end if self._in_call else thinking.call_begin
        if not mark:
            return
        self._called = _matched(mark, self._called, token_id)
        if self._called == len(mark):
            self._in_call, self._called = not self._in_call, 0


def _matched(mark: tuple[int, ...], count: int, token_id: int) -> int:
    """How many tokens of a mark the last ones are, of which ``count`` have been its beginning."""
    if token_id != mark[count]:
        count = 0
    return count + (token_id == mark[count])
