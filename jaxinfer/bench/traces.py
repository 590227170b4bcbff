"""Requests of recorded traces: lengths, arrival times, and which prompts share a prefix.

Mooncake's form is a JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one for each 512 tokens; equal ids are equal tokens. Azure's is CSV: ``TIMESTAMP``,
``ContextTokens``, ``GeneratedTokens``. Neither has texts, so token ids are drawn.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.bench.workload import DEFAULT_OUTPUT, Query, file_text
from jaxinfer.core.errors import BenchError

type Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]  # [tokens]

BLOCK = 512  # tokens of a hash id


@dataclass(frozen=True)
class Arrival:
    """One request of a trace; ``when`` is in seconds since the first one, ``block`` the tokens of
    each of ``blocks``.
    """

    when: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    block: int = BLOCK

    def scaled(self, factor: int) -> Arrival:
        """The request with lengths and blocks divided by ``factor``."""
        lengths = max(1, self.input_len // factor), max(1, self.output_len // factor)
        return Arrival(self.when, *lengths, self.blocks, self.block // factor)


def read_trace(path: Path, count: int | None = None) -> list[Arrival]:
    """The first ``count`` requests of a trace; raises ``BenchError`` if it is none."""
    text = file_text(path)
    first = text.lstrip()[:1]
    try:
        found = _mooncake(text) if first == "{" else _azure(text)
    except (KeyError, ValueError, TypeError) as error:
        raise BenchError(
            f"{path} has a row of neither Mooncake's nor Azure's form "
            f"({type(error).__name__}: {error}); name another trace"
        ) from error
    if not found:
        raise BenchError(f"{path} has no requests; name another trace")
    start = min(one.when for one in found)
    ordered = sorted(found, key=lambda one: one.when)[:count]
    return [Arrival(one.when - start, one.input_len, one.output_len, one.blocks) for one in ordered]


def _mooncake(text: str) -> list[Arrival]:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        Arrival(
            row["timestamp"] / 1e3,
            int(row["input_length"]),
            int(row.get("output_length") or DEFAULT_OUTPUT),
            tuple(row.get("hash_ids", ())),
        )
        for row in rows
    ]


def _azure(text: str) -> list[Arrival]:
    return [
        Arrival(
            datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp(),
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )
        for row in csv.DictReader(io.StringIO(text))
    ]


def queries_of(
    trace: Sequence[Arrival],
    vocab: Sequence[int],
    seed: int,
    *,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
) -> list[Query]:
    """Prompts of token ids with the trace's lengths, cut to the given ones; blocks with one hash id
    are equal.
    """
    ids = np.asarray(vocab)
    return [
        Query(
            prompt_of(one, index, ids, seed, max_input_len).tolist(),
            cut(one.output_len, max_output_len),
        )
        for index, one in enumerate(trace)
    ]


def prompt_of(
    one: Arrival, index: int, ids: Ids, seed: int, max_input_len: int | None = None
) -> Ids:
    """The prompt of the request of this number in a trace; see ``queries_of``."""
    length = cut(one.input_len, max_input_len)
    streams = [[seed, 4, block] for block in one.blocks] or [[seed, 5, index]]
    size = one.block if one.blocks else length
    parts, num_drawn = list[Ids](), 0
    for stream in streams:
        if num_drawn < length:
            rng = np.random.default_rng(stream)
            parts.append(ids[rng.integers(0, len(ids), size=size)])
            num_drawn += size
    if num_drawn < length:  # a trace may list fewer hashes than its length has blocks
        rng = np.random.default_rng([seed, 5, index])
        parts.append(ids[rng.integers(0, len(ids), size=length - num_drawn)])
    return np.concatenate(parts)[:length]


def cut(length: int, most: int | None) -> int:
    """A length of a trace, at least 1 and at most ``most``."""
    return max(1, min(length, most or length))


def most_reused(trace: Sequence[Arrival], max_input_len: int | None = None) -> list[int]:
    """The tokens of each prompt that any cache could have: the longest beginning that an earlier
    prompt has as well, without the last token, which must be computed.

    Answers are not counted: a trace does not say which later prompt contains them.
    """
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # (node, block): the next node, its tokens
    found: list[int] = []
    for one in trace:
        length, node, reused, is_known = cut(one.input_len, max_input_len), 0, 0, True
        for number, block in enumerate(one.blocks):
            own = min(one.block, length - number * one.block)
            if own <= 0:
                break
            after, most = seen.get((node, block), (len(seen) + 1, 0))
            if is_known:
                reused += min(own, most)
                is_known = own == one.block  # a block after one that is not whole is unknown
            seen[node, block] = after, max(own, most)
            node = after
        found.append(min(reused, length - 1))
    return found
