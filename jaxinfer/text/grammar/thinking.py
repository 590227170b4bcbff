"""The thoughts at the beginning of one answer: where they end, and the budget that ends them."""

from __future__ import annotations

from jaxinfer.core.structured import Thinking


class ThoughtTracker:
    """Follows the tokens of an answer until its thoughts are over."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._num_tokens = 0  # of the thoughts, or of the mark that opens them
        self._matched = 0  # tokens of the closing mark that the last tokens are
        self.is_open = thinking.is_open
        self.is_over = not self.is_open and not thinking.begin

    @property
    def opening(self) -> int | None:
        """The next token of the mark that opens thoughts, while they may still begin."""
        if self.is_open or self.is_over:
            return None
        return self._thinking.begin[self._num_tokens]

    @property
    def forced(self) -> int | None:
        """The only token that may be next: past the budget that of the mark that ends thoughts."""
        budget = self._thinking.budget
        if not self.is_open or budget is None or self._num_tokens < budget:
            return None
        return self._thinking.end[self._matched]

    def push(self, token_id: int) -> None:
        """Take note of a token."""
        if self.is_over:
            return
        self._num_tokens += 1
        if self.is_open:
            end = self._thinking.end
            if token_id != end[self._matched]:
                self._matched = 0
            self._matched += token_id == end[self._matched]
            self.is_over = self._matched == len(end)
            self.is_open = not self.is_over
        elif token_id != self._thinking.begin[self._num_tokens - 1]:
            self.is_over = True  # the answer has no thoughts
        elif self._num_tokens == len(self._thinking.begin):
            self.is_open, self._num_tokens = True, 0
