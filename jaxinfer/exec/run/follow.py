"""Steps on several hosts: host 0 sends the calls of each launch, and the others make the same ones.

Every host has the same executables and its devices' parts of the arrays, and makes all calls in the
same order. Host 0 alone schedules and reads results, so nothing is sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from jaxinfer.exec.calls.call import Call, Launch
from jaxinfer.exec.compile.build import Compiled
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.batch_staging import BatchStaging
from jaxinfer.exec.run.device_arrays import DeviceArrays
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Params
from jaxinfer.nn.state import State

type Send = Callable[[bytes], None]  # to every other host; raises ``EngineError`` if one has ended


class WireArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of numpy."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, array: Any) -> WireArray:
        """The record of an array of numpy, or of a number."""
        made = np.asarray(array)
        return cls(made.dtype.str, made.shape, np.ascontiguousarray(made).tobytes())

    def array(self) -> np.ndarray:
        """The array, which cannot be written."""
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


class WireCall(msgspec.Struct, frozen=True, array_like=True):
    """A ``Launch``."""

    name: str  # of the call's record
    size: int
    arguments: tuple[WireArray, ...]

    @classmethod
    def of(cls, launch: Launch) -> WireCall:
        """The record of a launch whose arguments are the host's."""
        return cls(launch.call.name, launch.size, tuple(map(WireArray.of, launch.arguments)))


class WireStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step with the calls before and after it."""

    before: tuple[WireCall, ...]
    bucket: int  # index among the buckets
    batch: WireArray
    after: tuple[WireCall, ...]


class WireDraw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call that is launched later than its step, or without one."""

    call: WireCall


type Message = WireStep | WireDraw


class Sender:
    """Sends what the executor of host 0 launches, before it does."""

    def __init__(self, program: Program, send: Send) -> None:
        self._send = send
        self._numbers = {bucket: i for i, bucket in enumerate(program.limits.buckets)}

    def step(
        self, before: Sequence[Launch], bucket: Any, batch: np.ndarray, after: Sequence[Launch]
    ) -> None:
        """Send a step."""
        calls = (tuple(map(WireCall.of, each)) for each in (before, after))
        first, last = calls
        self._put(WireStep(first, self._numbers[bucket], WireArray.of(batch), last))

    def draw(self, launch: Launch) -> None:
        """Send a call that is not one of a step."""
        self._put(WireDraw(WireCall.of(launch)))

    def _put(self, message: Message) -> None:
        self._send(msgspec.msgpack.encode(message))


class Follower:
    """The device side of an engine on a host other than 0."""

    def __init__(
        self,
        program: Program,
        executables: Mapping[str, Compiled],
        params: Params,
        state: State,
        slots: SlotState,
    ) -> None:
        self._program = program
        self._arrays = DeviceArrays(program, executables, params, state, slots)
        self._staging = BatchStaging.of_placement(program.placement)
        self._calls = {call.name: call for call in program.calls}
        self._decoder = msgspec.msgpack.Decoder(Message)

    def run(self, message: bytes | bytearray) -> None:
        """Make the calls of a message."""
        match self._decoder.decode(message):
            case WireStep(before, bucket, batch, after):
                for call in before:
                    self._arrays.call(self._launch(call))
                staged = self._staged(batch.array())
                output = self._arrays.step(self._program.limits.buckets[bucket], staged)
                self._keep(output.token_ids, staged)
                for call in after:
                    self._arrays.call(self._launch(call), output)
            case WireDraw(call):
                launch = self._launch(call)
                if launch.call.when == "draw":
                    wire, *others = launch.arguments
                    staged = self._staged(wire)
                    output = self._arrays.call(launch._replace(arguments=(staged, *others)))
                    self._keep(output.token_ids, staged)
                else:
                    self._arrays.call(launch)

    def _launch(self, call: WireCall) -> Launch:
        record: Call = self._calls[call.name]
        return Launch(record, tuple(each.array() for each in call.arguments), call.size)

    def _staged(self, wire: np.ndarray) -> Any:  # int32[...]
        return wire if self._staging is None else self._staging.copy_in(wire)

    def _keep(self, result: jax.Array, staged: Any) -> None:
        if self._staging is not None:
            self._staging.read_by(result, staged)
