"""``Source``: the text of a tool call as it arrives, read by generators that wait for more of it.

A generator yields None where it needs further text. However the text is divided, it reads the same:
a mark counts once no further text can change it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import cache

import regex

PATTERN_SECONDS = 1.0  # a pattern from a model's files that takes longer ends its request

QUOTES = ('"', "'", '"""', "'''")  # marks within which a backslash escapes

_TEXT = regex.compile(r"\S")
# parts of a pattern that may match at the end of a text, and not before more of it
_LOOKS_FOR_AN_END = regex.compile(r"\\[ZbBmM]|\$|\(\?!")

type Waiting[T] = Generator[None, None, T]


class Source:
    """Text from ``at`` on is not read yet. ``unsent``: the text that has been read since the driver
    has last emptied it.
    """

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self.unsent: list[str] = []
        self.is_marked = False  # a mark of calls is before the text
        self.is_ended = False
        self.is_cut = False  # the model has not ended the answer

    def add(self, text: str) -> None:
        """Add text; a character before ``at`` stays, for patterns that look behind."""
        done = max(self.at - 1, 0)
        self.text = self.text[done:] + text
        self.at -= done

    def end(self, *, is_cut: bool) -> None:
        """Mark the end of the answer."""
        self.is_ended, self.is_cut = True, is_cut

    def take(self, end: int) -> str:
        """Read the text up to ``end``."""
        taken = self.text[self.at : end]
        self.at = end
        self.unsent.append(taken)
        return taken

    def before(self, pattern: regex.Pattern[str]) -> tuple[str, regex.Match[str] | None]:
        """Read the text before the next match, as far as it is certain, and the match; None if the
        match has not arrived.
        """
        found = pattern.search(
            self.text, self.at, partial=not self.is_ended, timeout=PATTERN_SECONDS
        )
        if found is None and self.is_cut:  # a match that is cut off is no part of the text, either
            found = pattern.search(self.text, self.at, partial=True, timeout=PATTERN_SECONDS)
        if found is None:
            return self.take(len(self.text)), None
        text = self.take(found.start())
        if found.partial or not (self.is_ended or is_settled(pattern, found, self.text)):
            return text, None
        self.take(found.end())
        return text, found

    def held_before(
        self, pattern: regex.Pattern[str]
    ) -> Waiting[tuple[str, regex.Match[str] | None]]:
        """Read the text before the next match, and the match; None if the text ends without."""
        held: list[str] = []
        while True:
            text, found = self.before(pattern)
            held.append(text)
            if found is not None or self.is_ended:
                return "".join(held), found
            yield None

    def read(self, pattern: regex.Pattern[str]) -> Waiting[regex.Match[str] | None]:
        """Read a match that begins here; None if there is none."""
        while True:
            found = pattern.match(
                self.text, self.at, partial=not self.is_ended, timeout=PATTERN_SECONDS
            )
            if found is None:
                return None
            if self.is_ended or is_settled(pattern, found, self.text):
                self.take(found.end())
                return found
            yield None

    def expect(self, pattern: regex.Pattern[str]) -> Waiting[regex.Match[str]]:
        """Read a match that begins here; raises ``ValueError`` if there is none."""
        found = yield from self.read(pattern)
        if found is None:
            raise ValueError(f"no {pattern.pattern} is here")
        return found

    def skip_space(self) -> Waiting[str]:
        """Read white space; returns the character after it, empty at the end."""
        while True:
            found = _TEXT.search(self.text, self.at)
            self.take(len(self.text) if found is None else found.start())
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_ended:
                return ""
            yield None

    def value(self, nesting: Nesting) -> Waiting[str]:
        """Read a value to its end, or to that of the text."""
        held: list[str] = []
        while True:
            held.append(self.take(nesting.follow(self)))
            if nesting.is_over or self.is_ended:
                return "".join(held)
            yield None


class Nesting:
    """Follows the brackets and strings of a value, to find its end.

    ``marks``: the mark that ends a string by the one that begins it; quotes escape by a backslash.
    A value ends with its last bracket; with ``in_list`` it ends before a comma or the bracket of
    the list around it.
    """

    def __init__(self, marks: Mapping[str, str], *, in_list: bool = False) -> None:
        self.is_over = False
        self._marks = marks
        self._in_list = in_list
        self._longest = max(map(len, marks))
        self._depth = int(in_list)
        self._closing = ""  # the mark that ends the open string
        self._outside = _any_of((*marks, *"()[]{}", *("," * in_list)))

    def follow(self, source: Source) -> int:
        """Follow the text that has not been read; returns where the value ends, or where its rest
        begins.
        """
        text, at = source.text, source.at
        while not self.is_over:
            pattern = _ending(self._closing) if self._closing else self._outside
            found = pattern.search(text, at, partial=not source.is_ended)
            if found is None:
                return len(text)
            if found.partial:
                return found.start()
            if not (source.is_ended or self._closing):
                growing = self._growing(text, at, found.start())
                if growing is not None:
                    return growing
            at = self._passed(found)
        return at

    def _growing(self, text: str, at: int, last: int) -> int | None:
        """Where, up to ``last``, a mark begins that further text makes longer: a quote that becomes
        three, or one within another mark.
        """
        for start in range(max(at, len(text) - self._longest + 1), last + 1):
            rest = text[start:]
            if any(one != rest and one.startswith(rest) for one in self._marks):
                return start
        return None

    def _passed(self, found: regex.Match[str]) -> int:
        """Where to go on after a mark."""
        mark = found[0]
        if self._closing:
            if mark == self._closing:
                self._closing = ""
        elif mark in self._marks:
            self._closing = self._marks[mark]
        elif mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth -= 1
            self.is_over = self._depth <= 0
        else:
            self.is_over = self._depth == 1
        return found.start() if self.is_over and self._in_list else found.end()


@cache
def _any_of(marks: Sequence[str]) -> regex.Pattern[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)))


@cache
def _ending(mark: str) -> regex.Pattern[str]:
    """The mark that ends a string, or escapes, which may hide it."""
    escapes = r"(?:\\.)++|" if mark in QUOTES else ""
    return regex.compile(escapes + regex.escape(mark), regex.DOTALL)


def is_settled(pattern: regex.Pattern[str], found: regex.Match[str], text: str) -> bool:
    """True if text after the end of ``text`` cannot change this match."""
    if found.partial or found.end() == len(text):
        return False
    if not _LOOKS_FOR_AN_END.search(pattern.pattern):
        return True
    # a character that no text has shows that the end of the text has counted
    again = pattern.match(text + "\0", found.start(), timeout=PATTERN_SECONDS)
    return (
        again is not None
        and again.span() == found.span()
        and again.groupdict() == found.groupdict()
    )
