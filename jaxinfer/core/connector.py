"""``Connector``: the interface of a place outside the device in which layer state is kept.

Both tiers of the engine implement it (``exec.tiers``), and so can a store of the user's: see
``examples/own_connector.py``. Its unit is (group, key, content), see ``core.tiers``: a model has
pages of several groups and states of sequences, whose arrays differ, so a connector must not take
one for another, nor expect that a prefix has a unit of every group. The content are the bytes of
the unit's arrays, one after the other; ``UnitForm.views`` has the arrays in it.

All methods are called on the engine's thread, between two steps. They return at once: long work
belongs to threads of the connector, and ``poll`` reports it. After an exception of a user's
connector it is not used any more (``exec.tiers.guarded``).

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
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

type Content = np.ndarray[Any, np.dtype[np.uint8]]  # uint8[UnitForm.num_bytes]: of a unit


@dataclass(frozen=True)
class UnitForm:
    """The arrays of the units of a group: the shape and the dtype of each."""

    arrays: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of a unit."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.arrays)

    def new(self) -> Content:
        """Memory for one unit, undefined."""
        return np.empty(self.num_bytes, np.uint8)

    def views(self, content: Content) -> list[np.ndarray[Any, Any]]:
        """The arrays of a unit, in its content."""
        arrays: list[np.ndarray[Any, Any]] = []
        at = 0
        for shape, dtype in self.arrays:
            end = at + prod(shape) * dtype.itemsize
            arrays.append(content[at:end].view(dtype).reshape(shape))
            at = end
        return arrays


type Forms = Mapping[int, UnitForm]  # by group


class Unit(NamedTuple):
    """A unit in host memory."""

    group: int
    key: bytes
    content: Content


@dataclass
class Polled:
    """The changes since the last ``poll``."""

    # units of each finished load by ticket, in the order of its keys; None where one has failed.
    # Their content is valid until ``finished``
    loaded: dict[int, list[Unit | None]] = field(default_factory=dict[int, "list[Unit | None]"])
    saved: list[Unit] = field(default_factory=list[Unit])  # whose content may change from now on
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

    def reserve(self, group: int, key: bytes) -> Content | None:
        """Memory for a unit that will be saved; None if it is there already, or has no space."""
        ...

    def save(self, unit: Unit) -> bool:
        """Keep a unit. The caller does not change its content until ``poll`` reports it.

        The content is that of ``reserve``, or for a connector behind another one memory of that.
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
