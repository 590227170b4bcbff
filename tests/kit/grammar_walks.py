"""Forms compiled in this process, with bytes as tokens, and random texts of them.

A trial process for each form would take most of a test's time.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import llguidance

from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.text.grammar.source import grammar_source, limits, unusable
from jaxinfer.text.grammar.table import GrammarTable
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tokenizers import TINY_EOS_ID, TINY_VOCAB_SIZE, tiny_tokenizer_spec


class Walk(NamedTuple):
    """A random text: ``end`` is *ended*, *long* (it could go on), or *dead* (no token could)."""

    end: str
    text: bytes


class Form:
    """A form; raises ``RequestError`` if it is refused."""

    def __init__(self, **fields: Any) -> None:
        params = StructuredOutputsParams.of(fields)
        assert params is not None
        table = _table()
        source = grammar_source(params, table._read().special)
        self._first = llguidance.LLMatcher(table._table, source, log_level=0, limits=limits())
        if self._first.is_error():
            raise unusable(params.kind, self._first.get_error())

    def accepts(self, text: str) -> bool:
        """True if a text has the form."""
        matcher = self._first.deep_copy()
        return all(map(matcher.consume_token, text.encode())) and matcher.is_accepting()

    def walk(self, seed: int, longest: int = 400, stop: float = 0.4) -> Walk:
        """A text drawn at random, of letters and digits more often than of odd bytes; it ends where
        it may with the probability ``stop``.
        """
        rng, matcher, drawn = random.Random(seed), self._first.deep_copy(), bytearray()
        for _ in range(longest):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            tokens = [one for one in range(mask.bit_length()) if mask >> one & 1]
            if matcher.is_error() or not tokens:
                return Walk("dead", bytes(drawn))
            if tokens == [TINY_EOS_ID] or (TINY_EOS_ID in tokens and rng.random() < stop):
                return Walk("ended", bytes(drawn))
            tokens = [one for one in tokens if one < 256]
            usual = [one for one in tokens if chr(one).isalnum() or chr(one) in '"}]<'] or tokens
            token = rng.choice(usual if rng.random() < 0.8 else tokens)
            matcher.consume_token(token)
            drawn.append(token)
        return Walk("long", bytes(drawn))


@cache
def _table() -> GrammarTable:
    tokenizer = load_tokenizer(tiny_tokenizer_spec())
    table = GrammarTable(tokenizer, TINY_VOCAB_SIZE, (TINY_EOS_ID,))
    table.prepare()
    return table
