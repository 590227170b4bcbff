"""How many pages fit: the memory plan made before anything is loaded.

Owns: ``MemoryPlan``, the arithmetic, the bound on a step's workspace, claiming it all from JAX's
allocator, and making pages and slots.

The number of pages is part of every compiled shape, so it must be known before any executable is,
and the workspace before the number of pages. Compiling the largest step twice to learn it would
nearly double a start from nothing; a number learnt at one start and used at the next would change
the shapes between the two. So the plan takes a bound computed from the shapes. What executables
really take is in a bundle's manifest, and is checked against the plan once they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.core.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    Limits,
    allocator_share,
)
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket
from jaxinfer.exec.batch import BatchLayout
from jaxinfer.exec.batch_rooms import room_sizes
from jaxinfer.exec.cuda_driver import card_bytes
from jaxinfer.exec.extras import BLOCK
from jaxinfer.exec.program import (
    Program,
    drawn_from_of,
    extras_name,
    extras_rows_of,
    score_name,
)
from jaxinfer.exec.sampling import LOGPROBS_WIDTH
from jaxinfer.exec.slots import SlotState, init_slots
from jaxinfer.models.base import Model, abstract_params
from jaxinfer.nn.state import State
from pallas_kernels.registry import current_platform

MB = 1_000_000
# float32[rows, V] that are alive at once when tokens are drawn, and float32[block, V] when prompts
# are scored; measured on a CPU: 6, with extras 7, and 2
SAMPLING_COPIES = 8
SCORE_COPIES = 4
HISTORY_COPIES = 12  # int32[block, max_model_len], for penalties; measured on a CPU: 10
# of a GPU: executables' code and constants, what steps in flight return (hidden states of 1,024
# tokens among it), and what calls beside steps are handed
RESERVE_BYTES = 256 << 20
MAPPED_BYTES = 2 << 20  # XLA's allocator over virtual memory gives an array whole pages of CUDA's


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory in bytes, and how much of it JAX's allocator may take."""

    total_bytes: int
    allocator_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine takes of its device, in bytes; ``num_pages`` includes the padding page.

    ``workspaces`` bound what each executable, by name, takes beside weights and state.
    ``device`` is None where it reports no memory (a CPU).
    """

    weight_bytes: int
    page_bytes: int
    num_pages: int
    slot_bytes: int
    batch_bytes: int  # what batches are copied to
    workspaces: dict[str, int]
    device: DeviceMemory | None

    @property
    def kv_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_pages * self.page_bytes

    @property
    def workspace_bytes(self) -> int:
        """Of the executable that takes most: only one runs at a time."""
        return max(self.workspaces.values())

    @property
    def total_bytes(self) -> int:
        """All of it."""
        state = self.weight_bytes + self.kv_bytes + self.slot_bytes
        return state + self.batch_bytes + self.workspace_bytes

    def described(self) -> str:
        """Two lines, before anything is taken: all of it, and each executable's workspace."""
        batches = share = ""
        by_name = ", ".join(f"{name} {_shown(most)}" for name, most in self.workspaces.items())
        if self.device is not None:
            batches = f"batches {_shown(self.batch_bytes)}, "
            part = self.total_bytes / self.device.total_bytes
            share = (
                f", {part:.1%} of the device's {_shown(self.device.total_bytes)}, of which JAX may "
                f"take {_shown(self.device.allocator_bytes)}"
            )
        return (
            f"memory: weights {_shown(self.weight_bytes)}, KV cache {_shown(self.kv_bytes)} "
            f"({self.num_pages} pages), slots {_shown(self.slot_bytes)}, {batches}"
            f"workspace up to {_shown(self.workspace_bytes)}: {_shown(self.total_bytes)}{share}\n"
            f"workspace up to, by executable: {by_name}"
        )

    def measured(self, workspace_bytes: int) -> str:
        """One line: the workspace that the executables really need."""
        return f"workspace: {_shown(workspace_bytes)} of {_shown(self.workspace_bytes)} planned"


def plan_memory(
    config: EngineConfig,
    model: Model,
    *,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    buckets: Iterable[Bucket],
    device: DeviceMemory | None,
) -> MemoryPlan:
    """Pages for this model: as many as asked for, else what fits; at most what all slots fill.

    ``device`` is None where it reports no memory (a CPU), which leaves the budget to
    ``kv_cache_memory_bytes``. Raises ``ConfigError`` when the weights, a page for
    each sequence, or a context of ``config.max_model_len`` do not fit; a derived context may
    shrink to the pages instead.
    """
    buckets = tuple(buckets)
    limits = Limits(
        num_pages=0,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(bucket.num_prefill_tokens for bucket in buckets),
        buckets=buckets,
        windows=model.state.windows,
    )
    layouts = (BatchLayout.of(bucket, limits) for bucket in buckets)
    slots, drawn_from = (max_num_seqs, max_model_len), drawn_from_of(model, current_platform())
    fixed = MemoryPlan(
        weight_bytes=_size(abstract_params(model)),
        page_bytes=page_size * model.state.bytes_per_token,
        num_pages=0,
        slot_bytes=_size(jax.eval_shape(lambda: init_slots(*slots, drawn_from)))
        + (max_num_seqs + 1) * model.state.bytes_per_slot,
        batch_bytes=_batch_bytes(layouts, device),
        workspaces=_workspaces(model, buckets, *slots),
        device=device,
    )
    reserve = reserve_bytes(model)
    room = _kv_budget(config, fixed, reserve) // fixed.page_bytes
    if config.num_pages is not None:
        room = config.num_pages
    pages_per_seq = limits.pages_needed(max_model_len)
    num_pages = min(1 + max_num_seqs * pages_per_seq, room)  # every slot with a full context
    derived = config.max_model_len is None or config.num_pages is not None
    groups = len(limits.windows)
    each = "one page" if groups == 1 else f"{groups} pages"
    needed = 1 + groups * max_num_seqs
    what = f"{max_num_seqs} sequences (max_num_seqs) of {each} each"
    if not derived and pages_per_seq >= needed:
        needed, what = 1 + pages_per_seq, f"a context of {max_model_len} tokens"
    if num_pages < needed:
        raise ConfigError(
            f"{what} need {needed} pages of KV cache ({_shown(needed * fixed.page_bytes)}, the "
            f"padding page included) and there is room for {num_pages}; raise num_pages or "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization), or lower max_model_len or "
            "max_num_seqs"
        )
    plan = replace(fixed, num_pages=num_pages)
    if device is not None and plan.total_bytes + reserve > device.allocator_bytes:
        raise ConfigError(
            f"{num_pages} pages of KV cache ({_shown(plan.kv_bytes)}) and what else is needed "
            f"({_shown(fixed.total_bytes)} and a reserve of {_shown(reserve)}) do not fit in "
            f"the {_shown(device.allocator_bytes)} that JAX may take of the device; raise "
            "gpu_memory_utilization, or lower num_pages or kv_cache_memory_bytes"
        )
    return plan


def program_memory(program: Program) -> MemoryPlan:
    """The plan that a program's shapes amount to, on the device that is there."""
    limits = program.limits
    return MemoryPlan(
        weight_bytes=_size(program.params()),
        page_bytes=limits.page_size * program.model.state.bytes_per_token,
        num_pages=limits.num_pages,
        slot_bytes=_size(program.slots())
        + (limits.max_num_seqs + 1) * program.model.state.bytes_per_slot,
        batch_bytes=_batch_bytes(map(program.layout, limits.buckets), device := device_memory()),
        workspaces=_workspaces(
            program.model, limits.buckets, limits.max_num_seqs, limits.max_model_len
        ),
        device=device,
    )


def _batch_bytes(layouts: Iterable[BatchLayout], device: DeviceMemory | None) -> int:
    """Of the rooms that batches are copied to, in whole pages of CUDA's; a CPU has none."""
    if device is None:
        return 0
    rooms = room_sizes(layout.abstract().size for layout in layouts)
    return sum(MAPPED_BYTES * cdiv(room, MAPPED_BYTES) for room in rooms)


def reserve_bytes(model: Model) -> int:
    """Of a GPU, beside what is planned: for what is not, and the end of each array's last page."""
    num_arrays = len(jax.tree.leaves(abstract_params(model))) + len(model.state.arrays)
    return RESERVE_BYTES + MAPPED_BYTES * num_arrays


def _workspaces(
    model: Model, buckets: Collection[Bucket], max_num_seqs: int, max_model_len: int
) -> dict[str, int]:
    """By name of the executable; those that admit take nothing worth counting."""
    bounds = {bucket.name: step_bound(model, bucket) for bucket in buckets}
    for rows in extras_rows_of(current_platform(), max_num_seqs):
        bounds[extras_name(rows)] = extras_bound(model, rows, max_model_len)
    for tokens in sorted({bucket.num_prefill_tokens for bucket in buckets if bucket.scores}):
        bounds[score_name(tokens)] = score_bound(model, tokens)
    return bounds


def step_bound(model: Model, bucket: Bucket) -> int:
    """Bytes that a step of this bucket takes at most beside weights, KV pages and slots.

    Logits of each row, to be sampled. Activations: what goes into and comes out of every matrix of
    one layer, for every token, and the hidden states that a bucket that scores returns. The keys
    and values that XLA's attention gathers on a CPU are left out: no plan depends on them there.
    """
    config = model.config
    logits = 4 * SAMPLING_COPIES * bucket.num_seqs * config.vocab_size
    hidden = config.hidden_size * bucket.num_prefill_tokens if bucket.scores else 0
    activations = _layer_width(model) * bucket.num_tokens + hidden
    return logits + activations * config.dtype.itemsize


def extras_bound(model: Model, rows: int, max_model_len: int) -> int:
    """Bytes that drawing so many rows with extras takes at most."""
    logits = SAMPLING_COPIES * rows * model.config.vocab_size
    return 4 * (logits + HISTORY_COPIES * min(rows, BLOCK) * max_model_len)


def score_bound(model: Model, num_tokens: int) -> int:
    """Bytes that scoring so many prompt tokens takes at most: logits of a block, and results."""
    logits = SCORE_COPIES * min(num_tokens, BLOCK) * model.config.vocab_size
    results = 2 * LOGPROBS_WIDTH * num_tokens
    return 4 * (logits + results) + model.config.hidden_size * num_tokens * 4


def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a call of the executable takes: temporaries, and outputs that are new arrays."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise EngineError(
            f"the {jax.default_backend()} backend does not say what memory an executable takes, "
            "so none can be planned; use a CPU or CUDA device"
        )
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + new


def check_workspace(plan: MemoryPlan, measured: int) -> None:
    """Raise ``ConfigError`` when executables need more of a device than was planned for them."""
    if plan.device is not None and measured > plan.workspace_bytes + RESERVE_BYTES:
        raise ConfigError(
            f"the compiled steps need {_shown(measured)} of workspace and "
            f"{_shown(plan.workspace_bytes)} were planned; set num_pages below {plan.num_pages}, "
            "or lower max_num_batched_tokens"
        )


def device_memory(device: Any = None) -> DeviceMemory | None:  # jax.Device
    """Of a device, else of the first; None where it reports none (a CPU)."""
    device = device or jax.devices()[0]
    if device.platform == "cpu":
        return None
    # XLA's own allocator says its limit, the one over virtual memory nothing, CUDA's 0
    limit: int = (device.memory_stats() or {}).get("bytes_limit", 0)
    card = card_bytes(device.local_hardware_id) or limit
    return DeviceMemory(card, limit or int(card * allocator_share())) if card else None


def claim_memory(plan: MemoryPlan) -> None:
    """Have JAX's allocator take what is planned as one region, before anything lies in it.

    Of an allocator with regions (``bfc``, where the user or another library has chosen it), which
    takes one for every few arrays, and what is left over at their ends is lost: more than the
    reserve. One that has enough already is left as it is; one that has less is given the most that
    it may still take. Others have no regions, and on a CPU there is no plan for a device: nothing
    is done. Raises ``EngineError`` when the device has no such memory free.
    """
    pool_bytes = (jax.devices()[0].memory_stats() or {}).get("pool_bytes")
    if plan.device is None or pool_bytes is None or pool_bytes >= plan.total_bytes:
        return
    wanted = min(plan.total_bytes, plan.device.allocator_bytes - pool_bytes)
    with taking(wanted):
        jax.block_until_ready(jnp.zeros((wanted // MB, MB), jnp.uint8)).delete()


def compile_init_state(program: Program) -> Callable[[], tuple[State, SlotState]]:
    """What makes pages and slots, zeroed. It takes no memory until it is called; then it raises
    ``EngineError`` when the device has none such free.

    One executable: made array by array there would be one for each shape, half a second on a GPU.
    """
    limits = program.limits

    def zeros() -> tuple[State, SlotState]:
        sizes = (limits.num_pages, limits.page_size, limits.max_num_seqs)
        state = program.model.state.zeros(*sizes)
        drawn_from = drawn_from_of(program.model, program.platform)
        return state, init_slots(limits.max_num_seqs, limits.max_model_len, drawn_from)

    compiled = jax.jit(zeros).lower().compile()

    def make() -> tuple[State, SlotState]:
        with taking(_size((program.state(), program.slots()))):
            return jax.block_until_ready(compiled())

    return make


def init_state(program: Program) -> tuple[State, SlotState]:
    """Pages and slots, zeroed; see ``compile_init_state``."""
    return compile_init_state(program)()


@contextmanager
def taking(wanted: int) -> Generator[None]:
    """For what puts so many bytes on a device: ``EngineError`` when it has no such memory free."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise EngineError(
            f"{_shown(wanted)} are planned and the device has not so much free; end what else runs "
            "on it, or lower gpu_memory_utilization"
        ) from error


def _kv_budget(config: EngineConfig, fixed: MemoryPlan, reserve: int) -> int:
    """Bytes for pages; ``fixed`` is the plan without them."""
    device = fixed.device
    if device is None:
        if config.kv_cache_memory_bytes is None and config.num_pages is None:
            raise ConfigError("this device reports no memory size; set kv_cache_memory_bytes")
        return config.kv_cache_memory_bytes or 0
    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    budget = min(int(device.total_bytes * share), device.allocator_bytes)
    room = budget - fixed.total_bytes - reserve
    if room <= 0:
        raise ConfigError(
            f"the model does not fit: weights {_shown(fixed.weight_bytes)}, slots "
            f"{_shown(fixed.slot_bytes)}, batches {_shown(fixed.batch_bytes)}, workspace "
            f"{_shown(fixed.workspace_bytes)} and a reserve of {_shown(reserve)} leave nothing of "
            f"the {_shown(budget)} that may be used of the device's {_shown(device.total_bytes)} "
            "for the KV cache; use a larger device or a smaller model, or lower max_num_seqs or "
            "max_num_batched_tokens"
        )
    return room if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes


def _layer_width(model: Model) -> int:
    """Elements of one token that enter and leave the matrices of the widest layer."""
    widths = [
        sum(sum(leaf.shape) for leaf in jax.tree.leaves(layer) if leaf.ndim == 2)
        for layer in abstract_params(model).values()
        if isinstance(layer, dict)
    ]
    return max(widths)


def _size(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _shown(count: int) -> str:
    return f"{count / 1000 / MB:.2f} GB" if count >= 1000 * MB else f"{count / MB:.1f} MB"
