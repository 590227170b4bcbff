"""Builds the engine of a recording again, to check its steps on this machine's device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import RecordingError
from jaxinfer.core.progress import Progress
from jaxinfer.core.request import Request
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.record.check import Check
from jaxinfer.engine.record.file import Header
from jaxinfer.engine.record.locate import PageRunner
from jaxinfer.engine.record.restores import Restores
from jaxinfer.engine.start.build import build_engine, plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.tiers import mover_of
from jaxinfer.exec.compile.fingerprint import of_machine, of_model

if TYPE_CHECKING:
    from jaxinfer.exec.run.executor import Executor


def checked_plan(
    header: Header, progress: Progress, *, model: str | None = None, cache_dir: str | None = None
) -> tuple[EnginePlan, list[str]]:
    """The plan of a recording's engine, and a sentence on each difference that may change bits.

    ``model``: where the model is here. Raises ``RecordingError`` if tokens cannot be compared:
    they are redacted, or the recording is of another device or model, or has other limits.
    """
    if header.is_redacted:
        raise RecordingError("the recording has no tokens (--record-redact); leave out --check")
    if not header.model_fields:
        raise RecordingError("the recording is of no model; leave out --check")
    sizes = {"page_size": header.limits.page_size, "max_model_len": header.limits.max_model_len}
    config = replace(
        header.config,
        **sizes,
        model=model or header.config.model,
        num_pages=sum(header.limits.num_pages),
        kv_cache_memory_bytes=None,
        cache_dir=cache_dir,
        download_dir=None,
        bundle=None,
        record=None,
        kv_events_config=None,
        # the units of tiers are saved and loaded again in memory of the replay
        kv_offloading_size=None,
        kv_offloading_disk=None,
        kv_offloading_disk_size=None,
        kv_connector=None,
        preemption="recompute",
    )
    plan = plan_engine(config, progress)
    here = of_machine(plan.program.placement)
    was, device = header.machine.get("device", "none"), here["device"]
    if was != device:
        raise RecordingError(
            f"the recording is of the device {was}, and this machine has {device}; tokens can only "
            "be compared on the same kind, so leave out --check"
        )
    if differing := _differing(
        header.model_fields, of_model(plan.program.model), ("family sources",)
    ):
        raise RecordingError(
            f"the recording is of the model {header.model}, and {config.model} differs from it in "
            f"{differing[0]}; give the recorded one with --model"
        )
    limits = plan.program.limits
    for name in limits.__struct_fields__:
        if getattr(limits, name) != getattr(header.limits, name):
            raise RecordingError(
                f"the recorded engine had another {name}, which this machine does not give; leave "
                "out --check"
            )
    notes = [
        f"{name} was {header.machine.get(name, 'not set')} and is {here.get(name, 'not set')}"
        for name in _differing(header.machine, here)
    ]
    if header.weights != plan.source.fingerprint:
        notes.append("the weights' files are not those of the recording, or have another date")
    return plan, notes


def check_of(plan: EnginePlan, header: Header, progress: Progress) -> tuple[Check, PageRunner]:
    """Build the engine; the check of a replay, and what runs its steps."""
    engine, restores = build_engine(plan, progress), None
    if header.config.kv_offloading_size is not None:
        executor = cast("Executor", engine.executor)
        restores = Restores(mover_of(plan.program, executor))
    runner = cast("PageRunner", engine.executor)
    compiled = partial(_compiled, engine)
    return Check(runner, compiled, _loader(engine), restores=restores), runner


def _compiled(engine: Engine, request: Request) -> Constraint:
    return cast("Constraint", engine.constraints.submit(request.sampling).result())


def _loader(engine: Engine):
    def load(reference: str) -> None:
        engine.weights.replace(engine.weights.prepared(reference))

    return load


def _differing(one: dict[str, str], other: dict[str, str], but: Iterable[str] = ()) -> list[str]:
    """The names of fields that differ."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if name not in but and one.get(name) != other.get(name)]
