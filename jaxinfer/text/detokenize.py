"""Text from a growing sequence of tokens: ``IncrementalDetokenizer`` and ``StopStrings``.

Owns: the rule for which characters are final and may be shown. Both hold the state of one sequence.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from jaxinfer.core.errors import RequestError
from jaxinfer.text.pieces import PieceTable

# The "surrogateescape" error handler decodes a byte that is not UTF-8 to one of these.
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
_REPLACEMENT = "\ufffd"
_MAX_BYTES = 4  # of a character


class IncrementalDetokenizer:
    """Decodes the tokens of one sequence as they arrive, in constant time for each token.

    The pushes and the flush together equal ``tokenizer.decode`` of all tokens. Bytes are held back
    while they may still become a character; bytes that can no longer become one are U+FFFD.

    One exception, in byte-fallback (sentencepiece) vocabularies: if a run of adjacent byte tokens
    is not valid UTF-8, the library's decode drops even the valid characters of the run and writes
    one U+FFFD for each of its bytes. A stream has already shown those characters, so here they stay
    and only the other bytes become one U+FFFD each.
    """

    def __init__(
        self,
        pieces: PieceTable,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """``prompt_token_ids`` are the context.

        They are not returned, but the output's first character may begin in them, and sentencepiece
        drops a leading space only at the start of a text. The time for them does not grow with
        their number.
        """
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._byte_fallback = pieces.rule.byte_fallback
        errors = "surrogateescape" if self._byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._spaces_to_drop = pieces.rule.leading_spaces
        self._skip_context(prompt_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that became final."""
        return self._finish(self._utf8.decode(b"".join(map(self._shown_bytes, token_ids))))

    def push_with_offsets(self, token_ids: Iterable[int]) -> tuple[str, list[int]]:
        """``push``, and the offset of each token in the text that became final, in characters.

        Parts of one character have the same offset; a token without text has that of the next one.
        """
        parts: list[str] = []
        offsets: list[int] = []
        length = 0
        for token_id in token_ids:
            data = self._shown_bytes(token_id)
            # A held-back character that the first byte does not continue becomes final, as U+FFFD,
            # before the token's own text.
            first = self._utf8.decode(data[:1])
            num_own = 0 if self._utf8.getstate()[0] else len(first[-1:])
            before = self._finish(first[: len(first) - num_own])
            own = self._finish(first[len(first) - num_own :] + self._utf8.decode(data[1:]))
            offsets.append(length + len(before))
            parts += (before, own)
            length += len(before) + len(own)
        return "".join(parts), offsets

    def flush(self) -> str:
        """End the sequence; return the held-back bytes, as U+FFFD."""
        return self._finish(self._utf8.decode(b"", True))

    def _skip_context(self, token_ids: Sequence[int]) -> None:
        """Set the state that pushing all of these tokens would leave.

        The first tokens decide whether the text has begun, the last bytes which character is
        incomplete. The tokens between make no difference, since UTF-8 marks where a character
        begins.
        """
        start, end = 0, len(token_ids)
        while self._spaces_to_drop and start < end:
            self.push(token_ids[start : start + 1])
            start += 1
        tail, num_bytes = end, 0
        while tail > start and num_bytes < _MAX_BYTES:
            tail -= 1
            num_bytes += len(self._shown_bytes(token_ids[tail]))
        if tail > start:
            self._utf8.reset()
        self.push(token_ids[tail:])

    def _shown_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        return b"" if piece.is_special and self._skip_special_tokens else piece.data

    def _finish(self, text: str) -> str:
        if self._byte_fallback and not text.isascii():
            text = _ESCAPED_BYTE.sub(_REPLACEMENT, text)
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text


class StopStrings:
    """Finds the first stop string in a text that arrives in parts.

    The first is the one that ends first; of several that end together, the longest. The division
    into parts makes no difference. The held-back text is exactly its longest suffix that could
    still become a stop string.

    An Aho-Corasick automaton (Aho and Corasick 1975): building it takes time and memory linear in
    the total length of the stop strings; a push takes time linear in its text and the held-back
    text, for any number of stop strings.
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        if not all(stop):
            raise RequestError("A stop string must not be empty; remove it.")
        self._include_in_output = include_in_output
        self._next: dict[int, int] = {}  # (node << 21 | character) -> node, the trie's edges
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends at the node, 0: none
        self._fail = [0]  # the node of the longest proper suffix that is also in the trie
        self._has_longer = [False]  # whether a longer prefix of a stop string follows
        self._build(stop)
        self._node = 0
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Add text; return (text that may be shown, the stop string found or None).

        A stop string that ends within a text of ``may_end=False`` does not count; one that begins
        in it may end later. After a stop string is found the sequence has ended: do not call push
        or flush again.
        """
        if not self._next:
            return text, None
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._node = self._step(self._node, ord(char))
            if (length := self._match[self._node]) and may_end:
                self._held = ""
                found = seen[end - length : end]
                return seen[: end if self._include_in_output else end - length], found
        # after a stop string that did not count
        while self._node and not self._has_longer[self._node]:
            self._node = self._fail[self._node]
        final = len(seen) - self._depth[self._node]
        self._held = seen[final:]
        return seen[:final], None

    def flush(self) -> str:
        """End the text; return the held-back text."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, node: int, char: int) -> int:
        while True:
            following = self._next.get(node << 21 | char)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._fail[node]

    def _build(self, stop: tuple[str, ...]) -> None:
        # shallow nodes first: the failure link of a node is always shallower than the node
        prefixes, depth = [(string, 0) for string in stop], 0
        while prefixes:
            depth += 1
            for number, (string, parent) in enumerate(prefixes):
                key = parent << 21 | ord(string[depth - 1])
                if key not in self._next:
                    fail = self._step(self._fail[parent], ord(string[depth - 1])) if parent else 0
                    self._next[key] = len(self._depth)
                    self._depth.append(depth)
                    self._match.append(self._match[fail])
                    self._fail.append(fail)
                    self._has_longer.append(False)
                    self._has_longer[parent] = True
                prefixes[number] = string, self._next[key]
            for string, node in prefixes:
                if len(string) == depth:
                    self._match[node] = depth
            prefixes = [one for one in prefixes if len(one[0]) > depth]
