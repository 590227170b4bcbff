"""The state of layers between steps: its specs, its layout and its arrays.

A layer declares its state (``LayerState``): arrays with an entry for each token of context, which
are stored in pages (keys and values, or a latent), and arrays with an entry for each sequence,
which are stored in slots (a recurrent state). ``state_layout`` combines the layers of a model:

- Layers with the same kind of paged state form a *group* with its own page table, since pages
  outside a window return to the pool.
- Groups with the same kind of entry take their pages from one pool and share its arrays: array j
  holds layer j of each group, so any of them can use any page (as in vLLM's hybrid KV cache). They
  are split to the size of the smallest, since a page of a small group would leave most arrays
  unused: the 22 window layers of Gemma-3-1B become six groups, and its 4 full layers one.
- Each kind of entry (names, shapes, dtypes, tokens per entry) has a pool of its own, as a page has
  memory in all arrays of its pool.

The scheduler assigns the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import PageGroup
from jaxinfer.nn.context import Rows
from jaxinfer.nn.placement import Axes, Fused, Placement, is_divided, positions
from pallas_kernels.lib.page_scales import BITS

type State = tuple[jax.Array, ...]  # in the order of ``StateLayout.arrays``; donated to each step
type LayerArrays = dict[str, jax.Array]  # the arrays of one layer, by name

SCALE = "_scale"  # the end of the name of an entry of scales, behind that of their values


@dataclass(frozen=True)
class Entry:
    """One array of a layer: its name, and shape, dtype and logical axes per token or sequence.

    The shape is that on all ``devices``, among which an entry is divided.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes = ()
    devices: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one entry on a device."""
        num_bytes = prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return num_bytes // self.devices if any(map(is_divided, self.axes)) else num_bytes

    def on(self, devices: int) -> Entry:
        """The entry of a model that is divided among so many devices."""
        axes = (*self.axes, *(None for _ in self.shape[len(self.axes) :]))
        shape = (
            positions(axis, size, devices).size if is_divided(axis) else size
            for axis, size in zip(axes, self.shape, strict=True)
        )
        return replace(self, shape=tuple(shape), devices=devices)


@dataclass(frozen=True)
class PagedKind:
    """Entries of a layer that are stored in pages, each for ``tokens_per_entry`` tokens.

    ``window`` is the number of tokens to which the layer attends through them, the current one
    included (None: all). Scales of quantised entries are further entries.
    """

    entries: tuple[Entry, ...]
    window: int | None = None
    tokens_per_entry: int = 1

    @property
    def entry(self) -> PagedKind:
        """The kind of entry, which decides the pool: this kind without its window."""
        return replace(self, window=None)


class Chunk(NamedTuple):
    """Chunks of the context within which tokens attend, in place of a window."""

    size: int  # tokens
    back: int = 0  # the chunks before its own that a token sees, too
    used: bool = True  # False: a token sees all of the context

    @property
    def reach(self) -> int:
        """The most tokens that a token sees, itself included."""
        return self.size * (self.back + 1)

    def for_context(self, length: int) -> Chunk:
        """The chunks of a context of this length."""
        return self._replace(used=self.reach < length)


def used_chunk(chunk: Chunk | None) -> Chunk | None:
    """The chunks, None if there are none that limit what a token sees."""
    return chunk if chunk is not None and chunk.used else None


@dataclass(frozen=True)
class LayerState:
    """The state of one layer; the names of its entries differ.

    ``per_slot`` has an entry for each sequence: the state after its last computed token. A mixer
    reads and stores it by index (``read_states``, ``stored_states``). ``align`` is the number of
    tokens that the mixer computes at a time: chunks of a prompt begin, and end before the prompt
    does, at multiples of it, and only states there are saved. So a state does not depend on how the
    prompt was divided.

    A token attends to those of its ``chunk`` of so many tokens, which are whole pages, and may to
    those of some chunks before it.

    With ``of`` the layer has no state of its own: it reads the arrays of an earlier layer, of this
    number, which has written them in the same step. In the dense form it gets what that layer's
    mixer returns as its state.

    With ``reads`` the layer also attends to pages of an earlier layer of this number, whose entries
    are like its own. Its arrays hold both: their pages are the last of ``StepContext.pages``. In
    the dense form it gets what that layer's mixer returns as its state.

    ``follows`` are names and numbers of earlier layers, whose mixers have returned a value of this
    step under that name, with their states: the layer gets it under the same name.
    """

    paged: tuple[PagedKind, ...] = ()
    per_slot: tuple[Entry, ...] = ()
    align: int = 1
    chunk: int | None = None
    of: int | None = None
    reads: int | None = None
    follows: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """Check that a layer either has state or reads that of another one."""
        assert self.of is None or not (self.paged or self.per_slot), "state of another layer"


def read_states(array: jax.Array, rows: Rows) -> jax.Array:  # [B, ...]
    """The state before the first token of each row, from an array with an entry for each sequence.

    It is that of the row's slot, or a snapshot, of which a prefix is reused. A new sequence starts
    with zeros, as the slot still has the state of an earlier one.
    """
    found = array[rows.slots if rows.reads is None else rows.reads]
    is_new = (rows.begins == 0).reshape(-1, *(1,) * (found.ndim - 1))
    return jnp.where(is_new, jnp.zeros((), array.dtype), found)


def stored_states(
    array: jax.Array,
    rows: Rows,
    last: jax.Array,  # [B, ...]: after the last token of each row
    saved: jax.Array | None = None,  # [R, N, ...]: after ``Saves.num_tokens``; None without saves
) -> jax.Array:
    """The array with the state of each row in its slot, and those that are saved in snapshots."""
    array = array.at[rows.slots].set(last)
    if rows.keeps is not None:
        array = array.at[rows.keeps].set(last[: len(rows.keeps)])
    if rows.saves is None:
        return array
    assert saved is not None, "rows.saves are stored"
    return array.at[rows.saves.state_rows].set(saved)


def keys_and_values(
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    window: int | None = None,
    chunk: Chunk | None = None,
) -> LayerState:
    """The state of an attention layer: K and V of each token, of 8 bits with a scale of each head
    (``pallas_kernels.lib.page_scales``). Pages before those that a ``chunk`` sees are not read.
    """
    heads = (num_kv_heads,)
    shape, axes = (num_kv_heads, head_dim), (Fused("heads", heads, heads), None)
    entries = (Entry("k", shape, dtype, axes), Entry("v", shape, dtype, axes))
    if dtype == BITS:
        scales = (heads, jnp.dtype(jnp.float32), axes[:1])
        entries += tuple(Entry(name + SCALE, *scales) for name in ("k", "v"))
    if (used := used_chunk(chunk)) is not None:
        return LayerState((PagedKind(entries, used.reach),), chunk=used.size)
    return LayerState((PagedKind(entries, window),))


@dataclass(frozen=True)
class LayerPlace:
    """The groups of a layer's paged kinds, in order, and the arrays of the layer.

    They may be those of the earlier layer ``of``, or have its groups next to their own (``reads``):
    see ``LayerState``, also for ``follows``.
    """

    groups: tuple[int, ...]
    arrays: tuple[tuple[str, int], ...]  # (name, index in ``StateLayout.arrays``)
    of: int | None = None
    reads: int | None = None
    follows: tuple[tuple[str, int], ...] = ()

    @property
    def earlier(self) -> int | None:
        """The layer of whose state it reads at least a part."""
        return self.reads if self.of is None else self.of

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
    pools: tuple[int | None, ...]  # of each array; None: it has an entry for each slot
    groups: tuple[PageGroup, ...]
    layers: tuple[LayerPlace, ...]
    align: int = 1  # the least common multiple of the layers'

    def on(self, devices: int) -> StateLayout:
        """The layout of a model that is divided among so many devices."""
        return (
            self
            if devices == 1
            else replace(self, arrays=tuple(e.on(devices) for e in self.arrays))
        )

    @property
    def last_with_state(self) -> int:
        """The last layer with arrays of its own, or that follows others; later ones only read those
        of others, or none.
        """
        own = (i for i, x in enumerate(self.layers) if x.of is None and (x.arrays or x.follows))
        return max(own, default=-1)

    def given(
        self,
        layer: int,
        state: State | None,
        returned: Mapping[int | None, LayerArrays | None],  # by the mixers of earlier layers
    ) -> LayerArrays | None:
        """The arrays of a layer, in the dense form what layer ``of`` has returned, and the values
        of layers that it follows, if they have returned some.
        """
        place = self.layers[layer]
        own = place.take(state) if state is not None else returned.get(place.earlier)
        values = ((name, (returned[of] or {}).get(name)) for name, of in place.follows)
        found = {name: value for name, value in values if value is not None}
        return {**(own or {}), **found} if found else own

    def border_before(self, layer: int) -> int:
        """The last number up to ``layer`` such that no layer from it on follows one before it, or
        reads pages of one.
        """
        places = self.layers[layer:]
        before = [of for place in places for _, of in place.follows]
        before += [place.reads for place in places if place.reads is not None]
        first = min(before, default=layer)
        return layer if first >= layer else self.border_before(first)

    @property
    def bytes_per_entry(self) -> tuple[int, ...]:
        """Bytes of one entry in a page of each pool, over all its arrays, on a device."""
        num_pools = 1 + max((group.pool for group in self.groups), default=-1)
        return tuple(self._nbytes(pool) for pool in range(num_pools))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of context in a page of each pool, on a device."""
        strides = {group.pool: group.tokens_per_entry for group in self.groups}
        return sum(cdiv(size, strides[pool]) for pool, size in enumerate(self.bytes_per_entry))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's entries on a device."""
        return self._nbytes(None)

    def _nbytes(self, pool: int | None) -> int:
        pairs = zip(self.arrays, self.pools, strict=True)
        return sum(entry.nbytes for entry, own in pairs if own == pool)

    def arrays_of(self, layers: range) -> tuple[int, ...]:
        """Indices of the arrays of a range of layers."""
        used = {index for i in layers for _, index in self.layers[i].arrays}
        return tuple(sorted(used))

    def abstract(
        self,
        num_pages: Sequence[int],
        page_size: int,
        num_rows: int,
        placement: Placement | None = None,
    ) -> State:
        """The abstract arrays, with ``num_pages`` of each pool.

        Arrays with an entry for each sequence have ``num_rows`` (``Limits.num_state_rows``). With a
        placement the arrays have shardings, which divide no page and no row.
        """

        def array(entry: Entry, pool: int | None) -> jax.ShapeDtypeStruct:
            leading = (num_rows,) if pool is None else (num_pages[pool], page_size)
            shape, axes = (*leading, *entry.shape), (*(None for _ in leading), *entry.axes)
            if placement is None:
                return jax.ShapeDtypeStruct(shape, entry.dtype)
            return placement.abstract(shape, entry.dtype, axes)

        return tuple(map(array, self.arrays, self.pools))  # type: ignore[arg-type]


def state_layout(layers: Sequence[LayerState]) -> StateLayout:
    """The layout for the layers of a model. Groups of full attention are first."""
    kinds: dict[PagedKind, list[int]] = {}
    for i, layer in enumerate(layers):
        for kind in layer.paged:
            kinds.setdefault(kind, []).append(i)
    groups: list[PageGroup] = []
    pools: dict[PagedKind, int] = {}  # by the kind without its window
    places: dict[tuple[PagedKind, int], tuple[int, int]] = {}  # group, and place within it
    for kind, own in sorted(kinds.items(), key=lambda item: item[0].window is not None):
        pool = pools.setdefault(kind.entry, len(pools))
        size = min(len(found) for other, found in kinds.items() if other.entry == kind.entry)
        for start in range(0, len(own), size):
            for at, layer in enumerate(own[start : start + size]):
                places[kind, layer] = len(groups), at
            groups.append(PageGroup(kind.window, kind.tokens_per_entry, pool))
    arrays: list[tuple[Entry, int | None]] = []  # and the pool of each
    shared: dict[tuple[int, int], range] = {}  # arrays by pool and place
    found: list[LayerPlace] = []
    for i, layer in enumerate(layers):
        if layer.of is not None:
            assert layer.of < i, f"layer {i} reads the state of a later one, {layer.of}"
            found.append(replace(found[layer.of], of=layer.of))
            continue
        named: list[tuple[str, int]] = []
        for kind in layer.paged:
            group, at = places[kind, i]
            key = groups[group].pool, at
            if key not in shared:
                shared[key] = range(len(arrays), len(arrays) + len(kind.entries))
                arrays += [(entry, key[0]) for entry in kind.entries]
            named += [(e.name, at) for e, at in zip(kind.entries, shared[key], strict=True)]
        named += [(entry.name, at) for at, entry in enumerate(layer.per_slot, len(arrays))]
        arrays += [(entry, None) for entry in layer.per_slot]
        assert len(dict(named)) == len(named), f"layer {i} has two entries of one name"
        assert all(of < i for _, of in layer.follows), f"layer {i} follows a later one"
        groups_of = tuple(places[kind, i][0] for kind in layer.paged)
        if layer.reads is not None:
            assert tuple(named) == found[layer.reads].arrays, f"layer {i} has other arrays"
            groups_of += found[layer.reads].groups
        found.append(LayerPlace(groups_of, tuple(named), None, layer.reads, layer.follows))
    entries, of_pools = zip(*arrays, strict=True) if arrays else ((), ())
    align = lcm(*(layer.align for layer in layers))
    return StateLayout(entries, of_pools, tuple(groups), tuple(found), align)
