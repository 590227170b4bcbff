"""``Call``: an executable beside the step, as a record.

Program, executor, warm-up and memory plan loop over the records, so a new executable is one file
and a line of ``calls.table``, or none: a family may have calls of its own (``ModelFamily.calls``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxinfer.core.request import Request
from jaxinfer.core.step import Bucket, ScheduledSeq, StepPlan
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.models.base import head_params
from jaxinfer.nn.state import StateLayout

# before the step; after it; or after it, for rows with extras, once the masks of these are known
type When = Literal["before", "after", "draw"]


class Work(NamedTuple):
    """A step as the source of the arguments of its calls."""

    plan: StepPlan
    requests: tuple[Request, ...] = ()  # of each row
    drawn: tuple[int, ...] = ()  # indices of the rows that are drawn again
    # uint32[N, W] of rows, padded to a number of rows: see ``Constraints.masks``
    masks: Callable[[Sequence[ScheduledSeq], int], np.ndarray] | None = None


class Launch(NamedTuple):
    """One call of a step: its record, and the host's arguments."""

    call: Call
    arguments: tuple[Any, ...]
    size: int = 0  # of its executable
    rows: tuple[int, ...] = ()  # of a draw: indices of the step's rows, the first ones of the call


def one_size(shape: EngineShape) -> tuple[int, ...]:
    """The sizes of a call with one executable."""
    del shape
    return (0,)


def all_arrays(layout: StateLayout) -> tuple[int, ...]:
    """Every array of the layers' state."""
    return tuple(range(len(layout.arrays)))


@dataclass(frozen=True)
class Call:
    """An executable beside the step, in one or several sizes.

    ``function`` makes what is traced for a size. Its arguments are the device's arrays that it
    ``reads`` (on several devices one's share of them), and then the host's. It returns the array
    that it ``donates``, if it does, and its result after it, if it ``has_result``; a function that
    donates nothing returns its result alone.

    Names of the device's arrays: "head", "state", "slots", "hidden" (``StepOutput.hidden``), and
    those that a call ``owns``, by the call's name.
    """

    name: str  # of its executables, each followed by its size unless that is 0
    when: When
    function: Callable[[EngineShape, int], Callable[..., Any]]
    # the host's arguments of a call that does nothing, whose shapes are those of every call
    padding: Callable[[EngineShape, int], tuple[Any, ...]]
    pack: Callable[[EngineShape, Work], Iterable[tuple[Any, ...]]]  # ``Launch`` without the record
    reads: tuple[str, ...] = ()
    donates: str | None = None  # one of ``reads``
    has_result: bool = False  # for the host; it is not copied there for a draw
    sizes: Callable[[EngineShape], tuple[int, ...]] = one_size  # () if the engine never calls it
    # the size of the executable that only steps of a bucket call, 0 for none; else all do
    size_of_bucket: Callable[[Bucket], int] | None = None
    owns: Callable[[EngineShape], Any] | None = None  # abstract arrays, which begin with zeros
    state_arrays: Callable[[StateLayout], tuple[int, ...]] = all_arrays  # those of "state"
    is_for_decodes: bool = False  # whether steps without prompts are packed for too
    workspace: Callable[[EngineShape, int], int] | None = None  # a bound on bytes; None: negligible

    def executable(self, size: int) -> str:
        """The name of the executable of a size."""
        return f"{self.name}{size or ''}"

    def launches(self, shape: EngineShape, work: Work) -> list[Launch]:
        """The calls of a step."""
        return [Launch(self, *packed) for packed in self.pack(shape, work)]

    def empty(self, shape: EngineShape, size: int) -> Launch:
        """A call that does nothing."""
        return Launch(self, self.padding(shape, size), size)

    def trace(self, shape: EngineShape, size: int) -> jax.stages.Traced:
        """Trace the executable of a size."""
        given = [self._abstract(shape, size, name) for name in self.reads]
        donated = () if self.donates is None else (self.reads.index(self.donates),)
        arguments = (*given, *self.padding(shape, size))
        has_result = self.has_result or self.donates is None
        function = self.function(shape, size)
        return shape.placement.trace(function, arguments, donated, has_result=has_result)

    def _abstract(self, shape: EngineShape, size: int, name: str) -> Any:
        config = shape.model.config
        match name:
            case "head":
                return head_params(shape.params)
            case "state":
                state = shape.state()
                return tuple(state[i] for i in self.state_arrays(shape.model.state))
            case "slots":
                return shape.slots()
            case "hidden":
                return jax.ShapeDtypeStruct((size, config.hidden_size), config.dtype)
        assert name == self.name and self.owns is not None, name
        return self.owns(shape)
