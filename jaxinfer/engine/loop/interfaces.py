"""Interfaces of an engine's weights, of observers, and of executables that are compiled later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxinfer.core.step import Event
from jaxinfer.core.tiers import TierOrders, TierPolicy, TierStats
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState

if TYPE_CHECKING:
    from jaxinfer.models.base import Model, Params

SLEEP_TAGS = ("weights", "kv_cache")  # what a sleeping engine has given up; vLLM's names


class Observer(Protocol):
    """Follows what an engine does, on the engine's thread. Its methods return at once, and raise
    nothing: ``engine.record.recorder.Recorder``.
    """

    def scheduled(
        self,
        before: SchedulerState,
        events: Sequence[Event],
        output: ScheduleOutput | None,
        after: SchedulerState,
    ) -> None:
        """The scheduler was called; ``output`` is None if it raised."""
        ...

    def weights_changed(self, reference: str) -> None:
        """Steps from now on read weights that came from here; empty: from a tree."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...


class Weights(Protocol):
    """The weights of an engine: ``engine.start.weights.EngineWeights``."""

    @property
    def model(self) -> Model:
        """The model without weights."""
        ...

    @property
    def params(self) -> Params:
        """The weights that steps read now; not a copy."""
        ...

    @property
    def reference(self) -> str:
        """The model that the engine was built from, as the user named it."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The generation_config.json of the model that the engine was built from."""
        ...

    def prepared(self, given: Params | str | Path) -> Params:
        """New weights on the device, from a tree or a model's files; raises a ``JaxinferError``
        if they do not fit. May be called on any thread.
        """
        ...

    def replace(self, params: Params) -> None:
        """Let later steps read these weights, which ``prepared`` returned."""
        ...

    def sleep(self, level: int) -> None:
        """Free the device's memory of the weights: 1 keeps them in host memory, 2 drops them."""
        ...

    def wake_up(self) -> bool:
        """Put weights that are in host memory on the device; False if they have been dropped."""
        ...


def reference_of(weights: Params | str | Path) -> str:
    """The reference of new weights, as observers get it; empty for a tree."""
    return str(weights) if isinstance(weights, str | Path) else ""


class Tiers(Protocol):
    """Layer state outside the device: ``exec.tiers.runner.TierRunner``."""

    policy: TierPolicy

    @property
    def is_loading(self) -> bool:
        """True if an ordered load has not been reported."""
        ...

    @property
    def is_shared(self) -> bool:
        """True if ``look_up`` is to be called for each prompt."""
        ...

    def obey(self, orders: TierOrders) -> None:
        """Queue copies before the next step."""
        ...

    def look_up(self, keys: Sequence[bytes]) -> tuple[Event, ...]:
        """The event of units of a prompt that others have saved."""
        ...

    def poll(self, seconds: float = 0.0) -> tuple[Event, ...]:
        """The events of copies that have ended; waits so long for the first of them."""
        ...

    def clear(self, *, weights_changed: bool) -> None:
        """Drop all units."""
        ...

    def settle(self) -> None:
        """Wait for copies under way, before the device's arrays are freed."""
        ...

    def close(self) -> None:
        """End threads."""
        ...

    def stats(self) -> TierStats:
        """Counters and present values."""
        ...
