"""What an engine compiles, as shapes: the steps of each bucket, and the small executables beside.

Owns: ``Program``, which names and traces every executable. Needs no weights and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import Bucket
from jaxinfer.exec.step.batch import BatchLayout
from jaxinfer.exec.step.drafts import Drafter
from jaxinfer.exec.step.extras import ExtrasFunction, ScoreFunction, extras_rows, pooled
from jaxinfer.exec.step.forward import Part, StepFunction, flat_params, parts_of
from jaxinfer.exec.step.slots import SlotState, admit, empty_rows, init_slots
from jaxinfer.exec.step.snapshots import copied
from jaxinfer.models.base import Model, Params, head_params
from jaxinfer.models.tree import nested
from jaxinfer.nn.placement import Placement, default_placement
from jaxinfer.nn.state import State
from pallas_kernels.pins import LINKS, Pins
from pallas_kernels.registry import UnfitKernel, current_platform

ADMIT = "admit"
COPY = "copy"  # of layer state between slots and snapshots
EXTRAS = "extras"  # begins the name of one that draws with extras; the number of rows follows
SCORE = "score"  # begins the name of one that scores prompts; the number of tokens follows
POOL = "pool"  # begins the name of one that pools; the number of tokens follows
FIRST = "_first"  # ends the name of an executable that begins a step
ADMITTED_AT_ONCE = 8  # by ``ADMIT`` on a GPU
COPIED_AT_ONCE = 4  # by ``COPY`` on a GPU; padding is copied too, and a row may be tens of MB
# Rows of a step of decoding up to which XLA times products, its own in Triton beside cuBLAS's. The
# last of them is a matrix and few vectors, as fast as memory by Triton (8 rows of Qwen3-4B on an
# H200: 176 us). Elsewhere cuBLAS's first choice is as fast as what is found (4,096 tokens take 57.5
# ms for 58.0, 16,384 331 for 332), and finding it was half of XLA's time in a start from nothing.
TIMED_ROWS = 32
BY_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})
# Weights, pages and workspace are planned to fill a GPU nearly. XLA's allocator over virtual memory
# names no limit, and 80 % of the card is one to XLA: it would compute values twice to keep below.
AS_PLANNED = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
# Tokens from which a step's kernels are launched one by one, as the host is done with that long
# before the device. A CUDA graph of them starts no sooner, and is memory of the host.
NO_GRAPH_FROM = 1024
FIRST_EXTRAS_ROWS = 8  # of the smallest executable that draws with extras; a CPU's has 1
# A quarter of the layers begin a prompt's step, in an executable of their own (``forward``): they
# take the device as long as the host needs for the others. 512 tokens of Qwen3-4B on an H200 take
# 7.7 ms, 7.9 with a sixth, and 8.3 in one executable.
LAYERS_FOR_ONE_BEGUN = 4
# Tokens beyond which a prompt's step is one executable: with 4,096 two gain 1 %, and a first start
# makes one more.
MOST_TOKENS_IN_TWO = 2048


@dataclass(frozen=True)
class Program:
    """The model and the limits that fix every compiled shape, for a platform of jax and the
    devices that its arrays lie on.

    Each bucket has one step, which serves every request. What requests ask for beside a token is
    the business of a few small executables behind the step (``exec.step.extras``), so that
    nothing about a request but its tokens decides in which step it runs.
    """

    model: Model
    limits: Limits
    platform: str = field(default_factory=current_platform)
    pins: Pins = Pins()
    placement: Placement = field(default_factory=default_placement)
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        """The scheduler must plan pages for the model's own groups of layers, and rows that hold
        what the drafter proposes.
        """
        own, planned = self.model.state.windows, self.limits.windows
        assert own == planned, f"limits are for windows {planned}, the model has {own}"
        query_tokens = 1 if self.drafter is None else 1 + self.drafter.count
        assert self.limits.query_tokens == query_tokens, "the drafter fills the decode rows"
        if self.drafter is not None and self.model.state.bytes_per_slot:
            raise ConfigError(
                "this model keeps a state for each sequence, which a refused draft would have "
                "changed; serve it without drafts"
            )
        has_state = bool(self.model.state.bytes_per_slot)
        snapshots = self.limits.num_snapshots > 0
        assert has_state or not snapshots, "snapshots of a model without state for each sequence"
        reuses = self.limits.enable_prefix_caching
        assert snapshots or not (has_state and reuses), "prefix caching needs snapshots of state"

    def layout(self, bucket: Bucket) -> BatchLayout:
        """Wire layout of a bucket's batch."""
        return BatchLayout.of(bucket, self.limits)

    def params(self) -> Params:
        """Weights."""
        return self._params

    @cached_property  # each step asks
    def _params(self) -> Params:
        abstract, arrays = self.placement.abstract, self.model.arrays
        return nested({path: abstract(a.shape, a.dtype, a.axes) for path, a in arrays.items()})

    def state(self) -> State:
        """The layers' state: the page pool, and the entries of slots and snapshots."""
        limits = self.limits
        sizes = (limits.num_pages, limits.page_size, limits.num_state_rows)
        return self.model.state.abstract(*sizes, self.placement)

    def slots(self) -> SlotState:
        """The slot state, of which every device has all."""
        made = jax.eval_shape(self.zero_slots)
        return jax.tree.map(lambda a: self.placement.abstract(a.shape, a.dtype), made)

    def zero_slots(self) -> SlotState:
        """The slot state as it is at first."""
        limits, drawn_from = self.limits, drawn_from_of(self.model, self.platform)
        sizes = (limits.max_num_seqs, limits.max_model_len)
        return init_slots(*sizes, drawn_from, has_drafts=self.drafter is not None)

    @property
    def keeps_logits(self) -> bool:
        """Whether slots keep the logits that a token was drawn from, or its hidden state."""
        return keeps_logits(self.platform)

    @cached_property  # each step asks
    def extras_rows(self) -> tuple[int, ...]:
        """Rows of each executable that draws with extras, the smallest first."""
        return extras_rows_of(self.platform, self.limits.max_num_seqs)

    def extras(self, rows: int) -> ExtrasFunction:
        """What draws so many rows with extras."""
        return ExtrasFunction(self.model, rows, self.keeps_logits, self.pins)

    def trace(self, name: str) -> jax.stages.Traced:
        """Trace one executable, by name; raises ``ConfigError`` for a kernel that cannot run."""
        try:
            return self._trace(name)
        except UnfitKernel as error:
            raise ConfigError(f"{name} cannot be compiled: {error}") from error

    def _trace(self, name: str) -> jax.stages.Traced:
        if name == ADMIT:
            rows = empty_rows(
                self.admitted_at_once, self.limits.max_num_seqs, self.limits.max_model_len
            )
            return jax.jit(admit, donate_argnums=0).trace(self.slots(), rows)
        if name == COPY:
            state, pairs = self.state(), jax.ShapeDtypeStruct((2, self.copied_at_once), jnp.int32)
            arrays = tuple(state[i] for i in self.model.state.slot_arrays)
            return jax.jit(copied, donate_argnums=0).trace(arrays, pairs)
        head = head_params(self.params())
        if (count := _count(name, EXTRAS)) is not None:
            draw = self.extras(count)
            return jax.jit(draw, donate_argnums=1).trace(head, self.slots(), draw.abstract())
        if (count := _count(name, SCORE)) is not None:
            config = self.model.config
            hidden = jax.ShapeDtypeStruct((count, config.hidden_size), config.dtype)
            targets = jax.ShapeDtypeStruct((count,), jnp.int32)
            return jax.jit(ScoreFunction(self.model)).trace(head, hidden, targets)
        if (count := _count(name, POOL)) is not None:
            config = self.model.config
            hidden = jax.ShapeDtypeStruct((count, config.hidden_size), config.dtype)
            tokens = jax.ShapeDtypeStruct((self.limits.max_num_seqs,), jnp.int32)
            return jax.jit(pooled).trace(hidden, tokens)
        step, begins = self._step_of(name)
        if not self.begins_apart(self._steps[step]):
            return self._trace_step(step)
        return self._trace_part(step, begins=begins)

    def _trace_part(self, step: str, *, begins: bool) -> jax.stages.Traced:
        function = self._function(step)
        weights, arrays = flat_params(self.model, self.params()), self.state()
        rest = (self.slots(), function.layout.abstract())
        (first, first_rest), (second, second_rest) = (
            (tuple(weights[i] for i in own.weights), tuple(arrays[i] for i in own.arrays))
            for own in self.parts
        )
        first_part = partial(function.first_part, num_first=self.first_layers)
        if begins:
            return jax.jit(first_part, donate_argnums=1).trace(first, first_rest, *rest)
        _, stream = jax.eval_shape(first_part, first, first_rest, *rest)
        second_part = partial(function.second_part, num_first=self.first_layers)
        arguments = (second, second_rest, *rest, stream)
        return jax.jit(second_part, donate_argnums=(1, 2)).trace(*arguments)

    def _trace_step(self, name: str) -> jax.stages.Traced:
        function = self._function(name)
        weights = flat_params(self.model, self.params())
        arguments = (weights, self.state(), self.slots(), function.layout.abstract())
        return jax.jit(function.flat_step, donate_argnums=(1, 2)).trace(*arguments)

    def _function(self, name: str) -> StepFunction:
        """The step of a bucket, by name."""
        layout, copies_in = self.layout(self._steps[name]), self.platform != "cpu"
        return StepFunction(
            self.model,
            layout,
            self.keeps_logits,
            self.pins,
            copies_in=copies_in,
            drafter=self.drafter,
        )

    def compiler_options(self, name: str) -> dict[str, Any]:
        """XLA's options for one executable, by name."""
        if self.platform == "cpu":
            return {}
        step, _ = self._step_of(name)
        bucket = self._steps.get(step, Bucket(_rows_of(name)))
        options: dict[str, Any] = dict(AS_PLANNED)
        decodes_few = bucket.num_seqs <= TIMED_ROWS and not bucket.num_prefills
        # cuBLAS is not asked for a matrix and one vector: without Triton XLA multiplies in float32,
        # with a copy of the head (Qwen3-4B on an H200: 1.6 GB of workspace).
        if not decodes_few and bucket.num_seqs > 1:
            options |= BY_CUBLAS
        # A graph is recorded anew when memory has moved, which that of rare calls always has.
        if bucket.num_tokens >= NO_GRAPH_FROM or step not in self._steps:
            options["xla_gpu_enable_command_buffer"] = ""  # none of the kinds of kernels
        return options

    def links_kernels(self, name: str) -> bool:
        """Whether neighbouring kernels of an executable are to become one call, so that each may
        begin early (``pallas_kernels.pdl``): in steps that only decode, whose kernels are short.
        """
        step = self._steps.get(name)
        decodes = step is not None and step.num_prefills == 0 and step.query_tokens == 1
        return decodes and self.platform != "cpu" and self.pins.of(LINKS) is None

    def begins_apart(self, bucket: Bucket) -> bool:
        """Whether a GPU's step is two executables: those of prompts alone, as nothing runs before
        them that the host could prepare them behind. One that scores is as rare as what it is for.
        """
        prompts_alone = 0 < bucket.num_prefill_tokens <= MOST_TOKENS_IN_TWO and not (
            bucket.num_decodes or bucket.scores
        )
        return self.platform != "cpu" and prompts_alone and self.first_layers > 0

    @property
    def first_layers(self) -> int:
        """Layers that the first executable of such a step computes."""
        return self.model.config.num_hidden_layers // LAYERS_FOR_ONE_BEGUN

    @cached_property
    def parts(self) -> tuple[Part, Part]:
        """What the two executables of such a step are given."""
        return parts_of(self.model, self.first_layers)

    def carried_bytes(self, name: str, compiled: jax.stages.Compiled) -> int:
        """What an executable that ends such a step is given of the first; 0 of others."""
        step, begins = self._step_of(name)
        if begins or step not in self._steps or not self.begins_apart(self._steps[step]):
            return 0
        *_, carried = compiled.args_info[0]
        return sum(prod(one.shape) * one.dtype.itemsize for one in jax.tree.leaves(carried))

    def first_name(self, bucket: Bucket) -> str:
        """Of a step that ``begins_apart``, the executable that begins it."""
        return bucket.name + FIRST

    def names(self) -> tuple[str, ...]:
        """Every executable: all that requests can ever need."""
        steps: list[str] = []
        for bucket in self.limits.buckets:
            if self.begins_apart(bucket):
                steps.append(self.first_name(bucket))
            steps.append(bucket.name)
        extras = [extras_name(rows) for rows in self.extras_rows]
        copies = [COPY] if self.limits.num_snapshots else []
        sizes = sorted({b.num_prefill_tokens for b in self.limits.buckets if b.scores})
        scores = [score_name(size) for size in sizes]
        pools = [pool_name(size) for size in sizes] if self.limits.pools else []
        return (ADMIT, *copies, *extras, *scores, *pools, *steps)

    @property
    def admitted_at_once(self) -> int:
        """Slots that a call of ``ADMIT`` fills: several where each call has to be launched on a
        device, which takes the host longer than the device.
        """
        return 1 if self.platform == "cpu" else ADMITTED_AT_ONCE

    @property
    def copied_at_once(self) -> int:
        """Rows that a call of ``COPY`` copies."""
        return 1 if self.platform == "cpu" else COPIED_AT_ONCE

    def _step_of(self, name: str) -> tuple[str, bool]:
        """The step that an executable belongs to, and whether it begins it."""
        return name.removesuffix(FIRST), name.endswith(FIRST)

    @cached_property
    def _steps(self) -> dict[str, Bucket]:
        """Bucket of each step."""
        return {bucket.name: bucket for bucket in self.limits.buckets}


def keeps_logits(platform: str) -> bool:
    """Whether slots keep logits on a platform: on a CPU, where 16 rows of them are few, and to
    multiply by the head again takes half as long as a step of SmolLM2-135M. On a GPU 512 rows of
    Qwen3-4B are 311 MB, and the head takes an H100 0.26 ms.
    """
    return platform == "cpu"


def extras_rows_of(platform: str, max_num_seqs: int) -> tuple[int, ...]:
    """Rows of each executable that draws with extras on a platform, the smallest first."""
    return extras_rows(1 if platform == "cpu" else FIRST_EXTRAS_ROWS, max_num_seqs)


def drawn_from_of(model: Model, platform: str) -> jax.ShapeDtypeStruct:
    """``SlotState.drawn_from`` of one slot."""
    if keeps_logits(platform):
        return jax.ShapeDtypeStruct((model.config.vocab_size,), jnp.float32)
    return jax.ShapeDtypeStruct((model.config.hidden_size,), model.config.dtype)


def extras_name(rows: int) -> str:
    """The executable that draws so many rows with extras."""
    return f"{EXTRAS}{rows}"


def score_name(num_tokens: int) -> str:
    """The executable that scores the prompts of a step of so many tokens."""
    return f"{SCORE}{num_tokens}"


def pool_name(num_tokens: int) -> str:
    """The executable that pools hidden states of a step of so many tokens."""
    return f"{POOL}{num_tokens}"


def _count(name: str, kind: str) -> int | None:
    """The number that ends the name of an executable of a kind; None of another kind."""
    number = name.removeprefix(kind)
    return int(number) if name.startswith(kind) and number.isdigit() else None


def _rows_of(name: str) -> int:
    """Rows that an executable which is no step multiplies by the head."""
    return _count(name, EXTRAS) or _count(name, SCORE) or 0
