"""The output of one iteration of the engine, and its counters.

``News`` and its parts are plain records that may be sent to another thread or process. Times are
seconds of ``time.monotonic``, one clock for all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from jaxinfer.core.tiers import TierStats
from jaxinfer.engine.requests.outputs import Delta

_GREATEST = ("load_seconds", "compile_seconds", "weight_version", "sleep_level")


class StepKind(StrEnum):
    """The rows of a step: decode rows, chunks of prompts, or both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """One finished step. ``seconds``: since the later of its launch and the previous step's end."""

    kind: StepKind
    num_tokens: int  # scheduled tokens
    num_bucket_tokens: int  # computed tokens, padding included
    seconds: float


NO_TIERS = TierStats()


class EngineStats(msgspec.Struct, frozen=True, gc=False):
    """Counters since the engine was built, times of its start in seconds, and present values."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # of accepted requests, for each of the n sequences
    num_prefilled_tokens: int = 0  # prompt tokens of sequences with a first token
    num_looked_up_tokens: int = 0  # of the prefilled ones, whose prefixes may be reused
    num_cached_tokens: int = 0  # of these, reused from the prefix cache
    num_restored_tokens: int = 0  # of the cached ones, from tiers
    num_generated_tokens: int = 0
    num_iterations: int = 0
    num_preemptions: int = 0
    num_late_compiles: int = 0
    num_compiled: int = 0  # of the executables; the rest came from the bundle
    num_executables: int = 0  # loaded
    num_awaited: int = 0  # executables that are compiled or loaded while the first ones serve
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    # present values
    num_running: int = 0  # sequences with a slot
    num_waiting: int = 0
    num_live_pages: int = 0  # owned by sequences
    num_live_pages_of_groups: tuple[int, ...] = ()  # the same, of each of ``Limits.groups``
    num_cached_pages: int = 0  # of no sequence, kept for prefix reuse until they are needed
    num_fresh_pages: int = 0
    weight_version: int = 0  # changes of weights since the start
    sleep_level: int = 0  # 0 while the engine is awake
    tiers: TierStats = NO_TIERS


class News(msgspec.Struct, frozen=True, tag=True):
    """The output of an iteration. ``started``: requests whose first sequence got a slot. ``rank``:
    the replica that it is of.
    """

    deltas: tuple[Delta, ...]
    started: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    stats: EngineStats
    rank: int = 0


def added(stats: Sequence[EngineStats]) -> EngineStats:
    """Those of several engines: sums of counters and present values, and the greatest of times,
    versions and levels.
    """
    values: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        each = [getattr(one, name) for one in stats]
        if name in _GREATEST:
            values[name] = max(each)
        elif name == "tiers":
            names = TierStats.__struct_fields__
            values[name] = TierStats(*(sum(getattr(one, own) for one in each) for own in names))
        elif name == "num_live_pages_of_groups":
            values[name] = tuple(map(sum, zip(*filter(None, each), strict=True)))
        else:
            values[name] = sum(each)
    return EngineStats(**values)
