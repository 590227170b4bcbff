"""The weights of a running engine, and the checks of those that replace them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.start.model import model_of
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.task import with_task
from jaxinfer.exec.run.device_memory import allocating
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.run.new_weights import check_alive, check_values, placed_params
from jaxinfer.models.arguments import checked_params
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import by_path, nested
from jaxinfer.models.place import placed_leaves, whole_params
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.load import load_params, stream_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import resolve_source


class EngineWeights:
    """The weights of a running engine; see ``engine.loop.interfaces.Weights``."""

    def __init__(self, plan: EnginePlan, executor: Executor) -> None:
        # neither the tokenizer's files nor the first weights are kept
        self.plan = replace(plan, tokenizer_spec=None, loaded=None)
        self._executor = executor
        self._in_host_memory: Params | None = None  # while they sleep at level 1

    @property
    def model(self) -> Model:
        """The model without weights, that of ``params``."""
        return self.plan.program.model.whole

    @property
    def reference(self) -> str:
        """The model that the engine was built from, as the user named it."""
        return self.plan.source.reference

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The generation_config.json of the model's source."""
        return self.plan.source.generation_config

    @property
    def params(self) -> Params:
        """The weights that steps read now; not a copy, but on several devices one in the order of
        ``Model.whole``. Raises ``EngineError`` while they sleep.
        """
        self._check_hosts("parameters are read")
        if (params := self._executor.params) is None:
            raise EngineError("the weights sleep; call wake_up, or update_weights after level 2")
        return whole_params(params, self.plan.program.model)

    def prepared(self, given: Params | str | Path) -> Params:
        """New weights on the device: a tree of parameters, or what a reference to a model names.

        Matrices of floats are quantised to the forms in which the engine keeps them, one at a time.
        Arrays that are on the device already are not copied. Raises ``ArgumentError`` for a tree
        that does not fit, and ``ConfigError`` or ``SourceError`` for a model that does not; each
        names the parameter, tensor or key. A weight that is not finite is refused too. Raises
        ``EngineError`` if the device has no memory for a second set of weights.
        """
        self._check_hosts("weights are updated")
        program = self.plan.program
        with allocating(self.plan.memory.weight_bytes):  # the old weights stay until the change
            is_named = isinstance(given, str | Path)
            params: Any = self._load(str(given)) if is_named else self._of_tree(given)
            return placed_params(program.model, params, program.placement)

    def replace(self, params: Params) -> None:
        """Let later steps read these weights."""
        self._executor.replace_weights(params)
        self._in_host_memory = None

    def sleep(self, level: int) -> None:
        """See ``engine.loop.interfaces.Weights``. Arrays that are referenced elsewhere, such as by
        the trainer that they came from, stay in memory.
        """
        params = self._executor.params
        if level == 2:
            self._in_host_memory = None
        elif params is not None:
            on_cpu = self.plan.program.platform == "cpu"  # there it is host memory already
            self._in_host_memory = params if on_cpu else jax.device_get(params)
        self._executor.replace_weights(None)

    def wake_up(self) -> bool:
        """See ``engine.loop.interfaces.Weights``; raises ``EngineError`` if memory is missing."""
        if self._in_host_memory is not None:
            program = self.plan.program
            arrays, put = program.model.arrays, program.placement.put
            leaves = by_path(self._in_host_memory).items()
            with allocating(self.plan.memory.weight_bytes):
                placed = {path: put(leaf, arrays[path].axes) for path, leaf in leaves}
                for array in placed.values():
                    array.block_until_ready()
            self.replace(nested(placed))
        return self._executor.params is not None

    def _check_hosts(self, what: str) -> None:
        if (count := self.plan.config.num_hosts) > 1:
            raise EngineError(f"{what} only in an engine of one host, and this one has {count}")

    def _load(self, reference: str) -> Params:
        """The weights of a folder or another reference, as the engine's model keeps them."""
        plan, program = self.plan, self.plan.program
        source = resolve_source(
            reference,
            cache_dir=plan.cache_dir,
            progress=NO_PROGRESS,
            hf_overrides=plan.config.hf_overrides,
            download_dir=plan.config.download_dir,
            offline=True,  # steps wait
        )
        _, source = with_task(plan.config, source)
        is_kept = bool(program.model.forms)
        quantises = is_kept and not (source.scheme or source.forms)
        config = replace(plan.config, quantization=None) if is_kept else plan.config
        source, model = model_of(source, config, program.platform, program.model.devices)
        if differing := _differing(model, program.model):
            raise ConfigError(
                f"{reference} differs from the engine's model in {', '.join(differing)}; serve it "
                "with another engine"
            )
        assert source.checkpoint is not None, "a config alone is refused for its load_format"
        if quantises:
            return nested(self._like_the_engines(source.checkpoint))
        if (model.forms, model.arrangement) != (program.model.forms, program.model.arrangement):
            raise ConfigError(
                f"{reference} and the engine's model keep different matrices quantised; give "
                "weights of floats, which are quantised as the engine's are, or start the engine "
                f"with --model {reference}, or on a CPU with --cpu-weights float32 "
                "(cpu_weights='float32'), which dequantises all"
            )
        plan_params(model, source.checkpoint)
        return load_params(
            model,
            source,
            placement=program.placement,
            cache_dir=plan.cache_dir,
            seed=plan.config.seed or 0,
            progress=NO_PROGRESS,
        )

    def _of_tree(self, given: Any) -> Any:
        """The tree in the engine's forms, and on several devices divided among them. Raises
        ``ArgumentError`` if it does not fit.
        """
        if not isinstance(given, Mapping):
            return given
        program = self.plan.program
        others, made = self._quantised(cast("Params", given))
        if program.model.devices > 1:
            done = {s.path for s in program.model.param_specs if s.leaves.keys() & made.keys()}
            rest = (spec for spec in self.model.param_specs if spec.path not in done)
            arrays = self.model.arrays
            wanted = {path: arrays[path] for spec in rest for path in spec.leaves}
            known = checked_params(nested(others), wanted)
            check_alive(known)
            # copies of numpy's, whose memory JAX may keep on a CPU
            own = {p: a if isinstance(a, jax.Array) else np.array(a) for p, a in known.items()}
            others = placed_leaves(own, program.model, program.placement)
        return nested(others | made)

    def _quantised(self, tree: Params) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """The leaves of a tree that stay as they are, by path, and quantised matrices that are made
        of floats where the engine keeps them quantised. Raises ``ArgumentError`` if the tree does
        not fit.
        """
        from jaxinfer.weights.save import ParamsCheckpoint  # imports Jinja

        model = self.model
        leaves = by_path(tree)
        own = model.arrays
        floats = {s.path: s for s in model.param_specs if s.path in leaves and s.path not in own}
        if not floats:
            return leaves, {}
        names = {source.name for spec in floats.values() for source in spec.sources}
        kept = tuple((name, form) for name, form in model.forms if name not in names)
        checkpoint = ParamsCheckpoint(replace(model, forms=kept), tree)  # checks shapes and dtypes
        check_values({path: leaves[path] for path in floats})
        made = self._like_the_engines(checkpoint, floats)
        return {path: leaf for path, leaf in leaves.items() if path not in floats}, made

    def _like_the_engines(
        self, checkpoint: Checkpoint, paths: Container[str] | None = None
    ) -> dict[str, jax.Array]:
        """The parameters of a checkpoint of floats as the engine keeps them, by path. One at a time
        is read, so that host memory holds no second one. ``paths``: those to read (None: all).
        """
        from jaxinfer.weights.quantised.on_load import quantised_like  # 40 ms

        model = self.plan.program.model
        made = quantised_like(model, checkpoint)
        plan = plan_params(model, made)
        plan = [one for one in plan if paths is None or one.spec.path in paths]
        return stream_params(plan, made, self.plan.program.placement, NO_PROGRESS, threads=1)


def _differing(one: Model, other: Model) -> list[str]:
    """The names of the fields in which two models differ."""
    found = ["architecture"] if one.architecture != other.architecture else []
    found += [
        field.name
        for field in fields(one.config)
        if getattr(one.config, field.name) != getattr(other.config, field.name)
    ]
    return found
