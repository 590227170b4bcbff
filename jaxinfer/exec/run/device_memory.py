"""A device's memory: its size, claiming the planned memory, and making pages and slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.config import allocator_share
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.host_memory import release_zeros
from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.memory_plan import MB, DeviceMemory, MemoryPlan, shown, tree_bytes
from jaxinfer.exec.compile.program import NO_REMATERIALIZATION, Program
from jaxinfer.exec.run.cuda_driver import card_bytes
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.nn.state import State


def device_memory(device: Any) -> DeviceMemory | None:  # jax.Device
    """The memory of a device; None if it reports none (a CPU)."""
    if device.platform == "cpu":
        return None
    # bfc reports its limit, the allocator over virtual memory nothing, and cuda_async 0
    limit: int = (device.memory_stats() or {}).get("bytes_limit", 0)
    card = card_bytes(device.local_hardware_id) or limit
    return DeviceMemory(card, limit or int(card * allocator_share())) if card else None


def least_memory(devices: Sequence[Any]) -> DeviceMemory | None:  # of jax.Device
    """The memory that each of several devices has; None if one reports none."""
    found = [device_memory(device) for device in devices]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    total = min(one.total_bytes for one in known)
    return DeviceMemory(total, min(one.allocator_bytes for one in known))


def memory_bytes(plan: MemoryPlan) -> int:
    """Bytes of the memory that holds the weights: the device's, or for a CPU the machine's."""
    if plan.device is not None:
        return plan.device.total_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def misfit(plan: MemoryPlan) -> str | None:
    """A sentence if a CPU's weights exceed the memory of the machine.

    A device's memory has been checked by ``plan_memory``.
    """
    own_devices = plan.num_devices // plan.num_hosts
    total, needed = memory_bytes(plan), plan.weight_bytes * own_devices
    if plan.device is not None or needed <= total:
        return None
    return (
        f"the model does not fit: its weights take {shown(needed)} and this machine "
        f"has {shown(total)} of memory; use a smaller or a quantised model"
    )


def check_host(plan: MemoryPlan) -> None:
    """Raise ``ConfigError`` if a CPU's weights exceed the memory of the machine.

    Else the system would end the process while they are read.
    """
    if (sentence := misfit(plan)) is not None:
        raise ConfigError(sentence)


def claim_memory(plan: MemoryPlan, device: Any) -> None:
    """Make JAX's allocator reserve the planned memory as one region, while it is still empty.

    This is for allocators with regions (``bfc``, if the user or another library has selected it).
    They reserve a region for every few arrays, and the unused ends of these regions would exceed
    the plan's reserve. Nothing is done if the allocator has reserved enough already, has no
    regions, or on a CPU. If it has reserved less, it reserves as much as it still may. Raises
    ``EngineError`` if the device does not have that much free memory.
    """
    pool_bytes = (device.memory_stats() or {}).get("pool_bytes")
    if plan.device is None or pool_bytes is None or pool_bytes >= plan.total_bytes:
        return
    num_bytes = min(plan.total_bytes, plan.device.allocator_bytes - pool_bytes)
    with allocating(num_bytes):
        jax.block_until_ready(jnp.zeros((num_bytes // MB, MB), jnp.uint8, device=device)).delete()


def release_freed_blocks(device: Any) -> None:  # jax.Device
    """Make XLA's allocator over virtual memory give the blocks of freed arrays back to the device.

    It keeps them for arrays of their size, in blocks of 2 MiB, and reuses the one that was freed
    first. If loading leaves two blocks of the size of a step's temporary, the temporary moves at
    each step and its CUDA graph is recorded again (``batch.copy_batch``): 0.9 ms of host work with
    DeepSeek-V2-Lite and one row. Only an array that does not fit makes the allocator give blocks
    back, so one as large as the card is requested. Other allocators keep no such blocks; they
    report statistics, and nothing is done.
    """
    memory = device_memory(device)
    if memory is None or device.memory_stats():
        return

    def fill(value: jax.Array) -> jax.Array:  # uint8[] -> uint8[1, 1]
        whole = jnp.full((cdiv(memory.total_bytes, MB), MB), value, jnp.uint8)
        return lax.optimization_barrier(whole)[:1, :1]

    placed = jax.device_put(np.uint8(0), device)
    never_fits = jax.jit(fill).lower(placed).compile(dict(NO_REMATERIALIZATION))
    try:
        never_fits(placed).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise


def compile_init_state(program: Program) -> Callable[[], tuple[State, SlotState]]:
    """A function that allocates pages and slots, zeroed: pages may be read before they are written.

    It raises ``EngineError`` if the device does not have that much free memory. There is an
    executable for each shape of an array of layer state, of which a model has few. The slots have
    many shapes, for which XLA took 0.2 s (H100), so their zeros come from the host.
    """
    state, slots, placement = program.state(), program.slots(), program.placement
    with placement.as_default():
        zeros_of = {
            one: jax.jit(partial(jnp.zeros, one.shape, one.dtype), out_shardings=one.sharding)
            .lower()
            .compile()
            for one in dict.fromkeys(state)
        }

    def make() -> tuple[State, SlotState]:
        with allocating(tree_bytes((state, slots))):
            on_cpu = placement.platform == "cpu"
            zeroed = (zeros_of[one]() for one in state)  # one after the other
            made = [_without_memory(array) if on_cpu else array for array in zeroed]
            zeros = (np.zeros(one.shape, one.dtype) for one in jax.tree.leaves(slots))
            put = jax.tree.unflatten(jax.tree.structure(slots), map(placement.put, zeros))
            return jax.block_until_ready((tuple(made), put))

    return make


def _without_memory(zeros: jax.Array) -> jax.Array:
    """A zeroed array of a CPU, whose memory becomes resident where it is used for the first time.

    XLA writes every byte of an array that it makes: 1 GiB of pages, most of which a server with few
    users never needs.
    """
    for shard in jax.block_until_ready(zeros).addressable_shards:
        release_zeros(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
    return zeros


def init_state(program: Program) -> tuple[State, SlotState]:
    """Zeroed pages and slots; see ``compile_init_state``."""
    return compile_init_state(program)()


def init_own_arrays(program: Program) -> dict[str, Any]:
    """The arrays of ``Program.own_arrays`` before any call: zeros.

    It raises ``EngineError`` if the device does not have that much free memory.
    """
    abstract = program.own_arrays()
    with allocating(tree_bytes(abstract)):
        put = program.placement.put
        made = jax.tree.map(lambda one: put(np.zeros(one.shape, one.dtype)), abstract)
        return jax.block_until_ready(made)


@contextmanager
def allocating(num_bytes: int) -> Generator[None]:
    """Raise ``EngineError`` if an allocation of ``num_bytes`` within the block fails."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise EngineError(
            f"{shown(num_bytes)} are planned and the device has not so much free; end other "
            "processes on it, or lower gpu_memory_utilization"
        ) from error
