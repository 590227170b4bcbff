"""The interface of a constraint on the tokens of a sequence, which ``text.grammar`` implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

BITS = 32  # tokens in one word of a mask
ALL_TOKENS = 0xFFFF_FFFF  # a word that allows its tokens


class TokenFilter(Protocol):
    """Follows one sequence and says which tokens may be next."""

    def push(self, token_id: int) -> None:
        """Take note of a drawn token; raises ``ValueError`` if it was not allowed."""
        ...

    def fill(self, mask: np.ndarray) -> None:  # uint32[W]
        """Write the mask of the next token: bit t % 32 of word t // 32 is 1 if t may be next.

        Raises ``RequestError`` if no token may be because of what the request asks for; any other
        error is the engine's.
        """
        ...


class Constraint(Protocol):
    """The constraint of a request's tokens; its sequences share it."""

    def begin(self, drawn: Sequence[int]) -> TokenFilter:
        """A filter for a sequence that has drawn these tokens; raises ``ValueError`` if these were
        not allowed.
        """
        ...
