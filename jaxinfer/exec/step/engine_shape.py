"""``EngineShape``: what determines the executables of an engine, and the arrays that they read.

It needs shapes only, no weights and no device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp

from jaxinfer.core.constraint import BITS
from jaxinfer.core.limits import Limits
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket
from jaxinfer.exec.step.batch import BatchLayout
from jaxinfer.exec.step.drafts import Drafter
from jaxinfer.exec.step.points import StepEdits
from jaxinfer.exec.step.slots import SlotState, init_slots
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import nested
from jaxinfer.nn.placement import Placement, default_placement
from jaxinfer.nn.state import State
from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import current_platform
from pallas_kernels.mask.api import reads_board


@dataclass(frozen=True)
class EngineShape:
    """Everything that determines the compiled executables: model, limits, platform, placement."""

    model: Model
    limits: Limits
    platform: str = field(default_factory=current_platform)
    pins: Pins = Pins()
    placement: Placement = field(default_factory=default_placement)
    drafter: Drafter | None = None
    # functions that every step applies: executables with some must not be saved for other engines
    edits: StepEdits | None = None

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The wire layout of a bucket's batch."""
        return BatchLayout.of(bucket, self.limits, self.num_peers)

    @cached_property  # used for each trace
    def params(self) -> Params:
        """The abstract weights."""
        abstract, arrays = self.placement.abstract, self.model.arrays
        return nested({path: abstract(a.shape, a.dtype, a.axes) for path, a in arrays.items()})

    def state(self) -> State:
        """The abstract layer state: the page pool, and the entries of slots and snapshots."""
        limits = self.limits
        sizes = (limits.num_pages, limits.page_size, limits.num_state_rows)
        return self.model.state.abstract(*sizes, self.placement)

    def slots(self) -> SlotState:
        """The abstract slot state, which is replicated on every device."""
        made = jax.eval_shape(self._zero_slots)
        return jax.tree.map(lambda a: self.placement.abstract(a.shape, a.dtype), made)

    def _zero_slots(self) -> SlotState:
        config, limits = self.model.config, self.limits
        drawn_from = jax.ShapeDtypeStruct((config.hidden_size,), config.dtype)
        if limits.pooling:
            drawn_from = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
        elif self.keeps_logits:
            drawn_from = jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)
        sizes = (limits.max_num_seqs, limits.max_model_len)
        if (own := self.drafter) is None:
            return init_slots(*sizes, drawn_from)
        return init_slots(*sizes, drawn_from, num_drafts=own.count, drafter=own.state)

    @property
    def keeps_logits(self) -> bool:
        """True if slots keep the logits that a token was drawn from, or else its hidden state.

        With logits, extras need not compute them again. On a CPU 16 rows are small, and the head's
        matmul takes half as long as a step of SmolLM2-135M. On a GPU 512 rows of Qwen3-4B are
        311 MB, and the head's matmul takes 0.26 ms (H100).
        """
        return self.platform == "cpu"

    @property
    def draws_once(self) -> bool:
        """True if draws with extras do only what is needed: ``ExtrasFunction.draws_once``."""
        return self.platform == "cpu"

    @property
    def reads_masks(self) -> bool:
        """True if steps wait for masks on the mask board; else rows with masks are drawn again.

        Of several GPUs or hosts only one could read the board. Of several CPU devices, steps that
        wait could take all threads of XLA, and then the calls after them cannot be launched, before
        which no mask is written. So several devices draw again.
        """
        if self.placement.num_devices > 1:
            return False
        return self.drafter is None and reads_board(self.platform, self.pins.of("mask"))

    @property
    def num_peers(self) -> int:
        """The devices that add their partial results in memory of their own, or 0.

        Logits are gathered there, too. Then a decode step has no collective of XLA, so each device
        runs it as one CUDA graph, and their host threads do not wait for each other. Two H200s,
        Qwen3-4B at one row: the host needed 4.0 ms for a step with 73 of NCCL's, and 0.8 ms for a
        step of one device. Another host's memory cannot be reached.
        """
        count, on_gpu = self.placement.num_devices, self.platform == "gpu"
        several = on_gpu and count > 1 and self.placement.num_hosts == 1
        return count if several and self.pins.of("all_reduce") != "xla" else 0

    @cached_property
    def mask_words(self) -> int:
        """W: the uint32 words of a mask of the vocabulary."""
        return cdiv(self.model.config.vocab_size, BITS)
