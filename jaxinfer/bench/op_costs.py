"""The least bytes and operations of each op of a step, from the model's own parameters.

Matrices are counted by their part of the model: the networks' first matrices (gate and up), the
head, experts, and the others of the layers. An op has a floor if the trace shows which parts it
multiplies: the one that ``OWNERS`` names, and the rest for an op that is called for nearly every
matrix of it. The last layer of a prompt step computes only last tokens, by another op; so a floor
counts the matrices of a part that the op was called for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from jaxinfer.engine.loop.profiler import ProfiledStep

if TYPE_CHECKING:
    from jaxinfer.models.base import Model

type Cost = tuple[float, float]  # bytes, operations

HEAD, EXPERTS, GATE_UP, OTHERS = "head", "experts", "gate_up", "others"
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


class Part(msgspec.Struct, frozen=True):
    """Matrices: their number, bytes, and operations for one token; two of fp8 count as one."""

    count: int = 0
    bytes: int = 0
    flops: float = 0.0


class OpCosts(msgspec.Struct, frozen=True):
    """The costs of a model. ``expert_share``: of a layer's experts that a token uses."""

    parts: dict[str, Part]
    weight_bytes: int  # of all weights that every step reads
    kv_bytes: int  # of one token of context
    pair_flops: int  # of one query and one key, over all layers
    state_bytes: int = 0  # of a sequence
    expert_share: float = 0.0

    def of_part(self, name: str, step: ProfiledStep) -> Cost:
        """The least cost of a part in a step; experts are chosen independently."""
        part = self.parts.get(name, Part())
        tokens = step.draws if name == HEAD else step.tokens
        share = 1 - (1 - self.expert_share) ** tokens if name == EXPERTS else 1.0
        return share * part.bytes, tokens * part.flops


def op_costs_of(model: Model) -> OpCosts:
    """The costs of a model's ops, with the same sums as ``floor.costs_of``."""
    import jax.numpy as jnp

    from jaxinfer.bench.floor import costs_of, named_arrays
    from jaxinfer.models.base import abstract_params

    whole = costs_of(model)
    floats = dict(named_arrays(abstract_params(replace(model, forms=(), arrangement=None))))
    sizes: dict[str, int] = {}
    fp8 = set[str]()
    for name, leaf in named_arrays(abstract_params(model)):
        parts = name.split("/")  # perhaps of a quantised matrix, which is one array in `floats`
        owner = next(p for i in range(len(parts)) if (p := "/".join(parts[: i + 1])) in floats)
        sizes[owner] = sizes.get(owner, 0) + leaf.size * leaf.dtype.itemsize
        if leaf.dtype == jnp.float8_e4m3fn:
            fp8.add(owner)
    found: dict[str, Part] = {}
    head_size = model.config.hidden_size * model.config.vocab_size
    for name, leaf in floats.items():
        if (part := _part_of(name, leaf.ndim, tied=model.config.tie_word_embeddings)) is None:
            continue
        used = whole.expert_share if part == EXPERTS else 1.0
        count = head_size if part == HEAD else leaf.size
        before = found.get(part, Part())
        found[part] = Part(
            before.count + 1,
            before.bytes + sizes[name],
            before.flops + 2 * count * used * (0.5 if name in fp8 else 1),
        )
    return OpCosts(
        parts=found,
        weight_bytes=whole.weight_bytes,
        kv_bytes=whole.kv_bytes,
        pair_flops=whole.pair_flops,
        state_bytes=whole.state_bytes,
        expert_share=whole.expert_share,
    )


def _part_of(name: str, rank: int, *, tied: bool) -> str | None:
    """The part of a parameter; None if it is no matrix that a step multiplies."""
    if name == "lm_head" or (name == "embed" and tied):
        return HEAD
    if "/" not in name or rank < 2 or "norm" in name or "bias" in name:
        return None
    if rank == 3:
        return EXPERTS
    return GATE_UP if name.endswith("/gate_up") else OTHERS


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
