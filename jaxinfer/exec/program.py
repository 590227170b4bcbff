"""What an engine compiles, as shapes: one step per bucket, and the admission of a slot.

Owns: ``Program``, which names and lowers every executable. Needs no weights and no memory.
Must not know: how executables are compiled, stored or run.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxinfer.core.config import Limits
from jaxinfer.core.step import Bucket
from jaxinfer.exec.batch import BatchLayout
from jaxinfer.exec.forward import StepFunction
from jaxinfer.exec.slots import SlotState, admit, empty_row, init_slots
from jaxinfer.models.base import Model, Params, abstract_params
from jaxinfer.nn.kv import KVState, abstract_kv_state

ADMIT = "admit"


@dataclass(frozen=True)
class Program:
    """The model and the limits that fix every compiled shape."""

    model: Model
    limits: Limits

    def layout(self, bucket: Bucket) -> BatchLayout:
        """Wire layout of a bucket's batch."""
        return BatchLayout(bucket, self.limits.max_pages_per_seq, self.limits.max_num_seqs)

    def params(self) -> Params:
        """Weights."""
        return abstract_params(self.model)

    def kv_state(self) -> KVState:
        """The page pool."""
        limits = self.limits
        return abstract_kv_state(self.model.kv_spec, limits.num_pages, limits.page_size)

    def slots(self) -> SlotState:
        """The slot state."""
        limits = self.limits
        return jax.eval_shape(lambda: init_slots(limits.max_num_seqs, limits.max_model_len))

    def lower(self, name: str) -> jax.stages.Lowered:
        """Trace one executable, by its name."""
        if name == ADMIT:
            row = empty_row(self.limits.max_model_len)
            return jax.jit(admit, donate_argnums=0).lower(self.slots(), row)
        layout = self.layout(next(b for b in self.limits.buckets if b.name == name))
        step = StepFunction(self.model, layout, self.limits.page_size)
        arguments = (self.params(), self.kv_state(), self.slots(), layout.abstract())
        return jax.jit(step, donate_argnums=(1, 2)).lower(*arguments)

    def names(self) -> tuple[str, ...]:
        """Every executable: one per bucket, and ``admit``."""
        return (ADMIT, *(bucket.name for bucket in self.limits.buckets))
