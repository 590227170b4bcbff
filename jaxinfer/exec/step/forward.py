"""The pure step: (weights, state, slots, batch) -> (state, slots, output).

Owns: ``StepFunction``, its output, and the flat forms in which it is compiled, whole and in two
parts. One call computes a bucket's rows, draws their tokens and records them in the slots.

In two parts, the device runs the first while the host prepares the second. The call of a prompt's
step takes the host 1.3 ms from the batch's copy to the first kernel (1,024 tokens of Qwen3-4B,
H200), nearly all of it for each argument and each kernel, and the device idles. A quarter of the
layers is a quarter of that, if the call names no other weights: 1 us for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.exec.step.batch import BatchLayout, DeviceBatch, copied_in, unpack
from jaxinfer.exec.step.drafts import NO_TOKEN, Drafter, num_accepted
from jaxinfer.exec.step.sampling import sample
from jaxinfer.exec.step.slots import SlotState, with_settings
from jaxinfer.models.base import (
    Model,
    Params,
    abstract_params,
    first_layers,
    hidden_states,
    layer_of,
    other_layers,
    unembed,
)
from jaxinfer.models.tree import nested
from jaxinfer.nn.context import StepContext
from jaxinfer.nn.linear import Stream
from jaxinfer.nn.state import State
from pallas_kernels.pins import Pins
from pallas_kernels.publish.api import publish

type Arrays = tuple[jax.Array, ...]


def flat_params(model: Model, params: Params) -> Arrays:
    """Weights as a compiled step takes them; ``ValueError`` for those of another model."""
    return tuple(jax.tree.structure(abstract_params(model)).flatten_up_to(params))


class Part(NamedTuple):
    """The arguments of one half of a split step: indices into weights and state arrays."""

    weights: tuple[int, ...]
    arrays: tuple[int, ...]


def parts_of(model: Model, num_first: int) -> tuple[Part, Part]:
    """The first layers and the others. Weights that are no layer's (the embedding, which may be the
    head) are in both.
    """
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    layers = [layer_of(path[0].key) for path, _ in paths]
    first = (i for i, layer in enumerate(layers) if layer is None or layer < num_first)
    others = (i for i, layer in enumerate(layers) if layer is None or layer >= num_first)
    arrays_of = model.state.arrays_of
    return (
        Part(tuple(first), arrays_of(range(num_first))),
        Part(tuple(others), arrays_of(range(num_first, model.config.num_hidden_layers))),
    )


class StepOutput(NamedTuple):
    """Results of a step beside its state."""

    # int32[N]: the tokens of each row, see ``Draws``; ``NO_TOKEN`` where a draft was refused,
    # meaningless where the row draws none
    token_ids: jax.Array
    hidden: jax.Array | None = None  # [Tp, D] of all prompt tokens, of a bucket that scores


@dataclass(frozen=True)
class StepFunction:
    """The step of one bucket: a pure function. ``flat_step`` is compiled, state and slots donated.

    It has no branch, so that on a GPU the host never waits inside it.
    """

    model: Model
    layout: BatchLayout
    keeps_logits: bool  # what ``SlotState.drawn_from`` is
    pins: Pins = Pins()
    copies_in: bool = False  # the batch, to memory of the step's own: see ``batch.copied_in``
    drafter: Drafter | None = None

    def __call__(
        self,
        params: Params,
        state: State,
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[State, SlotState, StepOutput]:
        """Compute, draw, record."""
        batch, ctx = self._begun(slots, flat)
        only = batch.rows.last_tokens if self._ends_with_last_tokens else None
        hidden, new = hidden_states(self.model, params, batch.token_ids, ctx, state, only)
        assert new is not None
        return (new, *self._drawn(params, slots, batch, hidden))

    def flat_step(
        self, weights: Arrays, state: State, slots: SlotState, flat: jax.Array
    ) -> tuple[State, SlotState, StepOutput]:
        """The same with flat weights, which is what is compiled: each call walks all of its
        arguments, and takes a tenth longer where they lie in nested dicts.
        """
        params = jax.tree.unflatten(jax.tree.structure(abstract_params(self.model)), weights)
        return self(params, state, slots, flat)

    def first_part(
        self,
        weights: Arrays,  # those of the first ``Part``
        arrays: Arrays,  # likewise
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        *,
        num_first: int,
    ) -> tuple[Arrays, Stream]:
        """The first layers of a step: their state, and the residual stream behind them."""
        own, _ = parts_of(self.model, num_first)
        params, state = self._given(own, weights, arrays)
        batch, ctx = self._begun(slots, flat)
        stream, state = first_layers(self.model, params, batch.token_ids, ctx, state, num_first)
        return tuple(state[i] for i in own.arrays), stream

    def second_part(
        self,
        weights: Arrays,  # those of the second ``Part``
        arrays: Arrays,  # likewise
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
        stream: Stream,
        *,
        num_first: int,
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The other layers, draws and records. It makes again what follows from the batch alone:
        small, and a CUDA graph keeps a kernel only while its memory stays, which that of what is
        handed over does not.
        """
        _, own = parts_of(self.model, num_first)
        params, state = self._given(own, weights, arrays)
        batch, ctx = self._begun(slots, flat)
        only = batch.rows.last_tokens if self._ends_with_last_tokens else None
        hidden, state = other_layers(self.model, params, stream, ctx, state, num_first, only)
        slots, output = self._drawn(params, slots, batch, hidden)
        return tuple(state[i] for i in own.arrays), slots, output

    def _given(self, part: Part, weights: Arrays, arrays: Arrays) -> tuple[Params, State]:
        """Weights and state of a part; the arrays of other layers are None."""
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(abstract_params(self.model))
        ]
        params = nested({names[i]: w for i, w in zip(part.weights, weights, strict=True)})
        given = dict(zip(part.arrays, arrays, strict=True))
        state = tuple(given.get(i) for i in range(len(self.model.state.arrays)))
        return params, state  # type: ignore[return-value]

    def _begun(self, slots: SlotState, flat: jax.Array) -> tuple[DeviceBatch, StepContext]:
        """The batch, and what layers see of it."""
        flat = copied_in(flat) if self.copies_in else flat
        batch, bucket = unpack(flat, self.layout, slots, self.drafter), self.layout.bucket
        ctx = StepContext(
            positions=batch.positions,
            rows=batch.rows,
            pages=batch.pages,
            arrivals=self._arrivals(),
            # rows with drafts attend as prompts do
            num_decodes=bucket.num_decodes if bucket.query_tokens == 1 else 0,
            pins=self.pins,
        )
        return batch, ctx

    def _drawn(
        self,
        params: Params,
        slots: SlotState,
        batch: DeviceBatch,
        hidden: jax.Array,  # [T, D], or [B, D] where only last tokens were computed
    ) -> tuple[SlotState, StepOutput]:
        """Draw each row's token and record it."""
        bucket, rows = self.layout.bucket, batch.rows
        if bucket.num_prefills:
            slots = with_settings(slots, rows.slots[bucket.num_decodes :], batch.settings)
        one_a_row = self._ends_with_last_tokens or not bucket.num_prefills
        drawn_from = hidden if one_a_row else hidden[batch.draws.tokens]  # [N, D]
        logits = unembed(self.model, params, drawn_from)  # [N, V]
        impl = self.pins.of("sample")
        token_ids = sample(logits, slots, batch.draws.slots, batch.draws.lens, impl)
        record = self._record if batch.drafts is None else self._record_accepted
        token_ids, slots = record(
            slots, batch, token_ids, logits if self.keeps_logits else drawn_from
        )
        token_ids = publish(token_ids, batch.place, impl=self.pins.of("publish"))
        scored = hidden[bucket.num_decode_tokens :] if bucket.scores else None
        return slots, StepOutput(token_ids, scored)

    @property
    def _ends_with_last_tokens(self) -> bool:
        """Whether the last layer computes the last token of each row alone: all that a prompt is
        asked for, unless the bucket scores.
        """
        bucket = self.layout.bucket
        return bool(bucket.num_prefills) and not (bucket.num_decodes or bucket.scores)

    def _arrivals(self) -> jax.Ref | None:
        """Zeros for ``append_decode``, made once a step: int32[num_decodes * K]. None in a step
        that does not decode, or of a model without keys and values.
        """
        bucket = self.layout.bucket
        heads = max((e.shape[0] for e in self.model.state.arrays if e.name == "k"), default=0)
        if not bucket.num_decodes or bucket.query_tokens > 1 or not heads:
            return None
        return jax.new_ref(jnp.zeros(bucket.num_decodes * heads, jnp.int32))

    def _record(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[B]
        drawn_from: jax.Array,  # [B, D] or float32[B, V]
    ) -> tuple[jax.Array, SlotState]:
        """The tokens, and the slots with each at its position, and what it was drawn from; rows
        that draw none write no token.
        """
        position = jnp.where(batch.samples, batch.seq_lens, slots.token_ids.shape[1])
        if slots.lengths is not None:
            known = batch.seq_lens + batch.samples.astype(jnp.int32)
            slots = slots._replace(lengths=slots.lengths.at[batch.rows.slots].set(known))
        return token_ids, slots._replace(
            token_ids=slots.token_ids.at[batch.rows.slots, position].set(token_ids, mode="drop"),
            drawn_from=slots.drawn_from.at[batch.rows.slots].set(drawn_from),
        )

    def _record_accepted(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[N]
        drawn_from: jax.Array,  # [N, D] or float32[N, V]
    ) -> tuple[jax.Array, SlotState]:
        """The same where decode rows have drafts: of a row's tokens those behind a refused draft
        are ``NO_TOKEN`` and not written, and the slot keeps the length that the sequence has now.
        """
        bucket, draws, drafts = self.layout.bucket, batch.draws, batch.drafts
        assert drafts is not None and slots.lengths is not None
        d, q = bucket.num_decodes, bucket.query_tokens
        accepted = num_accepted(drafts.token_ids, token_ids[: d * q].reshape(d, q), drafts.most)
        index = jnp.arange(d * q, dtype=jnp.int32)
        is_accepted = index % q <= accepted[index // q]
        drawn = jnp.concatenate((is_accepted, batch.samples[d:]))
        token_ids = jnp.where(drawn, token_ids, NO_TOKEN)
        position = jnp.where(drawn, draws.lens, slots.token_ids.shape[1])
        last = jnp.concatenate(
            (jnp.arange(d) * q + accepted, d * q + jnp.arange(bucket.num_prefills))
        )
        lengths = jnp.concatenate(
            (
                batch.rows.begins[:d] + 2 + accepted,
                batch.seq_lens[d:] + batch.samples[d:].astype(jnp.int32),
            )
        )
        return token_ids, slots._replace(
            token_ids=slots.token_ids.at[draws.slots, position].set(token_ids, mode="drop"),
            drawn_from=slots.drawn_from.at[batch.rows.slots].set(drawn_from[last]),
            lengths=slots.lengths.at[batch.rows.slots].set(lengths),
        )
