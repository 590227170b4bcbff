"""The bucket table: which shapes are compiled; no step has another.

Owns: the ladder of shapes.
"""

from __future__ import annotations

from jaxinfer.core.shapes import cdiv, ladder
from jaxinfer.core.step import Bucket

TOKENS_PER_PREFILL = 16  # of a chunk for each of its rows
# Beyond so many rows, with which the last product takes as long as with one, twice as many tokens.
FREE_ROWS = 64
MIXED_TOKENS_PER_ROW = 4  # of a chunk beside decode rows, but for the largest chunk


def bucket_table(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_start: int,
    prefill_start: int,
    prefill_factor: int,
    mixed_start: int,
    max_num_mixed_tokens: int | None = None,
    query_tokens: int = 1,
) -> tuple[Bucket, ...]:
    """Every shape a schedule can need: decode, prefill, and mixed when two sequences can run.

    Decode rows come as 1, then ``decode_start`` and its doubles. Prefill parts come in chunks of
    ``prefill_start``, ``prefill_factor`` times that, ... up to ``max_num_batched_tokens``, with a
    row for every 16 tokens of the chunk, or, where these are more than 64, every 32: each is a row
    of logits, used or not. Shorter prompts share a step less densely. A mixed step pads its decode
    rows to ``mixed_start`` or one of its doubles, and has at most ``max_num_mixed_tokens`` of
    prompts (None: as many as any step), since all its decode rows wait for them. Chunks stand
    beside a quarter of their own number of rows at most: more rows than that take so long that a
    smaller chunk would hardly shorten the step. The largest stands beside any number. Where rows
    are more than a quarter of its tokens, it has a token less for every two more, down to half of
    them, as all those rows wait for it. Mixed buckets score; with one sequence, which needs none,
    the largest prefill bucket of at most ``max_num_mixed_tokens`` does. Decode rows have
    ``query_tokens`` tokens.
    """
    most_mixed = min(max_num_mixed_tokens or max_num_batched_tokens, max_num_batched_tokens)
    chunks = ladder(prefill_start, max_num_batched_tokens, prefill_factor)
    mixed_rows = ladder(mixed_start, max_num_seqs, 2) if max_num_seqs > 1 else ()
    shapes = [
        *((rows, 0) for rows in dict.fromkeys((1, *ladder(decode_start, max_num_seqs, 2)))),
        *((0, chunk) for chunk in chunks),
        *(
            (rows, chunk)
            for rows in mixed_rows
            for chunk in _chunks_beside(rows, most_mixed, prefill_start, prefill_factor)
        ),
    ]
    alone = max(chunk for chunk in chunks if chunk <= most_mixed or chunk == chunks[0])
    return tuple(
        Bucket(
            rows,
            chunk,
            _prefill_rows(chunk, max_num_seqs),
            scores=bool(rows and chunk) or (not mixed_rows and chunk == alone),
            query_tokens=query_tokens if rows else 1,
        )
        for rows, chunk in shapes
    )


def _chunks_beside(rows: int, most: int, start: int, factor: int) -> list[int]:
    """Tokens of the chunks beside decode rows, ``most`` at most: see ``bucket_table``."""
    beyond = max(0, rows - most // MIXED_TOKENS_PER_ROW)
    largest = max(cdiv(most, 2), most - beyond // 2)
    fewest = min(MIXED_TOKENS_PER_ROW * rows, largest)
    return [chunk for chunk in ladder(start, largest, factor) if chunk >= fewest]


def _prefill_rows(chunk: int, max_num_seqs: int) -> int:
    rows = min(chunk // TOKENS_PER_PREFILL, max(FREE_ROWS, chunk // (2 * TOKENS_PER_PREFILL)))
    return max(1, min(max_num_seqs, rows)) if chunk else 0
