"""What layers remember between steps, as a spec, and the arrays that hold it.

A layer states its kinds of memory (``LayerState``): arrays with an entry for each token of context,
which lie in pages (keys and values, or one latent), and arrays with an entry for each sequence,
which lie in slots (a recurrent state). ``state_layout`` puts the layers of a model together:

- Layers that look equally far back form a *group*. A group has a page table of its own, since the
  pages of a window go back to the pool as soon as every later token is beyond it.
- All groups take their pages from one pool. The arrays behind the pool are shared: array j holds
  layer j of each group, so that a page is of use to whichever group owns it (vLLM's hybrid KV
  cache). Groups of one kind of entry are cut to the size of the smallest, or its pages would leave
  most arrays empty: the 22 window layers of Gemma-3-1B become six groups beside its 4 full layers.

Owns: the specs, the layout, making the arrays. Who owns which page is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import jax
import jax.numpy as jnp

from jaxinfer.nn.placement import Axes, Placement

type State = tuple[jax.Array, ...]  # in the order of ``StateLayout.arrays``; donated every step
type LayerArrays = dict[str, jax.Array]  # those of one layer, by name


@dataclass(frozen=True)
class Entry:
    """One array of a layer: its name, what it holds for a token or a sequence, and the logical
    axes of that.
    """

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
    """What one layer remembers.

    ``paged`` has an entry for each token, ``window`` is how many tokens back the layer looks, its
    own included (None: all of them). ``per_slot`` has an entry for each sequence, of the tokens
    before the row that the layer computes. At position 0 it is another sequence's: the layer begins
    with zeros.
    """

    paged: tuple[Entry, ...] = ()
    window: int | None = None
    per_slot: tuple[Entry, ...] = ()


def keys_and_values(
    num_kv_heads: int, head_dim: int, dtype: jnp.dtype, window: int | None = None
) -> LayerState:
    """The state of a layer of attention: K and V of each token."""
    shape, axes = (num_kv_heads, head_dim), ("heads", None)
    return LayerState((Entry("k", shape, dtype, axes), Entry("v", shape, dtype, axes)), window)


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer's state is: its group of pages (None without pages), and its arrays."""

    group: int | None
    arrays: tuple[tuple[str, int], ...]  # name, and index in ``StateLayout.arrays``

    def take(self, state: State) -> LayerArrays:
        """The layer's arrays."""
        return {name: state[index] for name, index in self.arrays}

    def put(self, state: State, arrays: Mapping[str, jax.Array]) -> State:
        """The state with new arrays of the layer."""
        changed = list(state)
        for name, index in self.arrays:
            changed[index] = arrays[name]
        return tuple(changed)


@dataclass(frozen=True)
class StateLayout:
    """The state of a whole model: its arrays, its groups of pages, and where each layer's is."""

    arrays: tuple[Entry, ...]
    is_paged: tuple[bool, ...]  # of each array; the others have an entry for each slot
    windows: tuple[int | None, ...]  # of each group
    layers: tuple[LayerPlace, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's place in a page, over all arrays."""
        pairs = zip(self.arrays, self.is_paged, strict=True)
        return sum(entry.nbytes for entry, paged in pairs if paged)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a sequence's own entries."""
        pairs = zip(self.arrays, self.is_paged, strict=True)
        return sum(entry.nbytes for entry, paged in pairs if not paged)

    @property
    def slot_arrays(self) -> tuple[int, ...]:
        """Indices of the arrays with an entry for each sequence."""
        return tuple(i for i, paged in enumerate(self.is_paged) if not paged)

    def arrays_of(self, layers: range) -> tuple[int, ...]:
        """Indices of the arrays that some layers use."""
        used = {index for i in layers for _, index in self.layers[i].arrays}
        return tuple(sorted(used))

    def abstract(
        self, num_pages: int, page_size: int, num_rows: int, placement: Placement | None = None
    ) -> State:
        """Shapes and dtypes of the arrays, without memory; ``num_rows`` of those with an entry for
        each sequence (``Limits.num_state_rows``). With a placement they have shardings, which
        divide no page and no row.
        """

        def array(entry: Entry, paged: bool) -> jax.ShapeDtypeStruct:
            where = (num_pages, page_size) if paged else (num_rows,)
            shape, axes = (*where, *entry.shape), (*(None for _ in where), *entry.axes)
            if placement is None:
                return jax.ShapeDtypeStruct(shape, entry.dtype)
            return placement.abstract(shape, entry.dtype, axes)

        return tuple(map(array, self.arrays, self.is_paged))  # type: ignore[arg-type]

    def zeros(self, num_pages: int, page_size: int, num_rows: int) -> State:
        """The arrays. A page read before it is written therefore never holds NaN."""
        abstract = self.abstract(num_pages, page_size, num_rows)
        return tuple(jnp.zeros(one.shape, one.dtype) for one in abstract)


@dataclass
class _Builder:
    arrays: list[Entry] = field(default_factory=list)
    is_paged: list[bool] = field(default_factory=list)

    def add(self, entry: Entry, *, paged: bool) -> int:
        self.arrays.append(entry)
        self.is_paged.append(paged)
        return len(self.arrays) - 1


def state_layout(layers: Sequence[LayerState]) -> StateLayout:
    """Groups, arrays and places for the layers of a model."""
    groups = _groups(layers)
    member = {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group)}
    builder, places = _Builder(), []
    shared: dict[tuple[tuple[Entry, ...], int], tuple[int, ...]] = {}
    for i, layer in enumerate(layers):
        named: list[tuple[str, int]] = []
        if layer.paged:
            key = (layer.paged, member[i][1])
            if key not in shared:
                shared[key] = tuple(builder.add(entry, paged=True) for entry in layer.paged)
            named += [(e.name, at) for e, at in zip(layer.paged, shared[key], strict=True)]
        named += [(entry.name, builder.add(entry, paged=False)) for entry in layer.per_slot]
        places.append(LayerPlace(member[i][0] if layer.paged else None, tuple(named)))
    windows = tuple(layers[group[0]].window for group in groups)
    return StateLayout(tuple(builder.arrays), tuple(builder.is_paged), windows, tuple(places))


def _groups(layers: Sequence[LayerState]) -> list[list[int]]:
    """Layers by kind, those of one kind of entry in groups of one size; full attention first."""
    kinds: dict[tuple[tuple[Entry, ...], int | None], list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.paged:
            kinds.setdefault((layer.paged, layer.window), []).append(i)
    groups: list[list[int]] = []
    for (paged, _), members in sorted(kinds.items(), key=lambda kind: kind[0][1] is not None):
        size = min(len(found) for (other, _), found in kinds.items() if other == paged)
        groups += [members[start : start + size] for start in range(0, len(members), size)]
    return groups
