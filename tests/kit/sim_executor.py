"""A simulated device: scripted tokens, steps of a given length, no computation.

Owns: ``SimExecutor``, ``sim_engine``, and a program for ``EngineProcess`` that runs one
(``SIM_PROGRAM``). An engine over it does only the host's work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket, RowResult, ScheduledSeq, StepPlan, StepResult
from jaxinfer.engine.link.child import main
from jaxinfer.engine.link.wire import Planned
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from kit.tokenizers import real_spec

FOLDER = Path(__file__).parent.parent
SIM_PROGRAM = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = [{str(FOLDER)!r}]; from kit import sim_executor; "
    "sim_executor.child_main()",
)
FIRST_TOKEN, NUM_TOKENS = 300, 20_000  # tokens of text, none of them special


@dataclass(frozen=True, slots=True)
class SimStep:
    """Times at which a step was launched, done, and collected; the CPU seconds until then."""

    num_rows: int
    launched: float
    done: float
    collected: float
    engine_cpu: float  # of the engine's thread
    process_cpu: float


@dataclass
class SimExecutor:
    """A ``StepExecutor``. Steps run one after the other, each for ``step_seconds``.

    The first one takes ``first_seconds``, in which requests gather. Step ``fail_at`` raises; with
    step ``lose_at`` the device is lost.
    """

    step_seconds: float
    first_seconds: float = 0.0
    fail_at: int = -1
    lose_at: int = -1
    trace: list[SimStep] = field(default_factory=list[SimStep])
    _free_at: float = 0.0

    def launch(self, plan: StepPlan) -> tuple[StepPlan, float, float]:
        """Queue a step after the others."""
        launched = time.monotonic()
        seconds = self.step_seconds if self._free_at else max(self.step_seconds, self.first_seconds)
        self._free_at = max(launched, self._free_at) + seconds
        return plan, launched, self._free_at

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing: nothing is kept."""

    def free_state(self) -> None:
        """Nothing: there is no state."""

    def make_state(self) -> None:
        """Nothing: there is no state."""

    def collect(self, step: tuple[StepPlan, float, float]) -> StepResult:
        """Sleep, without the GIL, until the step is done."""
        plan, launched, done = step
        if plan.step_id == self.lose_at:
            raise EngineError("the device is lost")
        if plan.step_id == self.fail_at:
            raise ValueError("injected")
        time.sleep(max(done - time.monotonic(), 0.0))
        cpu = time.thread_time(), time.process_time()
        self.trace.append(SimStep(len(plan.rows), launched, done, time.monotonic(), *cpu))
        return StepResult(plan.step_id, tuple(_result(plan, row) for row in plan.rows))


def _result(plan: StepPlan, row: ScheduledSeq) -> RowResult:
    token_id = FIRST_TOKEN + (plan.step_id + row.slot) % NUM_TOKENS
    return RowResult(row.request_id, row.epoch, (token_id,) if row.samples else ())


def sim_limits(num_seqs: int) -> Limits:
    """Limits with enough pages for every sequence to fill the context."""
    return Limits(
        num_pages=(1 + num_seqs * 128,),
        page_size=16,
        max_num_seqs=num_seqs,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        buckets=(
            Bucket(num_seqs),
            Bucket(0, 2048, min(num_seqs, 256)),
            Bucket(num_seqs, 2048, min(num_seqs, 256), scores=True),
        ),
    )


def sim_facts(tokenizer: Tokenizer) -> ModelFacts:
    """A model without end tokens."""
    return ModelFacts("sim", tokenizer.vocab_size, (), SamplingParams())


def sim_config(num_seqs: int, executor: SimExecutor, trace_file: str = "") -> EngineConfig:
    """Settings from which a child makes the same executor; the trace is saved in ``trace_file``."""
    script = {
        "step_seconds": executor.step_seconds,
        "first_seconds": executor.first_seconds,
        "fail_at": executor.fail_at,
        "lose_at": executor.lose_at,
        "trace_file": trace_file,
    }
    return EngineConfig(model=json.dumps(script), max_num_seqs=num_seqs)


def child_main() -> None:
    """The program of a process that runs a simulated engine."""
    files: list[tuple[str, SimExecutor]] = []

    def plan(config: EngineConfig, progress: Progress):
        del progress
        script = json.loads(config.model)
        file = script.pop("trace_file")
        executor = SimExecutor(**script)
        files.append((file, executor))
        spec = real_spec("smollm2")
        tokenizer = load_tokenizer(spec)
        limits = sim_limits(config.max_num_seqs or 1)
        facts = sim_facts(tokenizer)

        def build():
            from jaxinfer.engine.loop.engine import Engine

            return Engine(executor, limits, facts, tokenizer)

        return Planned(limits, spec), build

    try:
        main(lambda _: plan)
    finally:
        for file, executor in files:
            if file:
                write_trace(Path(file), executor.trace)


def write_trace(file: Path, trace: Sequence[SimStep]) -> None:
    """Write a trace as JSON."""
    file.write_text(json.dumps([asdict(step) for step in trace]))


def read_trace(file: Path) -> list[SimStep]:
    """Read a file of ``write_trace``."""
    return [SimStep(**step) for step in json.loads(file.read_text())]
