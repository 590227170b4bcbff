"""An executor around another one: it records plans, and holds steps back or fails on request.

Owns: ``WatchedExecutor`` and ``watched_engine``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from jaxinfer.core.limits import Limits
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket, ScheduledSeq, StepPlan, StepResult
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.loop import StepExecutor
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.text.tokenizer import load_tokenizer
from kit.sim_executor import SimExecutor
from kit.tokenizers import tiny_tokenizer_spec

SECONDS = 30.0  # for which a step is held back at most


class WatchedExecutor:
    """A ``StepExecutor`` around another one.

    If ``failure`` is set, the next launched step raises it when it is collected; a step in flight
    behind a failed step ends normally.
    """

    def __init__(self, inner: StepExecutor[Any]) -> None:
        self.plans: list[StepPlan] = []
        self.failure: Exception | None = None
        self._inner = inner
        self._open = threading.Event()
        self._open.set()

    def launch(self, plan: StepPlan) -> Any:
        """Record the plan and launch it."""
        self.plans.append(plan)
        failure, self.failure = self.failure, None
        return self._inner.launch(plan), failure

    def collect(self, step: tuple[Any, Exception | None]) -> StepResult:
        """Wait for the step, and then for ``held`` to end."""
        launched, failure = step
        result = self._inner.collect(launched)
        self._open.wait(SECONDS)
        if failure is not None:
            raise failure
        return result

    def forget(self, request_ids: Sequence[str]) -> None:
        """See ``StepExecutor``."""
        self._inner.forget(request_ids)

    def free_state(self) -> None:
        """See ``StepExecutor``."""
        self._inner.free_state()

    def make_state(self) -> None:
        """See ``StepExecutor``."""
        self._inner.make_state()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step ends inside the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


class AlphabetExecutor(SimExecutor):
    """Continues any prompt of p tokens with the alphabet from letter p on, in simulated time."""

    def collect(self, step: tuple[StepPlan, float, float]) -> StepResult:
        """The result of a device that has computed the step."""
        result = super().collect(step)
        drawn = tuple(
            done if not done.token_ids else replace(done, token_ids=(_letter(row),))
            for done, row in zip(result.rows, step[0].rows, strict=True)
        )
        return replace(result, rows=drawn)


def _letter(row: ScheduledSeq) -> int:
    return ord("a") + (row.num_computed_tokens + row.num_scheduled_tokens) % 26


def watched_engine(
    num_seqs: int = 4, *, step_seconds: float = 0.001, chunk: int = 64, max_model_len: int = 2048
) -> tuple[Engine, WatchedExecutor]:
    """An engine that generates the alphabet; one step has up to ``chunk`` tokens of prompts."""
    page_size = 16
    limits = Limits(
        num_pages=(1 + num_seqs * -(-max_model_len // page_size),),
        page_size=page_size,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=chunk,
        buckets=(
            Bucket(num_seqs),
            Bucket(0, chunk, num_seqs),
            Bucket(num_seqs, chunk, num_seqs, scores=True),
        ),
    )
    executor = WatchedExecutor(AlphabetExecutor(step_seconds))
    tokenizer = load_tokenizer(tiny_tokenizer_spec())
    facts = ModelFacts("watched", tokenizer.vocab_size, (), SamplingParams())
    return Engine(executor, limits, facts, tokenizer), executor
