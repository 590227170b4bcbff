"""A recorded run over a fake device: many requests, preemptions, failures, resets and aborts."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import StepPlan, StepResult
from jaxinfer.core.version import VERSION
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.interfaces import Weights
from jaxinfer.engine.record.file import Header
from jaxinfer.engine.record.recorder import Recorder
from jaxinfer.engine.requests.facts import ModelFacts
from kit.drive import make_limits
from kit.fake_executor import VOCAB, FakeDevice


class Device(FakeDevice):
    """``fails`` lets the next launch or collection fail."""

    fails = ""

    def launch(self, plan: StepPlan) -> StepResult:
        self._fail("launch")
        return super().launch(plan)

    def collect(self, step: StepResult) -> StepResult:
        self._fail("collect")
        return super().collect(step)

    def _fail(self, what: str) -> None:
        if self.fails == what:
            self.fails = ""
            raise RuntimeError(f"no {what}")


class NoWeights:
    """Weights of an engine whose device needs none."""

    def replace(self, params: object) -> None:
        pass

    def sleep(self, level: int) -> None:
        pass

    def wake_up(self) -> bool:
        return True


class Run:
    """An engine over a fake device, whose requests share the beginnings of their prompts."""

    def __init__(self, limits: Limits | None = None, recorder: Recorder | None = None) -> None:
        self.limits = limits or make_limits(num_pages=17)  # sequences are preempted
        self.device = Device(self.limits)
        facts = ModelFacts("fake", VOCAB, (), SamplingParams())
        self.engine = Engine(
            self.device,
            self.limits,
            facts,
            None,
            weights=cast("Weights", NoWeights()),
            observers=() if recorder is None else (recorder,),
        )
        self._num_requests = 0

    def steps(self, num_steps: int, num_requests: int = 3) -> None:
        """Begin requests, and run some steps."""
        for _ in range(num_requests):
            number = self._num_requests
            self._num_requests += 1
            prompt = [*range(1, 10), number % 5, 3]
            sampling = SamplingParams(
                max_tokens=20, ignore_eos=True, n=1 + number % 2, stop_token_ids=[number % VOCAB]
            )
            self.engine.add_request(str(number), RequestSpec(prompt, sampling))
        for _ in range(num_steps):
            self.engine.step()

    def all_events(self) -> None:
        """Every kind of event, then the end of all requests."""
        engine = self.engine
        self.steps(9)
        engine.drain()
        engine.replace_weights({})
        self.steps(5)
        self.device.fails = "launch"
        self.steps(4)
        self.device.fails = "collect"
        engine.abort(str(self._num_requests - 1))
        self.steps(6)
        engine.drain()
        engine.sleep()
        engine.wake_up()
        self.steps(3, 0)
        engine.drain()
        engine.reset_prefix_cache()
        while engine.has_work:
            engine.step()


def header_of(limits: Limits, *, is_redacted: bool = False) -> Header:
    """A header without a model."""
    return Header(
        "", 0, VERSION, EngineConfig(), limits, "fake", {}, "", {}, True, is_redacted=is_redacted
    )


def recorder_of(path: Path, limits: Limits, num_bytes: int = 1 << 20, **header: bool) -> Recorder:
    """A recorder of an engine without a model."""
    return Recorder(path, num_bytes, header_of(limits, **header))
