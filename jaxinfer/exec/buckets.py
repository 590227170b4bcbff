"""The bucket table: which shapes are compiled before the first request.

Owns: the ladder of shapes. Must not know: jax, models, pages, devices.
"""

from __future__ import annotations

from jaxinfer.core.shapes import ladder
from jaxinfer.core.step import Bucket

TOKENS_PER_PREFILL = 16  # of a chunk for each of its rows
MIXED_TOKENS_PER_ROW = 4  # of a chunk beside decode rows, but for the two largest chunks


def bucket_table(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_start: int,
    prefill_start: int,
    prefill_factor: int,
    mixed_start: int,
    max_num_mixed_tokens: int | None = None,
) -> tuple[Bucket, ...]:
    """Every shape a schedule can need: decode, prefill, and mixed when two sequences can run.

    Decode rows come as 1, then ``decode_start`` and its doubles. Prefill parts come in chunks of
    ``prefill_start``, ``prefill_factor`` times that, ... up to ``max_num_batched_tokens``, with a
    row for every 16 tokens of the chunk: shorter prompts share a step less densely, which costs
    them nothing but a further step. A mixed step pads its decode rows to ``mixed_start`` or one of
    its doubles, and has at most ``max_num_mixed_tokens`` of prompts (None: as many as any step),
    since all its decode rows wait for them. The two largest chunks stand beside any number of rows,
    smaller ones beside a quarter of their own number at most: more rows than that take so long
    that a smaller chunk would hardly shorten the step.
    """
    most_mixed = min(max_num_mixed_tokens or max_num_batched_tokens, max_num_batched_tokens)
    chunks = ladder(prefill_start, max_num_batched_tokens, prefill_factor)
    mixed_chunks = ladder(prefill_start, most_mixed, prefill_factor)
    mixed_rows = ladder(mixed_start, max_num_seqs, 2) if max_num_seqs > 1 else ()
    shapes = [
        *((rows, 0) for rows in dict.fromkeys((1, *ladder(decode_start, max_num_seqs, 2)))),
        *((0, chunk) for chunk in chunks),
        *(
            (rows, chunk)
            for rows in mixed_rows
            for chunk in mixed_chunks
            if chunk >= min(MIXED_TOKENS_PER_ROW * rows, *mixed_chunks[-2:])
        ),
    ]
    return tuple(Bucket(rows, chunk, _prefill_rows(chunk, max_num_seqs)) for rows, chunk in shapes)


def _prefill_rows(chunk: int, max_num_seqs: int) -> int:
    return max(1, min(max_num_seqs, chunk // TOKENS_PER_PREFILL)) if chunk else 0
