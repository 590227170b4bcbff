"""``Connector``: the interface of a place outside the device in which layer state is kept.

Both tiers of the engine implement it (``exec.tiers``), and so can a store of the user's: see
``examples/own_connector.py``. Its unit is (group, key, arrays), see ``core.tiers``: a model has
pages of several groups and states of sequences, whose arrays differ, so a connector must not take
one for another, nor expect that a prefix has a unit of every group.

All methods are called on the engine's thread, between two steps. They return at once: long work
belongs to threads of the connector, and ``poll`` reports it.

vLLM's KV connector (v1) has the same parts under other names:

| here | ``KVConnectorBase_V1`` | ``OffloadingManager`` |
|---|---|---|
| ``match`` | ``get_num_new_matched_tokens`` | ``lookup`` |
| ``reserve`` | ``update_state_after_alloc``, ``build_connector_meta`` | ``prepare_store`` |
| ``save`` | ``save_kv_layer``, ``wait_for_save`` | ``complete_store`` |
| ``load`` | ``start_load_kv``, ``wait_for_layer_load`` | ``prepare_load`` |
| ``poll`` | ``get_finished``, ``get_block_ids_with_load_errors`` | ``take_events`` |
| ``finished`` | ``request_finished`` | ``complete_load``, ``touch`` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

type Arrays = tuple[np.ndarray[Any, Any], ...]  # of a unit, in the order of ``UnitForm.arrays``


class UnitForm(NamedTuple):
    """The arrays of the units of a group: the shape and the dtype of each."""

    arrays: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a unit."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.arrays)

    def new(self) -> Arrays:
        """Arrays for one unit, with undefined content."""
        return tuple(np.empty(shape, dtype) for shape, dtype in self.arrays)

    def views(self, memory: np.ndarray[Any, Any]) -> Arrays:  # uint8[num_bytes or more]
        """The arrays of a unit in a piece of memory, one after the other."""
        arrays: list[np.ndarray[Any, Any]] = []
        at = 0
        for shape, dtype in self.arrays:
            end = at + int(np.prod(shape)) * dtype.itemsize
            arrays.append(memory[at:end].view(dtype).reshape(shape))
            at = end
        return tuple(arrays)


type Forms = Mapping[int, UnitForm]  # by group


class Unit(NamedTuple):
    """A unit in host memory."""

    group: int
    key: bytes
    arrays: Arrays


@dataclass
class Polled:
    """The changes since the last ``poll``."""

    # units of each finished load by ticket, in the order of its keys; None where one has failed.
    # Their arrays are valid until ``finished``
    loaded: dict[int, list[Unit | None]] = field(default_factory=dict[int, "list[Unit | None]"])
    saved: list[Unit] = field(default_factory=list[Unit])  # whose arrays may change from now on
    added: list[bytes] = field(default_factory=list[bytes])  # keys that can be loaded from now on
    removed: list[bytes] = field(default_factory=list[bytes])  # and those that cannot any more

    def __bool__(self) -> bool:
        """True if anything has changed."""
        return bool(self.loaded or self.saved or self.added or self.removed)


class Connector(Protocol):
    """A place for units."""

    @property
    def is_shared(self) -> bool:
        """True if others save units there, too: then the engine calls ``match`` for each prompt.

        The keys of other connectors are known from ``Polled.added`` and ``Polled.removed``.
        """
        ...

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys whose units can be loaded."""
        ...

    def reserve(self, group: int, key: bytes) -> Arrays | None:
        """Memory for a unit that will be saved; None if it is there already, or has no space."""
        ...

    def save(self, unit: Unit) -> bool:
        """Keep a unit. The caller does not change its arrays until ``poll`` reports it.

        The arrays are those of ``reserve``, or for a connector behind another one memory of that.
        False if it is not kept, and not reported.
        """
        ...

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        """Begin to bring units to host memory, and keep them there until ``finished``."""
        ...

    def poll(self, seconds: float = 0.0) -> Polled:
        """The changes since the last call; waits so long for the first one if there are none."""
        ...

    def finished(self, ticket: int) -> None:
        """The units of a load are not read any more, also if it has not ended yet."""
        ...

    def clear(self, version: bytes) -> None:
        """Drop all units. Units that are saved from now on are of weights of this version: b"" are
        those that the engine began with, another one was never used before.
        """
        ...

    def close(self) -> None:
        """End threads; no other method is called afterwards."""
        ...
