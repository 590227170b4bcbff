"""Profiles of a window of steps: JAX's trace, and which step and requests each launch belongs to.

While a profile is taken, the loop launches and collects through a ``Profile``, which marks each
launch in the trace with the step's number. Without one the loop calls the executor itself.

A profile is a folder: ``plugins/profile/TIME/HOST.xplane.pb`` and ``.trace.json.gz``, as JAX writes
them for XProf, TensorBoard and Perfetto, and ``steps.json`` with what only the engine knows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.core.errors import ArgumentError, EngineError
from jaxinfer.core.profile import Instruction, OpCosts, ProfiledStep, Steps
from jaxinfer.core.step import Bucket, StepPlan, StepResult
from jaxinfer.engine.loop.interfaces import Weights
from jaxinfer.engine.loop.loop import EngineLoop, StepExecutor

STEPS = "steps.json"
MARK = "engine_step"  # the name of a launch in the trace; its ``step_num`` is the step's number
NUM_STEPS = 64  # of a profile, unless another number is given

# An instruction of HLO text: its name; then the target of a custom call, and JAX's name for it.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ", re.MULTILINE)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_MODULE = re.compile(r"HloModule ([^\s,]+)")


class Profiler:
    """Takes profiles of an engine's loop, one at a time, on the loop's thread."""

    def __init__(
        self, loop: EngineLoop[Any], request_of: Callable[[str], str], weights: Weights | None
    ) -> None:
        """``request_of``: the request's name for the scheduler's id of a sequence."""
        self._loop, self._request_of, self._weights = loop, request_of, weights
        self._profile: Profile | None = None
        self._count = 0  # of profiles

    def start(self, folder: Path, num_steps: int = NUM_STEPS) -> Path:
        """Trace the next ``num_steps`` steps; returns the profile's own new folder in ``folder``.

        Raises ``EngineError`` if a profile is being taken, and ``ArgumentError`` if the folder
        cannot be written.
        """
        if self._profile is not None:
            raise EngineError("a profile is being taken; stop it before the next one")
        self._count += 1
        own = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._count}"
        try:
            own.mkdir(parents=True)
        except OSError as error:
            raise ArgumentError(
                f"the profile's folder {folder} cannot be written ({error.strerror}); name another"
            ) from error
        self._profile = Profile(own, num_steps, self._loop.executor, self._request_of)
        self._loop.runner = self._profile
        return own

    def stop(self) -> Path:
        """End the trace and write the profile; returns its folder.

        Steps that are in flight are left out. Raises ``EngineError`` without a profile, or if it
        cannot be written.
        """
        if (profile := self._profile) is None:
            raise EngineError("no profile is being taken; start one first")
        self._profile, self._loop.runner = None, self._loop.executor
        profile.end_trace()
        if profile.failure is not None:
            raise EngineError(
                f"the profile cannot be written to {profile.folder} ({profile.failure}); make room "
                "there, or name another folder"
            ) from profile.failure
        costs = None
        if self._weights is not None:
            from jaxinfer.models.costs import op_costs_of  # imports JAX

            costs = op_costs_of(self._weights.model)
        profile.write(costs)
        return profile.folder


class Profile:
    """One profile. It launches and collects in place of the executor, and traces some steps."""

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        executor: StepExecutor[Any],
        request_of: Callable[[str], str],
    ) -> None:
        import jax

        self.folder = folder
        self._executor, self._left, self._request_of = executor, num_steps, request_of
        self._launched: dict[int, tuple[StepPlan, list[str], int]] = {}  # and not collected
        self._handles: list[tuple[Any, int]] = []
        self._steps: list[ProfiledStep] = []
        self._buckets: dict[str, Bucket] = {}
        self._last_end = 0
        self.failure: Exception | None = None  # of the end of the trace; steps go on
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the host down, and fill the file
        self._annotation = jax.profiler.StepTraceAnnotation
        try:
            start_trace: Callable[..., None] = getattr(jax.profiler, "start_trace")  # noqa: B009
            start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise EngineError(
                f"JAX's profiler cannot be started ({error}); end the other profile"
            ) from error
        self._stop: Callable[[], None] | None = jax.profiler.stop_trace

    def launch(self, plan: StepPlan) -> Any:
        """See ``StepExecutor``."""
        if self._stop is None or not self._left:
            return self._executor.launch(plan)
        self._left -= 1
        names = list(dict.fromkeys(self._request_of(row.request_id) for row in plan.rows))
        began = time.perf_counter_ns()
        with self._marked(plan.step_id):
            handle = self._executor.launch(plan)
        self._launched[plan.step_id] = plan, names, began
        self._handles.append((handle, plan.step_id))
        return handle

    def collect(self, step: Any) -> StepResult:
        """See ``StepExecutor``. It may launch draws of the next step, which are marked as such."""
        ours = self._handles and self._handles[0][0] is step
        if not ours:
            return self._executor.collect(step)
        _, number = self._handles.pop(0)
        plan, names, began = self._launched.pop(number)
        if self._handles and self._stop is not None:
            with self._marked(self._handles[0][1]):
                result = self._executor.collect(step)
        else:
            result = self._executor.collect(step)
        now = time.perf_counter_ns()
        if self._stop is not None:
            self._steps.append(_described(plan, names, now - max(began, self._last_end)))
            self._buckets[plan.bucket.name] = plan.bucket
        self._last_end = now
        if not self._left and not self._launched:
            self.end_trace()
        return result

    def write(self, costs: OpCosts | None) -> None:
        """Write what only the engine knows; the trace has ended."""
        executor = self._executor
        found = Steps(
            device=executor.devices[0].device_kind,
            num_devices=len(executor.devices),
            steps=self._steps,
            costs=costs,
            instructions={
                name: instructions_of(executor.hlo_texts(bucket))
                for name, bucket in self._buckets.items()
            },
        )
        (self.folder / STEPS).write_bytes(msgspec.json.encode(found))

    def _marked(self, number: int) -> AbstractContextManager[Any]:
        return self._annotation(MARK, step_num=number)

    def end_trace(self) -> None:
        """End the trace, unless it ended with the window."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            try:
                stop()
            except Exception as error:
                self.failure = error


def _described(plan: StepPlan, requests: list[str], wall_ns: int) -> ProfiledStep:
    pairs = 0
    for row in plan.prefills:
        count = row.num_scheduled_tokens
        pairs += count * row.num_computed_tokens + count * (count + 1) // 2
    return ProfiledStep(
        step=plan.step_id,
        bucket=plan.bucket.name,
        requests=requests,
        wall_ns=wall_ns,
        tokens=sum(row.num_scheduled_tokens for row in plan.rows),
        draws=sum(row.samples for row in plan.rows),
        context=sum(row.num_computed_tokens + row.num_scheduled_tokens for row in plan.decodes),
        pairs=pairs,
    )


def instructions_of(texts: Iterator[str]) -> Mapping[str, Mapping[str, Instruction]]:
    """The instructions of executables that have a name of JAX's, by HLO module and own name."""
    found: dict[str, dict[str, Instruction]] = {}
    for text in texts:
        module = _MODULE.match(text)
        own = found.setdefault("" if module is None else module[1], {})
        for line in text.splitlines():
            scope, target = _SCOPE.search(line), _TARGET.search(line)
            if (scope or target) and (name := _INSTRUCTION.match(line)):
                parts = scope[1] if scope else "", target[1] if target else ""
                own[name[1]] = Instruction(*parts)
    return found
