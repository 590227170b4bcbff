"""The engines of a loaded model, which its ``generate`` builds when it first needs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from jaxinfer.core.errors import ArgumentError
from jaxinfer.core.points import Point
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.api.llm import LLM
from jaxinfer.engine.api.one_prompt import SINGLE_CONTEXT, settings_for_one
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.engine.requests.prompts import Prompt, parse_prompts
from jaxinfer.engine.start.build import build_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.step.points import StepEdits, added_vector, points_named
from jaxinfer.models.base import Params
from jaxinfer.nn.points import Edit

type Sampling = SamplingParams | Sequence[SamplingParams] | None
type Replan = Callable[[dict[str, Any]], EnginePlan]

# what an engine is planned for: one prompt of a small context or of any, or several
_SMALL, _ONE, _MANY = range(3)
_END = 2**31 - 1  # beyond every position
_OPTIONS = ("use_tqdm", "lora_request", "priority")  # further arguments of ``LLM.generate``


@dataclass
class _Held:
    """An engine with what it was built for."""

    llm: LLM
    params: Params  # that it serves
    size: int
    edit: Mapping[str, Any]
    edits: StepEdits | None

    def fits(self, size: int, edit: Mapping[str, Any], edits: StepEdits | None) -> bool:
        """True if it can answer: the functions are the very same objects."""
        if size > self.size or edit.keys() != self.edit.keys():
            return False
        if any(edit[name] is not self.edit[name] for name in edit):
            return False
        places = [None if one is None else one[1:] for one in (edits, self.edits)]
        return places[0] == places[1]


class OwnEngines:
    """The engines of a loaded model: one without edits, and one with the last edits.

    Each is planned for one prompt where one is given, as ``jaxinfer generate`` does, and planned
    anew when a call needs more.
    """

    def __init__(self, plan: EnginePlan, settings: Mapping[str, Any], replan: Replan) -> None:
        """``plan`` is that of ``settings``; ``replan`` makes one of other settings."""
        self._plan = plan
        self._settings = settings
        self._replan = replan
        self._held: dict[bool, _Held] = {}  # by whether it edits

    def generate(
        self,
        progress: Progress,
        params: Params,
        prompts: Any,
        sampling_params: Sampling = None,
        *,
        edit: Mapping[str, Any] = MappingProxyType({}),
        positions: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """``LLM.generate`` with these weights, which ``LanguageModel.with_params`` may replace."""
        for name in options.keys() - _OPTIONS:
            raise ArgumentError(
                f"generate has no argument {name!r}; sampling is that of a SamplingParams, such as "
                f"SamplingParams(max_tokens=8), and options are {', '.join(_OPTIONS)}"
            )
        parsed = parse_prompts(prompts, self._plan.tokenizer)
        edits = None
        if edit or positions is not None:
            edits = self._checked(edit, positions, parsed)
        size, held = self._size(parsed, sampling_params), self._held.get(bool(edits))
        if held is None or not held.fits(size, edit, edits):
            self._held.pop(bool(edits), None)  # its memory is free for the next one
            del held
            held = self._held[bool(edits)] = self._built(progress, params, size, edit, edits)
        if held.params is not params:
            held.llm.update_weights(params)
            held.params = params
        return held.llm.generate(prompts, sampling_params, **options)

    def _built(
        self,
        progress: Progress,
        params: Params,
        size: int,
        edit: Mapping[str, Any],
        edits: StepEdits | None,
    ) -> _Held:
        plan = self._plan
        if size != _MANY or edits is not None:
            settings = {k: v for k, v in self._settings.items() if k != "tap_points" or not edits}
            if size != _MANY:
                total = SINGLE_CONTEXT if size == _SMALL else SINGLE_CONTEXT + 1
                settings = settings_for_one(total, settings)
            plan = self._replan(settings)
        plan = replace(plan, loaded=params)
        if edits is None:
            engine = build_engine(plan, progress)
        else:  # executables of functions that no other process has, so the cache must not get them
            program = replace(plan.program, edits=edits)
            with TemporaryDirectory(prefix="jaxinfer-edit-") as folder:
                plan = replace(plan, program=program, cache_dir=Path(folder))
                engine = build_engine(plan, progress)
        return _Held(LLM.of_engine(engine, plan.config, progress), params, size, edit, edits)

    def _size(self, prompts: Sequence[Prompt], sampling: Sampling) -> int:
        if sampling is None:
            sampling = self._plan.facts.default_sampling
        several = [sampling] if isinstance(sampling, SamplingParams) else [*sampling]
        if len(prompts) != 1 or len(several) != 1 or several[0].n != 1:
            return _MANY
        most = several[0].max_tokens
        if most is None or len(prompts[0].token_ids) + most > SINGLE_CONTEXT:
            return _ONE
        return _SMALL

    def _checked(
        self, edit: Mapping[str, Any], positions: Any, prompts: Sequence[Prompt]
    ) -> StepEdits:
        """The edits of steps; raises ``ArgumentError`` or, for a point, ``ConfigError``."""
        if not edit:
            raise ArgumentError("positions are those of an edit; give edit={point: function}")
        functions: dict[str, Any] = {}
        for name, value in edit.items():
            for point in points_named([name], self._plan.program.model.config, "edit"):
                functions[point.name] = _function(point, value)
        length = len(prompts[0].token_ids) if len(prompts) == 1 else None
        return StepEdits(tuple(functions.items()), *_places(positions, length))


def _function(point: Point, value: Any) -> Edit:
    """The function of a point; of a vector, one that adds it."""
    if callable(value):
        return cast("Edit", value)
    vector = np.asarray(value, np.float32)
    if vector.size != point.width:
        raise ArgumentError(
            f"the edit of {point.name} adds {list(vector.shape)}, and an activation there is "
            f"{list(point.shape)}; give a function, or a vector of {point.width} values"
        )
    return partial(added_vector, vector.reshape(point.shape))


def _places(
    positions: Any, length: int | None
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
    """Positions, or the first one and that after the last, as ``StepEdits`` has them.

    ``length`` is that of a single prompt, from whose end negative ones count.
    """
    if positions is None:
        return None, None
    if isinstance(positions, slice):
        span = cast("slice[Any, Any, Any]", positions)
        if span.step not in (None, 1):
            raise ArgumentError("positions must be a slice without a step, or the positions")
        first, end = span.start or 0, span.stop
        return None, (_place(first, length), _END if end is None else _place(end, length))
    several = cast("Iterable[Any]", positions) if isinstance(positions, Iterable) else (positions,)
    return tuple(_place(position, length) for position in several), None


def _place(position: Any, length: int | None) -> int:
    try:
        place = operator.index(position)
    except TypeError:
        raise ArgumentError(
            f"positions must be an int, several, or a slice, got {position!r}"
        ) from None
    if place < 0 and length is not None:
        place += length
    if place < 0:
        raise ArgumentError(
            f"position {position} is before the first token; count from 0, or, with one prompt, "
            "from its end"
        )
    return place
