"""How many prompt tokens may run next to decode rows almost for free, by a model's experts."""

from __future__ import annotations

from jaxinfer.models.base import Model
from jaxinfer.models.quantised import sizes_by_form

# Operations of a Hopper GPU in bfloat16 in the time in which it reads a byte: 700 TFLOP/s and
# 4.2 TB/s of an H200 give 167, 800 and 3.0 of an H100 267 (both measured).
FLOPS_PER_BYTE = 200


def free_prompt_tokens(model: Model) -> int:
    """The prompt tokens whose products with experts take as long as reading all experts.

    Decode rows that are not few read nearly all experts, so a step with so many prompt tokens is
    hardly longer. Such is the largest power of two; 0 for a model without experts. Qwen3-30B-A3B
    has 2,048 in bfloat16; a dense model would have 200, so this is not how its limit is chosen
    (docs/notes/0015-mixed-step-budget.md).
    """
    model = model.whole  # several devices divide both bytes and operations
    specs = {spec.path: spec for spec in model.param_specs}
    bytes_read = flops = 0.0
    for i, experts in model.config.experts.items():
        stacks = [specs[f"layers_{i}/{name}"] for name in ("gate_up", "down")]
        sizes = sizes_by_form(stacks, model.config.dtype).values()
        share = experts.routing.chosen / experts.count
        bytes_read += sum(size.nbytes for size in sizes)
        flops += sum(2 * size.count * share for size in sizes)  # of a token
    tokens = int(FLOPS_PER_BYTE * bytes_read / flops) if flops else 0
    return 1 << (tokens.bit_length() - 1) if tokens else 0
