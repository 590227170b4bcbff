"""``DeviceArrays``: the arrays of an engine on its device, and the calls that replace them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxinfer.core.step import TAPS, Bucket
from jaxinfer.exec.calls.call import Call, Launch
from jaxinfer.exec.calls.steer import STEER
from jaxinfer.exec.compile.build import Compiled
from jaxinfer.exec.compile.program import FIRST, Program
from jaxinfer.exec.run.device_memory import compile_init_state, init_own_arrays
from jaxinfer.exec.step.forward import StepOutput, flat_params
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Params, head_params
from jaxinfer.nn.state import State


class DeviceArrays:
    """Weights, layer state, slots, and what calls own; and the executables that read them."""

    def __init__(
        self,
        program: Program,
        executables: Mapping[str, Compiled],
        params: Params,
        state: State,
        slots: SlotState,
    ) -> None:
        self._program = program
        # XLA runs what is queued for a CPU's devices in as many threads as there are cores. Queued
        # steps of one device could take all of them, and wait for another device for ever.
        self._waits = program.placement.num_hosts > 1 and program.platform == "cpu"
        self.executables: dict[str, Compiled] = {}
        self.add(executables)
        self.state = state
        self.slots = slots
        self.own = init_own_arrays(program)  # by the name of the call
        buckets = program.limits.buckets
        self._names = {bucket: bucket.name for bucket in buckets}
        self._split = {bucket for bucket in buckets if program.is_split(bucket)}
        drafter = () if program.drafter is None else program.drafter.weights()
        self._drafter = tuple(program.placement.put(np.asarray(leaf)) for leaf in drafter)
        self.replace_weights(params)

    def add(self, executables: Mapping[str, Compiled]) -> None:
        """Have executables by their names."""
        if self._waits:
            executables = {name: _waiting(call) for name, call in executables.items()}
        self.executables |= executables

    def replace_weights(self, params: Params | None) -> None:
        """Let later calls read these weights."""
        flat = () if params is None else flat_params(self._program.model, params)
        parts = self._program.parts if flat else ()
        drafter = self._drafter if flat else ()
        self._weights_of_parts = [tuple(flat[i] for i in own.weights) for own in parts]
        if parts:
            self._weights_of_parts[-1] += drafter
        self.weights, self.head = flat + drafter, head_params(params or {})
        self.params = params

    def free(self) -> None:
        """Delete all but weights; ``make`` makes them again."""
        for array in jax.tree.leaves((self.state, self.slots, self.own)):
            array.delete()

    def make(self) -> None:
        """Make zeroed arrays; raises ``EngineError`` if the device has no memory for them."""
        self.state, self.slots = self._new_state()
        self.own = init_own_arrays(self._program)

    @cached_property  # compiled when the engine wakes for the first time
    def _new_state(self) -> Callable[[], tuple[State, SlotState]]:
        return compile_init_state(self._program)

    @property
    def is_intact(self) -> bool:
        """True if no array has been deleted, so that no failed call has consumed it."""
        arrays = jax.tree.leaves((self.state, self.slots, self.own))
        return not any(array.is_deleted() for array in arrays)

    def step(self, bucket: Bucket, staged: Any) -> StepOutput:
        """Launch a step. If it is split, the device runs a part while the next one is launched."""
        step = self.executables[self._names[bucket]]
        if TAPS in bucket.variants:
            arguments = (self.weights, self.state, self.slots, staged, self.own[STEER.name])
            self.state, self.slots, output = step(*arguments)
            return output  # type: ignore[no-any-return]
        if bucket not in self._split:
            self.state, self.slots, output = step(self.weights, self.state, self.slots, staged)
            return output  # type: ignore[no-any-return]
        first = self.executables[bucket.name + FIRST]
        (of_first, of_second), (one, two) = self._weights_of_parts, self._program.parts
        arrays, stream = first(of_first, self._some(one.arrays), self.slots, staged)
        self.replace(one.arrays, arrays)
        arguments = (of_second, self._some(two.arrays), self.slots, staged, stream)
        arrays, self.slots, output = step(*arguments)
        self.replace(two.arrays, arrays)
        return output  # type: ignore[no-any-return]

    def call(self, launch: Launch, output: StepOutput | None = None) -> Any:
        """Launch a call; ``output`` is that of its step. Returns its result, if it has one."""
        call = launch.call
        given = [self._read(call, name, output) for name in call.reads]
        executable = self.executables[call.executable(launch.size)]
        made = executable(*given, *launch.arguments)
        if call.donates is None:
            return made
        new, result = made if call.has_result else (made, None)
        if call.donates == "slots":
            self.slots = new
        elif call.donates == "state":
            self.replace(call.state_arrays(self._program.model.state), new)
        else:
            self.own[call.donates] = new
        return result

    def _read(self, call: Call, name: str, output: StepOutput | None) -> Any:
        """An array that a call reads: see ``Call``."""
        match name:
            case "head":
                return self.head
            case "slots":
                return self.slots
            case "state":
                return self._some(call.state_arrays(self._program.model.state))
            case "hidden":
                assert output is not None, "the call is after a step"
                return output.hidden
        return self.own[name]

    def _some(self, indices: Sequence[int]) -> State:
        return tuple(self.state[i] for i in indices)

    def replace(self, indices: Sequence[int], arrays: State) -> None:
        """Replace some arrays of the layers' state, which a call has consumed."""
        state = list(self.state)
        for i, array in zip(indices, arrays, strict=True):
            state[i] = array
        self.state = tuple(state)


def _waiting(call: Compiled) -> Compiled:
    """The call, which returns when its results are ready."""

    def ended(*arguments: Any) -> Any:
        return jax.block_until_ready(call(*arguments))

    return ended
