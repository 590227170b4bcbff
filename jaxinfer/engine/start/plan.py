"""``EnginePlan``: the decisions that are made before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.core.config import COMPILED, EngineConfig
from jaxinfer.core.progress import Progress
from jaxinfer.engine.requests.facts import ModelDetails, ModelFacts
from jaxinfer.engine.start.join import Joined
from jaxinfer.engine.start.task import score_token_ids
from jaxinfer.exec.compile.bundle import Bundle
from jaxinfer.exec.compile.memory_plan import MemoryPlan
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import by_path, nested
from jaxinfer.models.place import placed_leaves
from jaxinfer.models.quantised import sizes_by_form
from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import ModelSource

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before weights and tokenizer are read or a step is compiled."""

    config: EngineConfig  # with defaults in place of None
    source: ModelSource
    program: Program  # with the number of pages in its limits
    memory: MemoryPlan
    tokenizer_spec: TokenizerSpec | None  # for other processes, which load their own
    config_facts: ModelFacts  # from the model's config files
    cache_dir: Path
    bundle: Bundle | None  # the user's, which has been found to fit
    loaded: Params | None = None  # weights that are on the device already
    joined: Joined | None = None  # the connections to other hosts
    encodes: bool = True  # else another process encodes nearly all texts

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, read on first use; that takes up to 0.5 s and holds the GIL, a quarter of
        it without ``encodes``. Raises ``TokenizerError``.
        """
        if self.tokenizer_spec is None:
            return None
        # imported here, since Jinja and others are a quarter of all imports before JAX
        from jaxinfer.text.tokenizer import load_tokenizer

        return load_tokenizer(self.tokenizer_spec, encodes=self.encodes)

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model, with its details, the tokenizer's end tokens and those of scores.

        Raises ``ConfigError`` if the tokens of scores are none.
        """
        scores = score_token_ids(self.config, self.tokenizer)
        facts = replace(self.config_facts, details=self.details)
        if self.tokenizer is None:
            return facts
        ends = (*facts.eos_token_ids, *sorted(self.tokenizer.end_token_ids))
        ends = tuple(dict.fromkeys(ends))
        return replace(facts, eos_token_ids=ends, score_token_ids=scores)

    @property
    def details(self) -> ModelDetails:
        """The parts of the model."""
        model = self.program.model.whole
        sizes = sizes_by_form(model.param_specs, model.config.dtype)
        num_bytes = sum(size.nbytes for size in sizes.values())
        return ModelDetails(
            family=model.family.name,
            num_parameters=sum(size.count for size in sizes.values()),
            weight_bytes=num_bytes,
            gpu_bytes=0 if self.program.platform == "cpu" else num_bytes,
            form=max(sizes, key=lambda form: sizes[form].count, default=""),
        )

    @property
    def store(self) -> Store:
        """The executables of this program in the cache; every source file is read to find them."""
        return Store.of(self.program, self.memory, self.cache_dir)

    @property
    def bundle_settings(self) -> dict[str, Any]:
        """The settings that a bundle of this plan fixes, with the planned sizes."""
        limits = self.program.limits
        planned = {
            "num_pages": sum(limits.num_pages),
            "page_size": limits.page_size,
            "max_model_len": limits.max_model_len,
        }
        return {name: getattr(self.config, name) for name in COMPILED} | planned

    def load_params(self, progress: Progress) -> Params:
        """Load the weights onto the devices, unless they are; see ``weights.load``."""
        model, placement = self.program.model, self.program.placement
        if self.loaded is None:
            return self._loaded(model, progress)
        if model.devices == 1:
            return self.loaded
        return nested(placed_leaves(by_path(self.loaded), model, placement))

    def load_whole(self, progress: Progress) -> Params:
        """Load the weights as functions of whole arrays need them, ``Model.whole``."""
        return self._loaded(self.program.model.whole, progress)

    def _loaded(self, model: Model, progress: Progress) -> Params:
        return load_params(
            model,
            self.source,
            placement=self.program.placement,
            cache_dir=self.cache_dir,
            seed=self.config.seed or 0,
            progress=progress,
        )
