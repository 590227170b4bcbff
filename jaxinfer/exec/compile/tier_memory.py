"""The device's memory that tiers need: blocks for copies, and the pages that steps save."""

from __future__ import annotations

from operator import mul

from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.program import Program

# Units of tiers are copied in blocks of so many bytes, or of one unit: four for loads, and what XLA
# needs to pack or unpack one (``exec.tiers.device_mover``).
TIER_BLOCK_BYTES = 64 << 20
NUM_TIER_BLOCKS = 6
MAX_SAVE_BYTES = 512 << 20  # that one step saves; those of two steps may be under way


def tier_memory(program: Program) -> int:
    """Bytes of the device for blocks of loads and for saves."""
    block_bytes = max(TIER_BLOCK_BYTES, _largest_unit(program))
    return NUM_TIER_BLOCKS * block_bytes + 2 * tier_save_bytes(program)


def tier_save_bytes(program: Program) -> int:
    """The bytes that tiers save with one step: all pages that the longest step may evict.

    With less, a long prompt evicts pages faster than they are saved, and these prefixes are lost.
    """
    limits = program.limits
    tokens = [limits.page_size * group.tokens_per_entry for group in limits.groups]
    pages = [cdiv(limits.max_num_batched_tokens, each) + limits.max_num_seqs for each in tokens]
    evicted = sum(map(mul, pages, _page_bytes(program)))
    return max(_largest_unit(program), min(evicted, MAX_SAVE_BYTES))


def _page_bytes(program: Program) -> list[int]:
    """The bytes of a page of each group."""
    limits, per_entry = program.limits, program.model.state.bytes_per_entry
    return [limits.page_size * per_entry[group.pool] for group in limits.groups]


def _largest_unit(program: Program) -> int:
    return max(*_page_bytes(program), program.model.state.bytes_per_slot)
