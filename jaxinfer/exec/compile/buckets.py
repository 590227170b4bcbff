"""The bucket table: the shapes that are compiled. Every step has one of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from jaxinfer.core.shapes import cdiv, ladder, round_up
from jaxinfer.core.step import Bucket, choices

TOKENS_PER_PREFILL_ROW = 16  # a bucket has one prefill row for each 16 of its prefill tokens
# Up to this many rows the head's GEMM takes as long as for one. Further prefill rows are added for
# twice as many tokens each.
CHEAP_HEAD_ROWS = 64
# On a GPU the decode rows of mixed buckets are a multiple of this: kernels get the parts of int32
# arrays that belong to the prompts after them, at addresses that have to be multiples of 16 bytes.
GPU_ROWS = 8
MIXED_TOKENS_PER_ROW = 4  # fewest prefill tokens of a mixed bucket for each of its decode rows
# Decode rows and prefill tokens of one small mixed bucket where the others are larger: next to few
# rows, a prompt that was found in the cache up to its last page waits 2 ms less (Qwen3-4B, H200).
SMALL_MIXED = (16, 64)


def bucket_table(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_start: int,
    prefill_start: int,
    prefill_factor: int,
    mixed_start: int,
    max_num_mixed_tokens: int | None = None,
    mixed_multiple: int = 1,
    query_tokens: int = 1,
    variants: Sequence[str] = (),
    pools: bool = False,
) -> tuple[Bucket, ...]:
    """Every shape that a schedule can need: decode, prefill, and mixed if two sequences can run.

    Decode buckets have 1 row, ``decode_start`` rows and its doubles, of ``query_tokens`` tokens
    each. Prefill buckets have ``prefill_start`` tokens, ``prefill_factor`` times as many, ... up to
    ``max_num_batched_tokens``. They have a row for every 16 tokens, beyond 64 rows for every 32, as
    logits are computed for every row, used or not; many short prompts do not fill a bucket.

    Mixed buckets have ``mixed_start`` decode rows or one of its doubles, rounded up to a multiple
    of ``mixed_multiple``, and at most ``max_num_mixed_tokens`` prefill tokens (None: no further
    limit), as all decode rows wait for them. They have at least 4 tokens for each decode row: with
    more rows, fewer tokens hardly shorten the step. The largest chunk of each number of rows is an
    exception: it exists for every number. One more has ``SMALL_MIXED`` rows and tokens, if all
    others have more rows. If the rows are more than a quarter of its tokens, it has
    one token less for every two more rows, down to half of ``max_num_mixed_tokens``, as all those
    rows wait for it.

    Mixed buckets score. With one sequence there are none, and the largest prefill bucket of at most
    ``max_num_mixed_tokens`` scores.

    With ``variants`` the buckets that decode or score exist with each choice of them. Others would
    be compiled for few requests, and a step that taps would return up to ``max_num_batched_tokens``
    activations at once.

    If the engine ``pools``, which draws no tokens, there are only prefill buckets.
    """
    max_mixed = min(max_num_mixed_tokens or max_num_batched_tokens, max_num_batched_tokens)
    chunks = ladder(prefill_start, max_num_batched_tokens, prefill_factor)
    mixed_rows = ladder(mixed_start, max_num_seqs, 2) if max_num_seqs > 1 else ()
    mixed_rows = tuple(dict.fromkeys(round_up(rows, mixed_multiple) for rows in mixed_rows))
    shapes = [
        *((rows, 0) for rows in dict.fromkeys((1, *ladder(decode_start, max_num_seqs, 2)))),
        *((0, chunk) for chunk in chunks),
        *(
            (rows, chunk)
            for rows in mixed_rows
            for chunk in _mixed_chunks(rows, max_mixed, prefill_start, prefill_factor)
        ),
    ]
    rows, tokens = SMALL_MIXED
    if mixed_rows and mixed_rows[0] > rows and tokens in chunks and tokens <= max_mixed:
        shapes.append(SMALL_MIXED)
    if pools:
        return tuple(Bucket(0, chunk, _prefill_rows(chunk, max_num_seqs)) for chunk in chunks)
    scored_chunk = max(chunk for chunk in chunks if chunk <= max_mixed or chunk == chunks[0])
    plain = tuple(
        Bucket(
            rows,
            chunk,
            _prefill_rows(chunk, max_num_seqs),
            scores=bool(rows and chunk) or (not mixed_rows and chunk == scored_chunk),
            query_tokens=query_tokens if rows else 1,
        )
        for rows, chunk in shapes
    )
    varied = [b for b in plain if b.scores or not b.num_prefills]
    _, *others = choices(variants)
    return (*plain, *(replace(bucket, variants=own) for own in others for bucket in varied))


def _mixed_chunks(rows: int, max_mixed: int, start: int, factor: int) -> list[int]:
    """Prefill tokens of the mixed buckets with so many decode rows: see ``bucket_table``."""
    excess_rows = max(0, rows - max_mixed // MIXED_TOKENS_PER_ROW)
    largest = max(cdiv(max_mixed, 2), max_mixed - excess_rows // 2)
    smallest = min(MIXED_TOKENS_PER_ROW * rows, largest)
    return [chunk for chunk in ladder(start, largest, factor) if chunk >= smallest]


def _prefill_rows(chunk: int, max_num_seqs: int) -> int:
    rows = min(
        chunk // TOKENS_PER_PREFILL_ROW, max(CHEAP_HEAD_ROWS, chunk // (2 * TOKENS_PER_PREFILL_ROW))
    )
    return max(1, min(max_num_seqs, rows)) if chunk else 0
