"""The device's memory that tiers need: blocks for copies, and the pages that steps save."""

from __future__ import annotations

from operator import mul

from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.program import Program

# Units of tiers are copied in blocks of so many bytes, or of one unit. Those of loads form a ring
# (``exec.tiers.device_mover``): blocks are unpacked between two steps, and while two steps take 7
# ms others are copied, 64 MiB in 1.2 ms on an H200.
TIER_BLOCK_BYTES = 64 << 20
NUM_TIER_BLOCKS = 6


def tier_memory(program: Program) -> int:
    """Bytes of the device for blocks of loads and for saves."""
    return NUM_TIER_BLOCKS * block_bytes(program) + saving_bytes(program)


def saving_bytes(program: Program) -> int:
    """Bytes of the device for saves in flight: those of two steps, each of which saves the pages to
    which it writes, and another block.
    """
    limits = program.limits
    tokens = [limits.page_size * group.tokens_per_entry for group in limits.groups]
    pages = [cdiv(limits.max_num_batched_tokens, each) + limits.max_num_seqs for each in tokens]
    written = sum(map(mul, pages, _page_bytes(program)))
    return 2 * (written + block_bytes(program))


def block_bytes(program: Program) -> int:
    """The bytes of a block; a step saves so many besides those that it must, as its tokens wait
    for the call that packs them.
    """
    return max(TIER_BLOCK_BYTES, *_page_bytes(program), program.model.state.bytes_per_slot)


def _page_bytes(program: Program) -> list[int]:
    """The bytes of a page of each group."""
    limits, per_entry = program.limits, program.model.state.bytes_per_entry
    return [limits.page_size * per_entry[group.pool] for group in limits.groups]
