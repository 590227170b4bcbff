"""The state of layers between steps: its specs, its layout and its arrays.

A layer declares its state (``LayerState``): arrays with an entry for each token of context, which
are stored in pages (keys and values, or a latent), and arrays with an entry for each sequence,
which are stored in slots (a recurrent state). ``state_layout`` combines the layers of a model:

- Layers with the same window form a *group* with its own page table, since pages outside a window
  return to the pool.
- All groups take their pages from one pool and share its arrays: array j holds layer j of each
  group, so any group can use any page (as in vLLM's hybrid KV cache). Groups with the same kind of
  entry are split to the size of the smallest, since a page of a small group would leave most arrays
  unused: the 22 window layers of Gemma-3-1B become six groups, and its 4 full layers one.

The scheduler assigns the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxinfer.nn.placement import Axes, Placement

type State = tuple[jax.Array, ...]  # in the order of ``StateLayout.arrays``; donated to each step
type LayerArrays = dict[str, jax.Array]  # the arrays of one layer, by name


@dataclass(frozen=True)
class Entry:
    """One array of a layer: its name, and shape, dtype and logical axes per token or sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one entry."""
        return prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class LayerState:
    """The state of one layer.

    ``paged`` has an entry for each token. ``window`` is the number of tokens to which the layer
    attends, the current one included (None: all). ``per_slot`` has an entry for each sequence: the
    state before the row that the layer computes. At position 0 it still is an earlier sequence's,
    so the layer must start with zeros.
    """

    paged: tuple[Entry, ...] = ()
    window: int | None = None
    per_slot: tuple[Entry, ...] = ()


def keys_and_values(
    num_kv_heads: int, head_dim: int, dtype: jnp.dtype, window: int | None = None
) -> LayerState:
    """The state of an attention layer: K and V of each token."""
    shape, axes = (num_kv_heads, head_dim), ("heads", None)
    return LayerState((Entry("k", shape, dtype, axes), Entry("v", shape, dtype, axes)), window)


@dataclass(frozen=True)
class LayerPlace:
    """The group (None without pages) and the arrays of one layer."""

    group: int | None
    arrays: tuple[tuple[str, int], ...]  # (name, index in ``StateLayout.arrays``)

    def take(self, state: State) -> LayerArrays:
        """The layer's arrays."""
        return {name: state[index] for name, index in self.arrays}

    def put(self, state: State, arrays: Mapping[str, jax.Array]) -> State:
        """The state with new arrays for the layer."""
        changed = list(state)
        for name, index in self.arrays:
            changed[index] = arrays[name]
        return tuple(changed)


@dataclass(frozen=True)
class StateLayout:
    """The state of a whole model: its arrays, its groups, and the place of each layer."""

    arrays: tuple[Entry, ...]
    is_paged: tuple[bool, ...]  # of each array; False: it has an entry for each slot
    windows: tuple[int | None, ...]  # of each group, in tokens
    layers: tuple[LayerPlace, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in a page, over all arrays."""
        pairs = zip(self.arrays, self.is_paged, strict=True)
        return sum(entry.nbytes for entry, paged in pairs if paged)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's entries."""
        pairs = zip(self.arrays, self.is_paged, strict=True)
        return sum(entry.nbytes for entry, paged in pairs if not paged)

    @property
    def slot_arrays(self) -> tuple[int, ...]:
        """Indices of the arrays with an entry for each sequence."""
        return tuple(i for i, paged in enumerate(self.is_paged) if not paged)

    def arrays_of(self, layers: range) -> tuple[int, ...]:
        """Indices of the arrays of a range of layers."""
        used = {index for i in layers for _, index in self.layers[i].arrays}
        return tuple(sorted(used))

    def abstract(
        self, num_pages: int, page_size: int, num_rows: int, placement: Placement | None = None
    ) -> State:
        """The abstract arrays.

        Arrays with an entry for each sequence have ``num_rows`` (``Limits.num_state_rows``). With a
        placement the arrays have shardings, which divide no page and no row.
        """

        def array(entry: Entry, paged: bool) -> jax.ShapeDtypeStruct:
            leading = (num_pages, page_size) if paged else (num_rows,)
            shape, axes = (*leading, *entry.shape), (*(None for _ in leading), *entry.axes)
            if placement is None:
                return jax.ShapeDtypeStruct(shape, entry.dtype)
            return placement.abstract(shape, entry.dtype, axes)

        return tuple(map(array, self.arrays, self.is_paged))  # type: ignore[arg-type]


def state_layout(layers: Sequence[LayerState]) -> StateLayout:
    """The layout for the layers of a model."""
    groups = _groups(layers)
    member = {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group)}
    arrays: list[tuple[Entry, bool]] = []  # and whether it is paged
    places: list[LayerPlace] = []
    shared: dict[tuple[tuple[Entry, ...], int], range] = {}
    for i, layer in enumerate(layers):
        named: list[tuple[str, int]] = []
        if layer.paged:
            key = (layer.paged, member[i][1])
            if key not in shared:
                shared[key] = range(len(arrays), len(arrays) + len(layer.paged))
                arrays += [(entry, True) for entry in layer.paged]
            named += [(e.name, at) for e, at in zip(layer.paged, shared[key], strict=True)]
        named += [(entry.name, at) for at, entry in enumerate(layer.per_slot, len(arrays))]
        arrays += [(entry, False) for entry in layer.per_slot]
        places.append(LayerPlace(member[i][0] if layer.paged else None, tuple(named)))
    windows = tuple(layers[group[0]].window for group in groups)
    entries, is_paged = zip(*arrays, strict=True) if arrays else ((), ())
    return StateLayout(entries, is_paged, windows, tuple(places))


def _groups(layers: Sequence[LayerState]) -> list[list[int]]:
    """Layers by window and entries, split into groups of equal size; full attention first."""
    kinds: dict[tuple[tuple[Entry, ...], int | None], list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.paged:
            kinds.setdefault((layer.paged, layer.window), []).append(i)
    groups: list[list[int]] = []
    for (paged, _), members in sorted(kinds.items(), key=lambda kind: kind[0][1] is not None):
        size = min(len(found) for (other, _), found in kinds.items() if other == paged)
        groups += [members[start : start + size] for start in range(0, len(members), size)]
    return groups
