"""The costs of steps and copies: fitted to measured times."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.core.step import Bucket
from jaxinfer.engine.start import tiers
from jaxinfer.engine.start.tiers import fitted_costs

UNIT_BYTES = 16 * 147_456  # a page of Qwen3-4B in bfloat16


@dataclass
class Machine:
    """An executor and a mover whose work takes time on a clock of its own, the first time more."""

    step: float = 0.002
    token: float = 15e-6
    load: float = 0.003
    rate: float = 28e9
    num_tokens: tuple[int, ...] = (64, 8192, 1024)
    most_measured: int = 216
    now: float = 0.0
    runs: list[int] = field(default_factory=list[int])

    @property
    def buckets(self) -> list[Bucket]:
        prompts = [Bucket(0, count, 1) for count in self.num_tokens]
        # none of these is a prompt's step alone
        return [Bucket(8), Bucket(8, 16384, 1), Bucket(0, 16, 1, scores=True), *prompts]

    forms: Any = field(default_factory=lambda: {0: SimpleNamespace(num_bytes=UNIT_BYTES)})

    def run_once(self, buckets: list[Bucket], *, filled: bool) -> None:
        assert filled, "on a CPU a step of padding takes no time"
        (bucket,) = buckets
        self._spend(self.step + bucket.num_tokens * self.token, bucket.num_tokens)

    def copy_to_sink(self, count: int) -> None:
        self._spend(self.load + count * UNIT_BYTES / self.rate, -count)

    def _spend(self, seconds: float, what: int) -> None:
        self.now += seconds + (0 if what in self.runs else 1.0)  # the first one loads kernels
        self.runs.append(what)


def fitted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tiers, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    own: Any = machine
    return fitted_costs(own, own)


def test_costs_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = fitted(machine := Machine(), monkeypatch)
    assert {*machine.runs} == {64, 8192, -1, -216}, "the shortest and the longest of each"
    assert cost.step_seconds == pytest.approx(0.002)
    assert cost.token_seconds == pytest.approx(15e-6)
    assert cost.load_seconds == pytest.approx(0.003)
    assert cost.bytes_per_second == pytest.approx(28e9)


def test_one_step_alone_says_what_a_token_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = fitted(Machine(num_tokens=(100,)), monkeypatch)
    assert cost.step_seconds == 0.0 and cost.token_seconds == pytest.approx(35e-6)


def test_a_long_step_that_takes_no_longer_than_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The times of neither tokens nor bytes become 0: a tenth of the long one counts."""
    machine = Machine(token=0.0, rate=1e30)
    cost = fitted(machine, monkeypatch)
    assert cost.token_seconds == pytest.approx(0.1 * machine.step / (8192 - 64))
    assert cost.bytes_per_second == pytest.approx(UNIT_BYTES * 215 / (0.1 * machine.load))
