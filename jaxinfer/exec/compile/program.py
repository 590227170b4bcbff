"""Names and traces every executable of an engine: the steps of the buckets, and a few small others.

It needs shapes only, no weights and no device memory.
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
from jaxinfer.models.params import nested
from jaxinfer.nn.placement import Placement, default_placement
from jaxinfer.nn.state import State
from pallas_kernels.pins import LINKS, Pins
from pallas_kernels.registry import UnfitKernel, current_platform

ADMIT = "admit"
COPY = "copy"  # copies layer state between slots and snapshots
EXTRAS = "extras"  # prefix of executables that draw with extras; the number of rows follows
SCORE = "score"  # prefix of executables that score prompts; the number of tokens follows
POOL = "pool"  # prefix of executables that pool; the number of tokens follows
FIRST = "_first"  # suffix of the first executable of a split step
ROWS_PER_ADMIT = 8  # slots that a call of ``ADMIT`` fills on a GPU
ROWS_PER_COPY = 4  # for ``COPY`` on a GPU; padding is copied too, and a row may be tens of MB
# Up to this many decode rows, let XLA autotune matmuls (Triton or cuBLAS). The head's matmul is
# then bound by memory, and Triton's reaches that bound (Qwen3-4B, H200, 8 rows: 176 us). For larger
# steps cuBLAS's default is as fast as the autotuned choice (4,096 tokens: 57.5 ms, autotuned 58.0;
# 16,384 tokens: 331 ms and 332), and autotuning took half of XLA's time in a first start.
AUTOTUNED_ROWS = 32
ONLY_CUBLAS = MappingProxyType({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})
# The memory plan nearly fills a GPU. XLA's allocator over virtual memory reports no limit, so XLA
# assumes 80 % of the card, and would recompute values to stay below.
NO_REMATERIALIZATION = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
# From this many tokens on, kernels are launched without a CUDA graph, as the host launches them
# much faster than the device runs them. A graph would not start sooner, and needs host memory.
NO_GRAPH_TOKENS = 1024
MIN_EXTRAS_ROWS = 8  # rows of a GPU's smallest executable that draws with extras; a CPU's has 1
# The first executable of a split prompt step has 1/4 of the layers (``forward``), which keep the
# device busy while the host launches the others. Qwen3-4B, H200, 512 tokens: 7.7 ms (a sixth of
# the layers: 7.9, not split: 8.3).
FIRST_PART_DIVISOR = 4
# Prompt steps of more tokens are not split: with 4,096 the gain is 1 %, and each further executable
# makes a first start longer.
MAX_SPLIT_TOKENS = 2048


@dataclass(frozen=True)
class Program:
    """Everything that determines the compiled executables: model, limits, platform, placement.

    Each bucket has one step, which serves every request. Extras are computed by a few small
    executables after the step (``exec.step.extras``), so only the number of a request's tokens
    determines its bucket.
    """

    model: Model
    limits: Limits
    platform: str = field(default_factory=current_platform)
    pins: Pins = Pins()
    placement: Placement = field(default_factory=default_placement)
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        """Check that the limits fit the model's groups of layers and the drafter's tokens."""
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
        """The wire layout of a bucket's batch."""
        return BatchLayout.of(bucket, self.limits)

    def params(self) -> Params:
        """The abstract weights."""
        return self._params

    @cached_property  # used for each trace
    def _params(self) -> Params:
        abstract, arrays = self.placement.abstract, self.model.arrays
        return nested({path: abstract(a.shape, a.dtype, a.axes) for path, a in arrays.items()})

    def state(self) -> State:
        """The abstract layer state: the page pool, and the entries of slots and snapshots."""
        limits = self.limits
        sizes = (limits.num_pages, limits.page_size, limits.num_state_rows)
        return self.model.state.abstract(*sizes, self.placement)

    def slots(self) -> SlotState:
        """The abstract slot state, which is replicated on every device."""
        made = jax.eval_shape(self.zero_slots)
        return jax.tree.map(lambda a: self.placement.abstract(a.shape, a.dtype), made)

    def zero_slots(self) -> SlotState:
        """The initial slot state."""
        limits, drawn_from = self.limits, drawn_from_of(self.model, self.platform)
        sizes = (limits.max_num_seqs, limits.max_model_len)
        return init_slots(*sizes, drawn_from, has_drafts=self.drafter is not None)

    @property
    def keeps_logits(self) -> bool:
        """True if slots keep the logits that a token was drawn from, or else its hidden state."""
        return keeps_logits(self.platform)

    @cached_property  # used for each step
    def extras_rows(self) -> tuple[int, ...]:
        """The numbers of rows of the executables that draw with extras, ascending."""
        return extras_rows_of(self.platform, self.limits.max_num_seqs)

    def extras(self, rows: int) -> ExtrasFunction:
        """The function that draws ``rows`` rows with extras."""
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
                self.rows_per_admit, self.limits.max_num_seqs, self.limits.max_model_len
            )
            return jax.jit(admit, donate_argnums=0).trace(self.slots(), rows)
        if name == COPY:
            state, pairs = self.state(), jax.ShapeDtypeStruct((2, self.rows_per_copy), jnp.int32)
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
        step, is_first = self._step_of(name)
        if not self.is_split(self._steps[step]):
            return self._trace_step(step)
        return self._trace_part(step, is_first=is_first)

    def _trace_part(self, step: str, *, is_first: bool) -> jax.stages.Traced:
        function = self._function(step)
        weights, arrays = flat_params(self.model, self.params()), self.state()
        rest = (self.slots(), function.layout.abstract())
        (first, first_rest), (second, second_rest) = (
            (tuple(weights[i] for i in own.weights), tuple(arrays[i] for i in own.arrays))
            for own in self.parts
        )
        first_part = partial(function.first_part, num_first=self.num_first_layers)
        if is_first:
            return jax.jit(first_part, donate_argnums=1).trace(first, first_rest, *rest)
        _, stream = jax.eval_shape(first_part, first, first_rest, *rest)
        second_part = partial(function.second_part, num_first=self.num_first_layers)
        arguments = (second, second_rest, *rest, stream)
        return jax.jit(second_part, donate_argnums=(1, 2)).trace(*arguments)

    def _trace_step(self, name: str) -> jax.stages.Traced:
        function = self._function(name)
        weights = flat_params(self.model, self.params())
        arguments = (weights, self.state(), self.slots(), function.layout.abstract())
        return jax.jit(function.flat_step, donate_argnums=(1, 2)).trace(*arguments)

    def _function(self, name: str) -> StepFunction:
        """The function of a bucket's step, by the step's name."""
        layout, copies_batch = self.layout(self._steps[name]), self.platform != "cpu"
        return StepFunction(
            self.model,
            layout,
            self.keeps_logits,
            self.pins,
            copies_batch=copies_batch,
            drafter=self.drafter,
        )

    def compiler_options(self, name: str) -> dict[str, Any]:
        """XLA's compiler options for one executable, by name."""
        if self.platform == "cpu":
            return {}
        step, _ = self._step_of(name)
        bucket = self._steps.get(step, Bucket(_head_rows(name)))
        options: dict[str, Any] = dict(NO_REMATERIALIZATION)
        decodes_few = bucket.num_seqs <= AUTOTUNED_ROWS and not bucket.num_prefills
        # XLA does not use cuBLAS for a matrix and one vector: without Triton it multiplies in
        # float32, with a copy of the head (Qwen3-4B on an H200: 1.6 GB of workspace).
        if not decodes_few and bucket.num_seqs > 1:
            options |= ONLY_CUBLAS
        # A graph is recorded again when its memory has moved, and that of rare calls always has.
        if bucket.num_tokens >= NO_GRAPH_TOKENS or step not in self._steps:
            options["xla_gpu_enable_command_buffer"] = ""  # none of the kinds of kernels
        return options

    def links_kernels(self, name: str) -> bool:
        """True if neighbouring kernels of an executable become one linked call.

        Each of them may then start early (``pallas_kernels.pdl``). This is done in steps that only
        decode, as their kernels are short.
        """
        step = self._steps.get(name)
        decodes = step is not None and step.num_prefills == 0 and step.query_tokens == 1
        return decodes and self.platform != "cpu" and self.pins.of(LINKS) is None

    def is_split(self, bucket: Bucket) -> bool:
        """True if the step of a bucket is split into two executables.

        On a GPU, steps with only prompts are: often no other step runs while the host launches
        them. Buckets that score are not, as they are rarely used.
        """
        only_prompts = 0 < bucket.num_prefill_tokens <= MAX_SPLIT_TOKENS and not (
            bucket.num_decodes or bucket.scores
        )
        return self.platform != "cpu" and only_prompts and self.num_first_layers > 0

    @property
    def num_first_layers(self) -> int:
        """The number of layers in the first executable of a split step."""
        return self.model.config.num_hidden_layers // FIRST_PART_DIVISOR

    @cached_property
    def parts(self) -> tuple[Part, Part]:
        """The arguments of the two executables of a split step."""
        return parts_of(self.model, self.num_first_layers)

    def stream_bytes(self, name: str, compiled: jax.stages.Compiled) -> int:
        """Bytes of the residual stream that a split step's second executable gets; 0 for others."""
        step, is_first = self._step_of(name)
        if is_first or step not in self._steps or not self.is_split(self._steps[step]):
            return 0
        *_, stream = compiled.args_info[0]
        return sum(prod(one.shape) * one.dtype.itemsize for one in jax.tree.leaves(stream))

    def first_name(self, bucket: Bucket) -> str:
        """The name of the first executable of a split step."""
        return bucket.name + FIRST

    def names(self) -> tuple[str, ...]:
        """The names of all executables that requests can need."""
        steps: list[str] = []
        for bucket in self.limits.buckets:
            if self.is_split(bucket):
                steps.append(self.first_name(bucket))
            steps.append(bucket.name)
        extras = [extras_name(rows) for rows in self.extras_rows]
        copies = [COPY] if self.limits.num_snapshots else []
        sizes = sorted({b.num_prefill_tokens for b in self.limits.buckets if b.scores})
        scores = [score_name(size) for size in sizes]
        pools = [pool_name(size) for size in sizes] if self.limits.pools else []
        return (ADMIT, *copies, *extras, *scores, *pools, *steps)

    @property
    def rows_per_admit(self) -> int:
        """The number of slots that a call of ``ADMIT`` fills.

        On a GPU it is several, as a launch takes the host longer than the call takes the device.
        """
        return 1 if self.platform == "cpu" else ROWS_PER_ADMIT

    @property
    def rows_per_copy(self) -> int:
        """The number of rows that a call of ``COPY`` copies."""
        return 1 if self.platform == "cpu" else ROWS_PER_COPY

    def _step_of(self, name: str) -> tuple[str, bool]:
        """The step to which an executable belongs, and whether it is the first of a split step."""
        return name.removesuffix(FIRST), name.endswith(FIRST)

    @cached_property
    def _steps(self) -> dict[str, Bucket]:
        """The bucket of each step."""
        return {bucket.name: bucket for bucket in self.limits.buckets}


def keeps_logits(platform: str) -> bool:
    """True if slots keep logits on a platform, so that extras need not compute them again.

    On a CPU they do: 16 rows are small, and the head's matmul takes half as long as a step of
    SmolLM2-135M. On a GPU they do not: 512 rows of Qwen3-4B are 311 MB, and the head's matmul takes
    0.26 ms (H100).
    """
    return platform == "cpu"


def extras_rows_of(platform: str, max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of rows of a platform's executables that draw with extras, ascending."""
    return extras_rows(1 if platform == "cpu" else MIN_EXTRAS_ROWS, max_num_seqs)


def drawn_from_of(model: Model, platform: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of ``SlotState.drawn_from`` for one slot."""
    if keeps_logits(platform):
        return jax.ShapeDtypeStruct((model.config.vocab_size,), jnp.float32)
    return jax.ShapeDtypeStruct((model.config.hidden_size,), model.config.dtype)


def extras_name(rows: int) -> str:
    """The name of the executable that draws ``rows`` rows with extras."""
    return f"{EXTRAS}{rows}"


def score_name(num_tokens: int) -> str:
    """The name of the executable that scores prompts of a step with ``num_tokens`` tokens."""
    return f"{SCORE}{num_tokens}"


def pool_name(num_tokens: int) -> str:
    """The name of the executable that pools hidden states of a step with ``num_tokens`` tokens."""
    return f"{POOL}{num_tokens}"


def _count(name: str, kind: str) -> int | None:
    """The number at the end of the name of an executable of a kind; None for another kind."""
    number = name.removeprefix(kind)
    return int(number) if name.startswith(kind) and number.isdigit() else None


def _head_rows(name: str) -> int:
    """The rows of the head's matmul in an executable that is not a step."""
    return _count(name, EXTRAS) or _count(name, SCORE) or 0
