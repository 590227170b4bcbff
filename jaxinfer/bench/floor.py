"""The shortest possible time of a step, from its bytes and operations and a device's ceilings.

Owns: the floors of a model's decode steps and prefills, and the measured ceilings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.models.costs import Costs


@dataclass(frozen=True)
class Ceiling:
    """The measured maximum rates of a device."""

    bytes_per_s: float  # of device memory
    flops_per_s: float  # of a bfloat16 matmul


# Measured, not from the data sheet: a device-to-device copy, read and written bytes together, and a
# large bfloat16 matmul.
CEILINGS: Mapping[str, Ceiling] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": Ceiling(3.0e12, 800e12),
        "NVIDIA H200": Ceiling(4.3e12, 790e12),
    }
)


@dataclass(frozen=True)
class Floor:
    """The shortest times of one model on one device, in seconds."""

    costs: Costs
    ceiling: Ceiling

    def decode(self, batch: int, context: float, distinct: float | None = None) -> float:
        """A step that gives each of ``batch`` sequences a token, over ``context`` tokens each.

        ``distinct``: see ``Costs.bytes_of_weights``.
        """
        costs = self.costs
        token = costs.token_flops + costs.head_flops + context * costs.pair_flops
        return self._seconds(decode_bytes(costs, batch, context, distinct), batch * token)

    def prefill(self, num_prompts: int, tokens: int, distinct: float | None = None) -> float:
        """The first token of each of ``num_prompts`` prompts of ``tokens`` tokens."""
        costs = self.costs
        pairs = tokens * (tokens + 1) / 2
        one = tokens * costs.token_flops + pairs * costs.pair_flops + costs.head_flops
        size = costs.bytes_of_weights(num_prompts * tokens, distinct)
        return self._seconds(size, num_prompts * one)

    def generate(
        self, num_prompts: int, num_input: int, num_output: int, distinct: float | None = None
    ) -> float:
        """All prompts prefilled at once, then all of them decoded together."""
        context = num_input + num_output / 2  # the mean over the decode steps
        steps = num_output - 1  # the first token comes from the prefill
        decode = self.decode(num_prompts, context, distinct)
        return self.prefill(num_prompts, num_input, distinct) + steps * decode

    def _seconds(self, size: float, flops: float) -> float:
        return max(size / self.ceiling.bytes_per_s, flops / self.ceiling.flops_per_s)


def decode_bytes(costs: Costs, batch: int, context: float, distinct: float | None = None) -> float:
    """Bytes that a decode step moves; ``distinct``: see ``Costs.bytes_of_weights``."""
    of_rows = batch * (context * costs.kv_bytes + 2 * costs.state_bytes)
    return costs.bytes_of_weights(batch, distinct) + of_rows
