"""The bucket table: which shapes are compiled before the first request.

Owns: the ladder of shapes. Must not know: jax, models, pages.
"""

from __future__ import annotations

from jaxinfer.core.shapes import ladder
from jaxinfer.core.step import Bucket

LADDER_FACTOR = 8  # of chunks and mixed rows: padding costs less than compiling more shapes
MIXED_LADDER_START = 16  # a mixed step pads its decode rows to 16, 128, ... or max_num_seqs


def bucket_table(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_start: int,
    prefill_start: int,
) -> tuple[Bucket, ...]:
    """Every shape a schedule can need: decode, prefill, and mixed when two sequences can run.

    Decode rows come as 1, then ``decode_start`` and its doubles. Prefill parts come in chunks of
    ``prefill_start``, 8 times that, ... up to ``max_num_batched_tokens``, with a row for every 16
    tokens of the chunk: shorter prompts share a step less densely, which costs them nothing but a
    further step.
    """
    decode_rows = dict.fromkeys((1, *ladder(decode_start, max_num_seqs, 2)))
    decodes = [Bucket(rows) for rows in decode_rows]
    mixed_rows = ladder(MIXED_LADDER_START, max_num_seqs, LADDER_FACTOR) if max_num_seqs > 1 else ()
    prefills = [
        Bucket(rows, tokens, max(1, min(max_num_seqs, tokens // 16)))
        for tokens in ladder(prefill_start, max_num_batched_tokens, LADDER_FACTOR)
        for rows in (0, *mixed_rows)
    ]
    return tuple(decodes + prefills)
