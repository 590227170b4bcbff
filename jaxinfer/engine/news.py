"""What one turn of the engine has to tell, and the counters behind it.

Owns: ``News`` and its parts: plain records that may cross to another thread or process. Times are
seconds of ``time.monotonic``, one clock for all processes of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jaxinfer.engine.outputs import Delta


class StepKind(StrEnum):
    """What a step computes: one token a row, chunks of prompts, or both."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step. ``seconds`` is what it added: since it could start, or its launch."""

    kind: StepKind
    num_tokens: int  # that were asked for
    num_bucket_tokens: int  # that were computed, padding included
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was built, times in seconds, and what it holds now."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # of accepted requests, all n sequences
    num_prefilled_tokens: int = 0  # prompt tokens of sequences that have got their first token
    num_cached_tokens: int = 0  # of those, reused from the prefix cache
    num_generated_tokens: int = 0
    num_turns: int = 0
    num_preemptions: int = 0
    num_late_compiles: int = 0
    num_compiled: int = 0  # executables compiled at start; the rest came from the bundle
    num_executables: int = 0
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    # now
    num_running: int = 0  # sequences with a slot
    num_waiting: int = 0
    num_live_pages: int = 0  # owned by sequences
    num_live_pages_of_groups: tuple[int, ...] = ()  # the same, of each of ``Limits.windows``
    num_cached_pages: int = 0  # owned by nobody, kept for prefix reuse until somebody needs them
    num_fresh_pages: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What a turn brought. ``started`` names requests whose first sequence got a slot."""

    deltas: tuple[Delta, ...]
    started: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    stats: EngineStats
