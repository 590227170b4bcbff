"""A device's memory: how much there is, claiming what is planned, and making pages and slots."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.core.config import allocator_share
from jaxinfer.core.errors import EngineError
from jaxinfer.exec.compile.memory_plan import (
    MB,
    DeviceMemory,
    MemoryPlan,
    shown,
    tree_bytes,
)
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.cuda_driver import card_bytes
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.nn.state import State


def device_memory(device: Any) -> DeviceMemory | None:  # jax.Device
    """The memory of a device; None where it reports none (a CPU)."""
    if device.platform == "cpu":
        return None
    # XLA's own allocator says its limit, the one over virtual memory nothing, CUDA's 0
    limit: int = (device.memory_stats() or {}).get("bytes_limit", 0)
    card = card_bytes(device.local_hardware_id) or limit
    return DeviceMemory(card, limit or int(card * allocator_share())) if card else None


def claim_memory(plan: MemoryPlan, device: Any) -> None:
    """Have JAX's allocator take what is planned as one region, before anything lies in it.

    Of an allocator with regions (``bfc``, where the user or another library has chosen it), which
    takes one for every few arrays, and what is left over at their ends is lost: more than the
    reserve. One that has enough already is left as it is; one that has less is given the most that
    it may still take. Others have no regions, and on a CPU there is no plan for a device: nothing
    is done. Raises ``EngineError`` when the device has no such memory free.
    """
    pool_bytes = (device.memory_stats() or {}).get("pool_bytes")
    if plan.device is None or pool_bytes is None or pool_bytes >= plan.total_bytes:
        return
    wanted = min(plan.total_bytes, plan.device.allocator_bytes - pool_bytes)
    with taking(wanted):
        jax.block_until_ready(jnp.zeros((wanted // MB, MB), jnp.uint8, device=device)).delete()


def compile_init_state(program: Program) -> Callable[[], tuple[State, SlotState]]:
    """What makes pages and slots, zeroed. It takes no memory until it is called; then it raises
    ``EngineError`` when the device has none such free.

    One executable: made array by array there would be one for each shape, half a second on a GPU.
    """
    limits = program.limits

    def zeros() -> tuple[State, SlotState]:
        sizes = (limits.num_pages, limits.page_size, limits.num_state_rows)
        state = program.model.state.zeros(*sizes)
        return state, program.zero_slots()

    shardings = jax.tree.map(lambda array: array.sharding, (program.state(), program.slots()))
    compiled = jax.jit(zeros, out_shardings=shardings).lower().compile()

    def make() -> tuple[State, SlotState]:
        with taking(tree_bytes((program.state(), program.slots()))):
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
            f"{shown(wanted)} are planned and the device has not so much free; end what else runs "
            "on it, or lower gpu_memory_utilization"
        ) from error
