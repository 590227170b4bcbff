"""The bucket table: which shapes are compiled before the first request.

Owns: the ladder of shapes. Must not know: jax, models, pages, devices.
"""

from __future__ import annotations

from jaxinfer.core.shapes import ladder
from jaxinfer.core.step import Bucket

TOKENS_PER_PREFILL = 16  # of a chunk for each of its rows
MIXED_ROWS_FACTOR = 8  # from one number of decode rows beside a chunk to the next
MIXED_CHUNK_FACTOR = 4  # between chunks beside the most decode rows, at least
MIXED_CHUNKS = (4, 64)  # tokens of a chunk for each of fewer decode rows beside it: least and most


def bucket_table(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_start: int,
    prefill_start: int,
    prefill_factor: int,
    mixed_start: int,
) -> tuple[Bucket, ...]:
    """Every shape a schedule can need: decode, prefill, and mixed when two sequences can run.

    Decode rows come as 1, then ``decode_start`` and its doubles. Prefill parts come in chunks of
    ``prefill_start``, ``prefill_factor`` times that, ... up to ``max_num_batched_tokens``, with a
    row for every 16 tokens of the chunk: shorter prompts share a step less densely, which costs
    them nothing but a further step. A mixed step pads its decode rows to ``mixed_start``, 8 times
    that, ... or ``max_num_seqs``. Beside the most rows chunks are few, since both are large there;
    beside fewer, which is what a server meets with a prompt at a time, there are all chunks for
    which the padding of either part stays small.
    """
    chunks = ladder(prefill_start, max_num_batched_tokens, prefill_factor)
    few = ladder(prefill_start, max_num_batched_tokens, max(prefill_factor, MIXED_CHUNK_FACTOR))
    mixed_rows = ladder(mixed_start, max_num_seqs, MIXED_ROWS_FACTOR) if max_num_seqs > 1 else ()
    decodes = dict.fromkeys((1, *ladder(decode_start, max_num_seqs, 2)))
    least, most = MIXED_CHUNKS
    shapes = [
        *((rows, 0) for rows in decodes),
        *((0, chunk) for chunk in chunks),
        *(
            (rows, chunk)
            for rows in mixed_rows[:-1]
            for chunk in chunks
            if least * rows <= chunk <= most * rows
        ),
        *(
            (rows, chunk)
            for rows in mixed_rows[-1:]
            for chunk in few
            if chunk >= rows or chunk == max_num_batched_tokens
        ),
    ]
    return tuple(Bucket(rows, chunk, _prefill_rows(chunk, max_num_seqs)) for rows, chunk in shapes)


def _prefill_rows(chunk: int, max_num_seqs: int) -> int:
    return max(1, min(max_num_seqs, chunk // TOKENS_PER_PREFILL)) if chunk else 0
