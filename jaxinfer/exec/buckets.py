"""The bucket table: which shapes are compiled before the first request.

Owns: the ladder of shapes. Must not know: jax, models, pages.
"""

from __future__ import annotations

from jaxinfer.core.shapes import powers_of_two
from jaxinfer.core.step import Bucket

PREFILL_LADDER_START = 64  # the smallest padded chunk; a chat turn is seldom shorter
PREFILL_LADDER_FACTOR = 8  # few buckets: padding costs less than compiling twice as many shapes
MIXED_LADDER_START = 8  # a mixed step pads its decode rows to 8, 64, ... or max_num_seqs


def bucket_table(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Every shape a schedule can need: decode, prefill, and mixed when two sequences can run.

    Decode rows come in powers of two. Prefill parts come in chunks of 64, 512, ... up to
    ``max_num_batched_tokens``, with a row for every 16 tokens of the chunk: shorter prompts share
    a step less densely, which costs them nothing but a further step.
    """
    decodes = [Bucket(rows) for rows in powers_of_two(max_num_seqs)]
    mixed_rows = _ladder(MIXED_LADDER_START, max_num_seqs) if max_num_seqs > 1 else ()
    prefills = [
        Bucket(rows, tokens, max(1, min(max_num_seqs, tokens // 16)))
        for tokens in _ladder(PREFILL_LADDER_START, max_num_batched_tokens)
        for rows in (0, *mixed_rows)
    ]
    return tuple(decodes + prefills)


def _ladder(start: int, limit: int) -> tuple[int, ...]:
    """start, start * 8, ... below ``limit``, then ``limit`` itself."""
    rungs: list[int] = []
    while start < limit:
        rungs.append(start)
        start *= PREFILL_LADDER_FACTOR
    return (*rungs, limit)
