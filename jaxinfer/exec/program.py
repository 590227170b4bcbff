"""What an engine compiles, as shapes: the steps of each bucket, and the admissions to slots.

Owns: ``Program``, which names and traces every executable. Needs no weights and no memory.
Must not know: how executables are compiled, stored or run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import Bucket
from jaxinfer.exec.batch import BatchLayout
from jaxinfer.exec.cut import CutStep, WeightsOfParts, cut_step
from jaxinfer.exec.forward import StepFunction, flat_kv_state, flat_params, weights_of_parts
from jaxinfer.exec.slots import SlotState, admit, empty_rows, init_slots
from jaxinfer.models.base import Model, Params, abstract_params
from jaxinfer.nn.kv import KVState, abstract_kv_state
from pallas_kernels.pins import LINKS, Pins
from pallas_kernels.registry import UnfitKernel, current_platform

ADMIT = "admit"
FIRST = "_first"  # ends the name of an executable that begins a step
ADMITTED_AT_ONCE = 8  # by ``ADMIT`` on a GPU
ADMITTED_BY_STEP = 1  # with extras, beside the prompts it computes: who is admitted is among these
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
EXTRAS_EVERY = 3  # buckets of a kind there is one with a step for extras
# A quarter of the layers begin a prompt's step, in an executable of their own (``exec.cut``): they
# take the device as long as the host needs for the others. 512 tokens of Qwen3-4B on an H200 take
# 7.7 ms, 7.9 with a sixth, and 8.3 in one executable.
LAYERS_FOR_ONE_BEGUN = 4


@dataclass(frozen=True)
class Program:
    """The model and the limits that fix every compiled shape, for a platform of jax.

    On a CPU a branch costs nothing, and one step a bucket serves every request. On a GPU the host
    waits in the middle of a step for each branch's condition, and so cannot plan the next step
    meanwhile. There each bucket has a plain step without any branch, and some have one with all
    extras behind branches, for steps in which a request asks for some. The largest have one, as
    only what is named here is ever compiled: before the first request, or, what no first token
    needs, beside the running engine (``names_later``). (Making all extras unconditional instead
    would cost a plain step of 256 rows several times 155 MB of logits; handing logits to a second
    executable would keep them alive between two calls, and a prompt's logprobs need its hidden
    states too.)
    """

    model: Model
    limits: Limits
    platform: str = field(default_factory=current_platform)
    pins: Pins = Pins()

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

    def trace(self, name: str) -> jax.stages.Traced:
        """Trace one executable, by name; raises ``ConfigError`` for a kernel that cannot run."""
        try:
            return self._trace(name)
        except UnfitKernel as error:
            raise ConfigError(f"{name} cannot be compiled: {error}") from error

    def _trace(self, name: str) -> jax.stages.Traced:
        if name == ADMIT:
            rows = self.no_admissions(self.admitted_at_once)
            return jax.jit(admit, donate_argnums=0).trace(self.slots(), rows)
        step, begins = self._step_of(name)
        if not self.begins_apart(*self._steps()[step]):
            return self._trace_step(step)
        cut = self._cut.pop(step, None)
        if cut is None:
            traced = self._trace_step(step)
            cut = self._cut[step] = cut_step(traced, 2 * self.first_layers, self.weights_of_parts)
        return self._trace_part(step, cut, begins=begins)

    def _trace_part(self, step: str, cut: CutStep, *, begins: bool) -> jax.stages.Traced:
        weights, pages = flat_params(self.model, self.params()), flat_kv_state(self.kv_state())
        of_first, of_second = ([weights[i] for i in own] for own in self.weights_of_parts)
        first, others = pages[: 2 * self.first_layers], pages[2 * self.first_layers :]
        rest = (self.slots(), self.layout(self._steps()[step][0]).abstract())
        if begins:
            return jax.jit(cut.first, donate_argnums=1).trace(tuple(of_first), first, *rest)
        arguments = (tuple(of_second), first, others, *rest, cut.carried)
        return jax.jit(cut.second, donate_argnums=(2, 3)).trace(*arguments)

    def _trace_step(self, name: str) -> jax.stages.Traced:
        bucket, extras = self._steps()[name]
        layout = self.layout(bucket)
        step = StepFunction(
            self.model,
            layout,
            self.limits.page_size,
            extras,
            self.pins,
            copies_in=self.platform != "cpu",
        )
        weights, pages = flat_params(self.model, self.params()), flat_kv_state(self.kv_state())
        arguments = (weights, pages, self.slots(), layout.abstract())
        if self.admits(bucket, extras=extras):
            arguments += (self.no_admissions(ADMITTED_BY_STEP),)
        return jax.jit(step.flat_step, donate_argnums=(1, 2)).trace(*arguments)

    def compiler_options(self, name: str) -> dict[str, Any]:
        """XLA's options for one executable, by name."""
        if self.platform == "cpu":
            return {}
        no_product = (Bucket(0), False)  # as admissions have none
        bucket, extras = self._steps().get(self._step_of(name)[0], no_product)
        options: dict[str, Any] = dict(AS_PLANNED)
        decodes_few = bucket.num_seqs <= TIMED_ROWS and not (bucket.num_prefills or extras)
        # cuBLAS is not asked for a matrix and one vector: without Triton XLA multiplies in float32,
        # with a copy of the head (Qwen3-4B on an H200: 1.6 GB of workspace).
        if not decodes_few and bucket.num_seqs > 1:
            options |= BY_CUBLAS
        if bucket.num_tokens >= NO_GRAPH_FROM:
            options["xla_gpu_enable_command_buffer"] = ""  # none of the kinds of kernels
        return options

    def links_kernels(self, name: str) -> bool:
        """Whether neighbouring kernels of an executable are to become one call, so that each may
        begin early (``pallas_kernels.link``): in steps that only decode, whose kernels are short.
        """
        step = self._steps().get(name)
        decodes = step is not None and step[0].num_prefills == 0
        return decodes and self.platform != "cpu" and self.pins.of(LINKS) is None

    @property
    def has_plain_steps(self) -> bool:
        """Whether buckets have a step of their own for when no request asks for extras."""
        return self.platform != "cpu"

    def bucket_of(self, bucket: Bucket, *, extras: bool) -> Bucket:
        """The bucket that a step planned for ``bucket`` runs in: the same, or the smallest that
        holds it among those that have a step with extras.
        """
        if not extras:
            return bucket
        shape = (bucket.num_decodes, bucket.num_prefill_tokens, bucket.num_prefills)
        return min((b for b in self._with_extras if b.fits(*shape)), key=lambda b: b.num_tokens)

    def step_name(self, bucket: Bucket, *, extras: bool) -> str:
        """The step of a bucket with extras in it, or without."""
        return f"{bucket.name}_extras" if extras and self.has_plain_steps else bucket.name

    def begins_apart(self, bucket: Bucket, extras: bool) -> bool:
        """Whether a step is two executables: those of prompts alone, as nothing runs before them
        that the host could prepare them behind.
        """
        prompts_alone = bucket.num_prefills > 0 and not (bucket.num_decodes or extras)
        return self.has_plain_steps and prompts_alone and self.first_layers > 0

    @property
    def first_layers(self) -> int:
        """Layers that the first executable of such a step computes."""
        return len(self.model.kv_spec.layers) // LAYERS_FOR_ONE_BEGUN

    @cached_property
    def weights_of_parts(self) -> WeightsOfParts:
        """Weights that the two executables of such a step are given."""
        return weights_of_parts(self.model, self.first_layers)

    def carried_bytes(self, name: str, compiled: jax.stages.Compiled) -> int:
        """What an executable that ends such a step is given of the first; 0 of others."""
        step, begins = self._step_of(name)
        if begins or step not in self._steps() or not self.begins_apart(*self._steps()[step]):
            return 0
        *_, carried = compiled.args_info[0]
        return sum(prod(one.shape) * one.dtype.itemsize for one in jax.tree.leaves(carried))

    def first_name(self, bucket: Bucket) -> str:
        """Of a step that ``begins_apart``, the executable that begins it."""
        return bucket.name + FIRST

    def names(self) -> tuple[str, ...]:
        """Every executable: the admission, and the steps of each bucket."""
        return (*self.admissions, *self._names_of(self._steps().values()))

    def names_without_extras(self) -> tuple[str, ...]:
        """What requests that ask for no extras need: nobody is admitted for them."""
        return self._names_of((bucket, False) for bucket in self.limits.buckets)

    def names_of_first_steps(self) -> tuple[str, ...]:
        """What the first requests need of these: in a step with prompts nobody decodes yet."""
        return self._names_of((one, False) for one in self.limits.buckets if not one.is_mixed)

    def names_at_start(self) -> tuple[str, ...]:
        """What an engine needs before it is ready, extras included where all steps have them."""
        admissions = () if self.has_plain_steps else self.admissions
        return (*admissions, *self.names_of_first_steps())

    def names_later(self) -> tuple[str, ...]:
        """What is left: steps in which rows decode beside prompts, and what only extras need."""
        first = set(self.names_at_start())
        return tuple(name for name in self.names() if name not in first)

    def admits(self, bucket: Bucket, *, extras: bool) -> bool:
        """Whether a step of a bucket takes rows to admit, as those with extras do. Where there are
        admissions, there are prompts.
        """
        return bucket.num_prefills > 0 and (extras or not self.has_plain_steps)

    @property
    def admissions(self) -> tuple[str, ...]:
        """``ADMIT``, unless steps admit all that there may be."""
        return (ADMIT,) if self.limits.max_num_seqs > ADMITTED_BY_STEP else ()

    @property
    def admitted_at_once(self) -> int:
        """Slots that a call of ``ADMIT`` fills: several where each call has to be launched on a
        device, which takes the host longer than the device.
        """
        return 1 if self.platform == "cpu" else ADMITTED_AT_ONCE

    def no_admissions(self, count: int) -> np.ndarray:  # int32[A, ...]: see ``slots.RowSections``
        """Rows that admit nobody."""
        return empty_rows(count, self.limits.max_num_seqs, self.limits.max_model_len)

    def _names_of(self, steps: Iterable[tuple[Bucket, bool]]) -> tuple[str, ...]:
        """The executables of these steps: of a bucket, with extras or without."""
        names: list[str] = []
        for bucket, extras in steps:
            if self.begins_apart(bucket, extras):
                names.append(self.first_name(bucket))
            names.append(self.step_name(bucket, extras=extras))
        return tuple(names)

    def _step_of(self, name: str) -> tuple[str, bool]:
        """The step that an executable belongs to, and whether it begins it."""
        return name.removesuffix(FIRST), name.endswith(FIRST)

    @cached_property
    def _cut(self) -> dict[str, CutStep]:
        """Steps of which one part is traced: the other, which is next, needs no second trace."""
        return {}

    def _steps(self) -> dict[str, tuple[Bucket, bool]]:
        """Bucket of each step, and whether extras are in it."""
        plain = self.limits.buckets if self.has_plain_steps else ()
        steps = [(bucket, False) for bucket in plain]
        steps += [(bucket, True) for bucket in self._with_extras]
        return {self.step_name(bucket, extras=extras): (bucket, extras) for bucket, extras in steps}

    @cached_property
    def _with_extras(self) -> tuple[Bucket, ...]:
        """Buckets that have a step with extras: where that is a step of its own, only every third
        of each kind, the largest among them. Such steps are rare, and seconds to compile.
        """
        buckets = self.limits.buckets
        if not self.has_plain_steps:
            return buckets
        kinds: dict[tuple[bool, bool], list[Bucket]] = {}
        for bucket in sorted(buckets, key=lambda b: b.num_tokens):
            kinds.setdefault((bucket.num_decodes > 0, bucket.num_prefills > 0), []).append(bucket)
        chosen = {bucket for kind in kinds.values() for bucket in kind[::-EXTRAS_EVERY]}
        return tuple(bucket for bucket in buckets if bucket in chosen)
