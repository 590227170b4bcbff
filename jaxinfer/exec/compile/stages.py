"""Which executables a server waits for before it serves, and in which order the others follow."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.program import AUTOTUNED_ROWS, Program

# Sequences that run at once before larger steps are compiled. For 164 sequences of Qwen3-4B on an
# H200, steps of 512 rows took half as long again as those of 256 and fewer.
FIRST_ROWS = 256


def first_buckets(program: Program) -> tuple[Bucket, ...]:
    """The buckets with which an engine can begin to serve while the others are compiled.

    One that decodes and one that scores hold every step of up to ``FIRST_ROWS`` sequences, and
    likewise for each choice of variants; with one row a single user's requests are fast. XLA
    autotunes small decode steps, unless their head is quantised: that needs free memory and a
    device without other work. On a CPU these are all, as compiling beside requests would take the
    cores from them.
    """
    buckets = program.limits.buckets
    if program.platform == "cpu":
        return buckets
    decode = [b for b in buckets if not b.num_prefills]
    # an engine that pools has only prompts, and its largest bucket holds every step
    scoring = [b for b in buckets if b.scores or program.limits.pooling]
    needed = {
        _first(b for b in kind if b.variants == variants)
        for kind in (decode, scoring)
        for variants in {b.variants for b in kind}
    }
    tuned = AUTOTUNED_ROWS if _autotunes(program) else 1
    return tuple(b for b in buckets if b in needed or (b in decode and b.num_seqs <= tuned))


def _first(buckets: Iterable[Bucket]) -> Bucket:
    """The one with the fewest rows of ``FIRST_ROWS`` or more, else with the most; of these, the
    one with the most tokens.
    """
    found = tuple(buckets)
    most = max(bucket.num_decodes for bucket in found)
    rows = min((b.num_decodes for b in found if b.num_decodes >= FIRST_ROWS), default=most)
    return max((b for b in found if b.num_decodes == rows), key=lambda bucket: bucket.num_tokens)


def _autotunes(program: Program) -> bool:
    """True if XLA multiplies by the head, whose kernel it chooses by trying several."""
    head = program.params.get("lm_head", program.params["embed"])
    return isinstance(head, jax.ShapeDtypeStruct)  # quantised ones are several arrays


def first_names(program: Program) -> tuple[str, ...]:
    """The names of the executables that must be loaded before a request is served."""
    first = first_buckets(program)
    needed = {name for bucket in first for name in program.names_of(bucket)}
    of_buckets = {name for bucket in program.limits.buckets for name in program.names_of(bucket)}
    return tuple(n for n in program.names() if n in needed or n not in of_buckets)


def in_order_of_use(program: Program, names: Iterable[str]) -> list[str]:
    """The executables in the order in which they are compiled: those of small steps first.

    Until a bucket is there, its steps use a larger one, and a small step loses most by that.
    """
    buckets = sorted(
        program.limits.buckets, key=lambda bucket: (bucket.variants, bucket.num_tokens)
    )
    order = [name for bucket in buckets for name in program.names_of(bucket)]
    return sorted(names, key=order.index)
