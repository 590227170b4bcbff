"""The device's memory that tiers need: blocks for copies, and the pages that steps save."""

from __future__ import annotations

from operator import mul

from jaxinfer.core.shapes import cdiv
from jaxinfer.exec.compile.program import Program

# Units of tiers are copied in blocks of so many bytes, or of one unit: three for loads, and what
# XLA needs to pack or unpack one (``exec.tiers.device_mover``). An unpacking call has a kernel for
# each array of the layers: with half the bytes 16,384 tokens of Qwen3-4B came at 40 GB/s, so at 49
# of an H200's 55.
TIER_BLOCK_BYTES = 128 << 20
NUM_TIER_BLOCKS = 5


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
    """The bytes of a block; a step saves so many besides those that it must, as this takes time
    (0.4 ms for 64 MiB) that its tokens wait for.
    """
    return max(TIER_BLOCK_BYTES, *_page_bytes(program), program.model.state.bytes_per_slot)


def _page_bytes(program: Program) -> list[int]:
    """The bytes of a page of each group."""
    limits, per_entry = program.limits, program.model.state.bytes_per_entry
    return [limits.page_size * per_entry[group.pool] for group in limits.groups]
