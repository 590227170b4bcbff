"""The context of a step for its layers: positions, rows, pages, slots, and pinned kernels.

It is one argument of every layer; ``exec.step`` makes it. A context without rows is the dense form
for research: one whole sequence, no state, differentiable. Both forms use the same modules. In the
dense form XLA fuses nothing across a point, so that the bits of a result do not depend on which
points are read or edited, nor on whether the pass is one compiled program or one for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.nn.points import GivenPoints, Points
from pallas_kernels.all_reduce.api import AllReduceArgs, Peers, all_reduce
from pallas_kernels.harness.pins import ALL_XLA, NO_PINS, Pins


class Saves(NamedTuple):
    """States of prefill rows that a layer stores in addition to each row's last one.

    A row saves up to N; the others have 0 tokens and the sink's state row.
    """

    num_tokens: jax.Array  # int32[R, N]: the number of the row's tokens that the state is after
    state_rows: jax.Array  # int32[R, N]: where it is stored

    def last_tokens(self, rows: Rows) -> jax.Array:  # int32[R, N]
        """The index in the step of the last of these tokens."""
        first = rows.last_tokens[-len(self.num_tokens) :] + 1
        first -= rows.query_start_loc[1:] - rows.query_start_loc[:-1]
        return jnp.maximum(first[:, None] + self.num_tokens - 1, 0)


class Rows(NamedTuple):
    """The rows of a step and their tokens.

    Rows [0, num_decodes) have one token each; prefill rows follow. Padding rows have the sink slot
    and no context.
    """

    of_token: jax.Array  # int32[T]: the row of each token
    is_token: jax.Array  # bool[T]: False for padding
    slots: jax.Array  # int32[B]: the slot of each row's sequence
    begins: jax.Array  # int32[B]: position of each row's first token; 0 for a new sequence
    last_tokens: jax.Array  # int32[B]: index of each row's last token in the step
    query_start_loc: jax.Array  # int32[R + 1]: start of each prefill row among the prefill tokens
    # of models with state for each sequence: where the state of each decode row goes besides its
    # slot, or its slot if it is not saved
    keeps: jax.Array | None = None  # int32[num_decodes]
    # and in steps with prompts (``nn.state.read_states``)
    reads: jax.Array | None = None  # int32[B]: the state row that each row starts from; None: slots
    saves: Saves | None = None  # what prefill rows save

    def prompts(self, num_decodes: int) -> Rows:
        """The prefill rows alone, and their tokens, which follow those of ``num_decodes`` rows."""
        d = num_decodes
        return self._replace(
            of_token=self.of_token[d:] - d,
            is_token=self.is_token[d:],
            slots=self.slots[d:],
            begins=self.begins[d:],
            last_tokens=self.last_tokens[d:] - d,
            keeps=None,
            reads=None if self.reads is None else self.reads[d:],
        )


class Pages(NamedTuple):
    """The pages of each row's context, for one group of layers.

    A group with a window has returned the first pages of a long context. Its table starts with the
    first page that it still holds, and its lengths count from there: attention depends only on
    distances.
    """

    # int32[T]: page_id * page_size + offset of the entry that each token completes; none: 0
    slot_mapping: jax.Array
    page_table: jax.Array  # int32[B, M]
    seq_lens: jax.Array  # int32[B]: whole entries in these pages, with this step's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Addends:
    """One device's addend of a result; the sum over the devices has not been made yet.

    The kernel of the next norm may make it (``all_reduce_norm``), or it is made with others.
    """

    partials: jax.Array  # [T, D], or split-K partials float32[S, T, D]
    peers: Peers | None
    axis: str = field(metadata={"static": True})
    pins: Pins = field(metadata={"static": True})

    def summed(self) -> jax.Array:  # [T, D] or float32[1, T, D]
        """The sum over the devices."""
        args = AllReduceArgs(partials=self.partials, peers=self.peers, axis=self.axis)
        return all_reduce(args, self.pins.of("all_reduce"))


# A block's output: [T, D], or split-K partials float32[S, T, D]; or what each device has of it
type PlainOutput = jax.Array | Addends


class Angles(NamedTuple):
    """The rotation tables of each token for its position (``nn.rope``)."""

    cos: jax.Array  # float32[T, H / 2]
    sin: jax.Array  # float32[T, H / 2]

    def take(self, tokens: jax.Array | slice) -> Angles:
        """The rotation tables for a subset of the tokens."""
        return Angles(self.cos[tokens], self.sin[tokens])


class BlockInputs(NamedTuple):
    """Inputs of layers with blocks that several layers use: see ``nn.mixers.after_block``."""

    embeddings: jax.Array  # [T, D]
    blocks: tuple[Any, ...]  # the parameters of each

    def take(self, tokens: jax.Array) -> BlockInputs:  # int32[B]
        """The inputs for a subset of the tokens."""
        return self._replace(embeddings=self.embeddings[tokens])


class TokenIds(NamedTuple):
    """The input of layers whose experts depend on the token's id: see ``nn.layer_spec``."""

    ids: jax.Array  # int32[T]

    def take(self, tokens: jax.Array) -> TokenIds:  # int32[B]
        """The ids of a subset of the tokens."""
        return TokenIds(self.ids[tokens])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """The context of a step for its layers; from ``num_decodes`` on, fields are static.

    ``pages`` has an entry for each group of layers, ``angles`` for each rope config. The context of
    one layer has only its own entries (``of_layer``): pages for each of its paged kinds, and its
    input [T, P].
    """

    positions: jax.Array  # int32[T]
    rows: Rows | None = None  # None: one whole sequence, without state
    pages: tuple[Pages, ...] = ()
    angles: tuple[Angles, ...] = ()
    # [T, L, P], or those of blocks that layers share, or ids of tokens: see ``nn.layer_spec``
    layer_inputs: jax.Array | BlockInputs | TokenIds | None = None
    arrivals: jax.Ref | None = None  # int32[...]: zeros, as many as ``append_decode`` needs
    peers: Peers | None = None  # the exchange memory of several devices, if they have some
    num_decodes: int = field(default=0, metadata={"static": True})
    pins: Pins = field(default=NO_PINS, metadata={"static": True})
    # whether padding begins as zeros. It stays so in a stream that no bias is added to, and the
    # quantised GEMMs for CPUs leave out such tokens: a step takes the time of its tokens, not that
    # of its bucket. A GPU's draws would read every block of equal logits.
    zeros_padding: bool = field(default=False, metadata={"static": True})
    # inside ``jax.shard_map`` the mesh axis along which heads and feed-forward columns are divided
    # (``nn.placement.TENSOR``); None if a device has all of them
    axis: str | None = field(default=None, metadata={"static": True})
    # where activations are read or changed, if they are; and the layer whose points the names of
    # ``at`` are
    points: Points | GivenPoints | None = field(default=None, metadata={"static": True})
    layer: int | None = field(default=None, metadata={"static": True})

    def of_layer(self, layer: int, groups: tuple[int, ...], rotation: int | None) -> StepContext:
        """The context of a layer with paged kinds in ``groups`` and rope config ``rotation``."""
        pages = tuple([self.pages[group] for group in groups]) if self.pages else ()
        angles = () if rotation is None else (self.angles[rotation],)
        inputs = self.layer_inputs
        inputs = inputs[:, layer] if isinstance(inputs, jax.Array) else inputs
        own = replace(self, pages=pages, angles=angles, layer_inputs=inputs)
        points, shared = self.points, self.rows is None  # equal layers share a trace
        if shared or not isinstance(points, Points) or layer not in points.layers:
            return replace(own, points=None)
        return replace(own, layer=layer)

    def of_tokens(self, tokens: jax.Array) -> StepContext:  # int32[B]
        """The context of these tokens alone, for what processes each token separately."""
        rows = self.rows and self.rows._replace(is_token=self.rows.is_token[tokens])
        inputs = self.layer_inputs
        if inputs is not None:
            inputs = inputs[tokens] if isinstance(inputs, jax.Array) else inputs.take(tokens)
        return replace(self, positions=self.positions[tokens], rows=rows, layer_inputs=inputs)

    def of_rows(self, tokens: jax.Array) -> StepContext:  # int32[B]
        """The context of the last token of each row alone, as if all rows were decode rows.

        It is for layers that write no state: pages have the slots of the other tokens.
        """
        angles = tuple([one.take(tokens) for one in self.angles])
        own = self.of_tokens(tokens)
        return replace(own, angles=angles, num_decodes=len(tokens), arrivals=None)

    def token_rows(self) -> StepContext:
        """The context in which each token is a row that attends to the context up to it.

        Only the pages are those of such rows.
        """
        assert (rows := self.rows) is not None
        of, is_token = jnp.minimum(rows.of_token, len(rows.slots) - 1), rows.is_token
        after = rows.last_tokens[of] - jnp.arange(len(of), dtype=jnp.int32)

        def of_tokens(pages: Pages) -> Pages:
            lens = jnp.where(is_token, pages.seq_lens[of] - after, 0)
            return pages._replace(page_table=pages.page_table[of], seq_lens=lens)

        return replace(self, pages=tuple([of_tokens(pages) for pages in self.pages]))

    def without_padding(self, x: jax.Array) -> jax.Array:  # [T, D]
        """``x``, with ``zeros_padding`` with zeros for padding tokens."""
        if self.rows is None or not self.zeros_padding:
            return x
        return jnp.where(self.rows.is_token[:, None], x, 0)

    @property
    def splits(self) -> bool:
        """True if a block's output may be split-K partials: the next norm adds them, or the kernel
        that adds those of all devices.
        """
        return self.axis is None or self.peers is not None

    def across(self, partial: jax.Array) -> jax.Array:  # [T, D] or float32[S, T, D]
        """The sum over the devices of what each has of a result; on one device the argument."""
        own = self.addends(partial)
        return own.summed() if isinstance(own, Addends) else own

    def mean_across(self, own: jax.Array) -> jax.Array:  # float32[T, G]
        """The mean over the devices of what each has; on one device the argument."""
        return own if self.axis is None else self.across(own) / jax.lax.axis_size(self.axis)

    def addends(self, partial: jax.Array) -> PlainOutput:  # [T, D] or float32[S, T, D]
        """Each device's addend of a result, to be summed later; on one device the argument."""
        return partial if self.axis is None else Addends(partial, self.peers, self.axis, self.pins)

    def uses(self, *points: str) -> bool:
        """True if an activation at one of these points is read or changed; see ``nn.points``.

        In the dense form always: each point is then a value of its own.
        """
        if self.rows is None:
            return True
        return self.points is not None and any([self.points.uses(self._full(p)) for p in points])

    def at(self, point: str, value: jax.Array) -> jax.Array:
        """The activation at a point, which may be read or changed; see ``nn.points``."""
        return self.seen(point, self.shifted(point, value))

    def shifted(self, point: str, value: jax.Array) -> jax.Array:
        """The activation at a point, or a part of the sum that it is, with the point's shift."""
        return value if self.points is None else self.points.shifted(self._full(point), value)

    def seen(self, point: str, value: jax.Array) -> jax.Array:
        """The activation at a point, after its shift, which may be read or replaced."""
        if self.points is not None:
            value = self.points.at(self._full(point), value)
        return jax.lax.optimization_barrier(value) if self.rows is None else value

    def _full(self, point: str) -> str:
        return point if self.layer is None else f"layers.{self.layer}.{point}"

    def pinned(self, op: str) -> str | None:
        """The implementation that an op is pinned to, or None."""
        return self.pins.of(op)


def dense_context(num_tokens: int, points: Points | None = None) -> StepContext:
    """The context of one whole sequence without state, in plain XLA, which is differentiable."""
    return StepContext(jnp.arange(num_tokens, dtype=jnp.int32), pins=ALL_XLA, points=points)
