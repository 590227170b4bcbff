"""``Grammars``: the compiled forms that are in memory, and the forms that were refused."""

from __future__ import annotations

import weakref
from collections import OrderedDict

from jaxinfer.core.errors import QueueFullError, RequestError
from jaxinfer.core.structured import FIELD, StructuredOutputsParams
from jaxinfer.text.grammar.constraint import Grammar

MAX_CACHED_BYTES = 64 << 20  # of grammars that are kept for later requests, with their forms
BYTES_OF_REFUSAL = 1 << 10


class Grammars:
    """Grammars by form. Those that open requests use count as well: all have at most ``max_bytes``,
    and those that are kept for later requests ``MAX_CACHED_BYTES``. It has no lock.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # the last ones are those of the last requests
        self._kept: OrderedDict[StructuredOutputsParams, Grammar | RequestError] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[StructuredOutputsParams, Grammar] = (
            weakref.WeakValueDictionary()
        )

    def find(self, params: StructuredOutputsParams) -> Grammar | RequestError | None:
        """The grammar of a form, or the error with which it was refused, if one is known."""
        found = self._kept.get(params) or self._alive.get(params)
        if isinstance(found, Grammar) and found.has_failed:
            self._kept.pop(params, None)
            return None
        if params in self._kept:
            self._kept.move_to_end(params)
        return found

    def keep(self, params: StructuredOutputsParams, found: Grammar | RequestError) -> None:
        """Remember the grammar of a form, or the error with which it was refused."""
        self._kept[params] = found
        self._kept.move_to_end(params)
        if isinstance(found, Grammar):
            self._alive[params] = found
        size = sum(_size(*one) for one in self._kept.items())
        while size > MAX_CACHED_BYTES and len(self._kept) > 1:
            size -= _size(*self._kept.popitem(last=False))

    def make_room(self, num_bytes: int) -> None:
        """Forget grammars until a further one may be made; raises ``QueueFullError`` if those of
        open requests leave no memory for it.
        """
        while self._num_bytes() + num_bytes > self._max_bytes and self._kept:
            self._kept.popitem(last=False)
        used = self._num_bytes()
        if used + num_bytes > self._max_bytes:
            raise QueueFullError(
                f"{FIELD} of open requests take {used >> 20} MiB, and {self._max_bytes >> 20} MiB "
                "are allowed; try again later"
            )

    def _num_bytes(self) -> int:
        return sum(grammar.num_bytes for grammar in list(self._alive.values()))


def _size(params: StructuredOutputsParams, found: Grammar | RequestError) -> int:
    own = found.num_bytes if isinstance(found, Grammar) else BYTES_OF_REFUSAL
    return own + params.num_characters
