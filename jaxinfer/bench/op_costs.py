"""The least bytes and operations of each op of a step, from the model's own parameters.

Matrices are counted by their part of the model: the networks' first matrices (gate and up), the
head, experts, and the others of the layers. An op has a floor if the trace shows which parts it
multiplies: the one that ``OWNERS`` names, and the rest for an op that is called for nearly every
matrix of it. The last layer of a prompt step computes only last tokens, by another op; so a floor
counts the matrices of a part that the op was called for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jaxinfer.core.profile import EXPERTS, GATE_UP, HEAD, Cost, OpCosts, ProfiledStep

# The op that multiplies a part, if a step has that op.
OWNERS: Mapping[str, str] = MappingProxyType(
    {HEAD: "unembed", EXPERTS: "experts", GATE_UP: "swiglu_gemm"}
)
NEARLY_ALL = 0.9  # of the matrices that no named op multiplies
GEMMS = frozenset(
    ("gemm", "unembed", "experts", "norm_gemm", "skinny_gemm", "swiglu_gemm")
    + ("quantised_gemm", "quantised_mlp")
)
DECODE_ATTENTION = frozenset(("append_decode", "latent_decode"))
PROMPT_ATTENTION = frozenset(("paged_prefill", "latent_prefill"))


def floors_of(costs: OpCosts, step: ProfiledStep, calls: Mapping[str, int]) -> dict[str, Cost]:
    """The least bytes and operations of those ops that have known ones, by their ``calls`` in the
    step; "gemms" are those of all matrices, "" is the whole step.
    """
    present = {op for op, count in calls.items() if count}
    every = {part: costs.of_part(part, step) for part in costs.parts}
    found: dict[str, Cost] = {}
    rest: list[str] = []
    for part in costs.parts:
        if (op := OWNERS.get(part, "")) in present:
            share = 1.0 if part == EXPERTS else min(calls[op] / costs.parts[part].count, 1.0)
            found[op] = _sum([every[part]], share)
        else:
            rest.append(part)
    count = sum(costs.parts[part].count for part in rest)
    for op in (present & GEMMS) - found.keys():
        if count and calls[op] >= NEARLY_ALL * count:
            found[op] = _sum((every[part] for part in rest), min(calls[op] / count, 1.0))
    for op in present & DECODE_ATTENTION:
        found[op] = step.context * costs.kv_bytes, step.context * costs.pair_flops
    for op in present & PROMPT_ATTENTION:
        found[op] = 0.0, step.pairs * costs.pair_flops
    found = {op: cost for op, cost in found.items() if any(cost)}
    gemms = _sum(every.values())
    experts = every.get(EXPERTS, (0.0, 0.0))[0]
    states = 2 * len(step.requests) * costs.state_bytes
    whole = (
        costs.weight_bytes + experts + step.context * costs.kv_bytes + states,
        gemms[1] + (step.context + step.pairs) * costs.pair_flops,
    )
    return {**found, "gemms": gemms, "": whole}


def _sum(costs: Iterable[Cost], share: float = 1.0) -> Cost:
    pairs = list(costs)
    return share * sum(size for size, _ in pairs), share * sum(flops for _, flops in pairs)
