"""What is decided before anything is loaded.

Owns: ``EnginePlan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.config import EngineConfig, Limits
from jaxinfer.engine.facts import ModelFacts
from jaxinfer.exec.compile.bundle import Bundle
from jaxinfer.exec.compile.memory_plan import MemoryPlan
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.base import Model
from jaxinfer.nn.placement import Placement
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.pins import Pins

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before weights and tokenizer are read or a step is compiled."""

    config: EngineConfig  # no None left where a default exists
    source: ModelSource
    model: Model
    limits: Limits
    placement: Placement
    pins: Pins
    memory: MemoryPlan
    tokenizer_spec: TokenizerSpec | None  # for whoever needs a tokenizer of their own
    facts: ModelFacts  # but for the tokenizer's eos: see ``model_facts``
    cache_dir: Path
    bundle: Bundle | None  # one that fits, where the user gave one

    @cached_property
    def program(self) -> Program:
        """What is compiled."""
        return Program(self.model, self.limits, self.placement.platform, self.pins, self.placement)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Read on first use, which takes up to half a second and holds the GIL meanwhile."""
        if self.tokenizer_spec is None:
            return None
        # here, as it imports Jinja and others: a quarter of what was imported before JAX
        from jaxinfer.text.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_spec)

    def read_tokenizer(self) -> None:
        """Read it now, and raise ``TokenizerError`` when that cannot be done."""
        _ = self.tokenizer
