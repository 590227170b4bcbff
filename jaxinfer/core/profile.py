"""Records of a profile: what an engine writes next to a trace, and the least costs of its model."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

type Cost = tuple[float, float]  # bytes, operations

# Parts of a model, by what multiplies them
HEAD, EXPERTS, GATE_UP, OTHERS = "head", "experts", "gate_up", "others"


class Instruction(msgspec.Struct, frozen=True, array_like=True):
    """An instruction of an executable: JAX's name of its operation, and a custom call's target."""

    scope: str = ""
    target: str = ""


class ProfiledStep(msgspec.Struct, frozen=True):
    """A step of the window: what it computed, without padding, and when the host saw it end."""

    step: int
    bucket: str
    requests: list[str]
    wall_ns: int  # since the later of its launch and the end of the step before it
    tokens: int = 0  # of all rows
    draws: int = 0  # tokens that were drawn
    context: int = 0  # entries that decode rows attend to, all together
    pairs: int = 0  # of a query and a key, in prompts


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


class Steps(msgspec.Struct, frozen=True):
    """``steps.json``. ``instructions``: by bucket, HLO module and name."""

    device: str
    num_devices: int
    steps: list[ProfiledStep]
    costs: OpCosts | None = None  # None: of an engine that gives no access to its model
    instructions: Mapping[str, Mapping[str, Mapping[str, Instruction]]] = {}
