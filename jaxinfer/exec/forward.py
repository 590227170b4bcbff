"""The pure step: (weights, kv_state, slots, batch) -> (kv_state, slots, output).

Owns: ``StepFunction``, its output, and the flat form in which it is compiled. One call computes a
bucket's rows, draws their tokens and records them in the slots. Must not know: who compiles it, the
scheduler, requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.exec.batch import BatchLayout, DeviceBatch, copied_in, unpack
from jaxinfer.exec.cut import WeightsOfParts
from jaxinfer.exec.sampling import sample
from jaxinfer.exec.slots import SlotState, with_settings
from jaxinfer.models.base import (
    Model,
    Params,
    abstract_params,
    hidden_states,
    layer_of,
    unembed,
)
from jaxinfer.nn.attention import PagedAttend
from jaxinfer.nn.kv import KVState, LayerKV
from pallas_kernels.pins import Pins
from pallas_kernels.publish.api import publish

type Arrays = tuple[jax.Array, ...]


def flat_params(model: Model, params: Params) -> Arrays:
    """Weights as ``flat_step`` takes them; ``ValueError`` for those of another model."""
    return tuple(jax.tree.structure(abstract_params(model)).flatten_up_to(params))


def weights_of_parts(model: Model, num_layers: int) -> WeightsOfParts:
    """Of ``flat_params``: those of the first layers and of the others. What is no layer's (the
    embedding, which may be the head) is in both.
    """
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    later = [layer_of(path[0].key) for path, _ in paths]
    first = (i for i, layer in enumerate(later) if layer is None or layer < num_layers)
    second = (i for i, layer in enumerate(later) if layer is None or layer >= num_layers)
    return WeightsOfParts(tuple(first), tuple(second))


def flat_kv_state(kv_state: KVState) -> Arrays:
    """Pages as ``flat_step`` takes and returns them: K, V, K, V, ..."""
    return tuple(pages for layer in kv_state for pages in layer)


class StepOutput(NamedTuple):
    """Results of a step beside its state."""

    token_ids: jax.Array  # int32[B]: the token each row drew; meaningless where it draws none
    hidden: jax.Array | None = None  # [Tp, D] of all prompt tokens, of a bucket that scores


@dataclass(frozen=True)
class StepFunction:
    """The step of one bucket: a pure function. ``flat_step`` is compiled, pages and slots donated.

    It has no branch, so that on a GPU the host never waits inside it.
    """

    model: Model
    layout: BatchLayout
    page_size: int
    keeps_logits: bool  # what ``SlotState.drawn_from`` is
    pins: Pins = Pins()
    copies_in: bool = False  # the batch, to memory of the step's own: see ``batch.copied_in``

    def __call__(
        self,
        params: Params,
        kv_state: KVState,
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[KVState, SlotState, StepOutput]:
        """Compute, draw, record."""
        flat = copied_in(flat) if self.copies_in else flat
        batch = unpack(flat, self.layout, slots.token_ids, self.page_size)
        num_decodes = self.layout.bucket.num_decodes
        if self.layout.bucket.num_prefills:
            slots = with_settings(slots, batch.seq_slots[num_decodes:], batch.settings)
        attend = PagedAttend(batch.attention, num_decodes, self._arrivals(), self.pins)
        last = batch.logits_indices if self._ends_with_last_tokens else None
        inputs = (batch.token_ids, batch.positions, kv_state, attend, self.pins, last)
        hidden, new_kv = hidden_states(self.model, params, *inputs)
        one_a_row = last is not None or not self.layout.bucket.num_prefills
        drawn_from = hidden if one_a_row else hidden[batch.logits_indices]  # [B, D]
        logits = unembed(self.model, params, drawn_from)  # [B, V]
        impl = self.pins.of("sample")
        token_ids = sample(logits, slots, batch.seq_slots, batch.attention.seq_lens, impl)
        token_ids = publish(token_ids, batch.place, impl=self.pins.of("publish"))
        kept = logits if self.keeps_logits else drawn_from
        new_slots = self._record(slots, batch, token_ids, kept)
        scored = hidden[num_decodes:] if self.layout.bucket.scores else None
        return new_kv, new_slots, StepOutput(token_ids, scored)  # type: ignore[return-value]

    def flat_step(
        self,
        weights: Arrays,  # see ``flat_params``
        pages: Arrays,  # see ``flat_kv_state``
        slots: SlotState,
        flat: jax.Array,  # int32[...]: see ``BatchLayout``
    ) -> tuple[Arrays, SlotState, StepOutput]:
        """The same with flat arguments, which is what is compiled: each call walks all of them,
        and takes a tenth longer where they lie in nested dicts.
        """
        params = jax.tree.unflatten(jax.tree.structure(abstract_params(self.model)), weights)
        kv_state = tuple(LayerKV(*both) for both in batched(pages, 2))
        kv_state, slots, output = self(params, kv_state, slots, flat)
        return flat_kv_state(kv_state), slots, output

    @property
    def _ends_with_last_tokens(self) -> bool:
        """Whether the last layer computes the last token of each row alone: all that a prompt is
        asked for, unless the bucket scores.
        """
        bucket = self.layout.bucket
        return bool(bucket.num_prefills) and not (bucket.num_decodes or bucket.scores)

    def _arrivals(self) -> jax.Ref | None:
        """Zeros for ``append_decode``, made once a step: int32[num_decodes * K]. None where nobody
        decodes.
        """
        bucket = self.layout.bucket
        if not bucket.num_decodes:
            return None
        heads = max(layer.num_kv_heads for layer in self.model.kv_spec.layers)
        return jax.new_ref(jnp.zeros(bucket.num_decodes * heads, jnp.int32))

    def _record(
        self,
        slots: SlotState,
        batch: DeviceBatch,
        token_ids: jax.Array,  # int32[B]
        drawn_from: jax.Array,  # [B, D] or float32[B, V]
    ) -> SlotState:
        """The slots with each drawn token at its position, and what it was drawn from; rows that
        draw none write no token.
        """
        position = jnp.where(batch.samples, batch.attention.seq_lens, slots.token_ids.shape[1])
        return slots._replace(
            token_ids=slots.token_ids.at[batch.seq_slots, position].set(token_ids, mode="drop"),
            drawn_from=slots.drawn_from.at[batch.seq_slots].set(drawn_from),
        )
