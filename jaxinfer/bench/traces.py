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

import numpy as np

from jaxinfer.bench.workload import Query, file_text
from jaxinfer.core.errors import BenchError

BLOCK = 512  # tokens of a hash id


@dataclass(frozen=True)
class Arrival:
    """One request of a trace; ``when`` is in seconds since the first one."""

    when: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


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
            int(row["output_length"]),
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
    queries: list[Query] = []
    for index, one in enumerate(trace):
        length = min(max(1, one.input_len), max_input_len or one.input_len)
        streams = [[seed, 4, block] for block in one.blocks] or [[seed, 5, index]]
        size = BLOCK if one.blocks else length
        prompt: list[int] = []
        for stream in streams:
            if len(prompt) < length:
                rng = np.random.default_rng(stream)
                prompt += ids[rng.integers(0, len(ids), size=size)].tolist()
        if len(prompt) < length:  # a trace may list fewer hashes than its length has blocks
            rng = np.random.default_rng([seed, 5, index])
            prompt += ids[rng.integers(0, len(ids), size=length - len(prompt))].tolist()
        output = min(max(1, one.output_len), max_output_len or one.output_len)
        queries.append(Query(prompt[:length], max(1, output)))
    return queries
