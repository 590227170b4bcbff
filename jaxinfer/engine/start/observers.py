"""The observers of an engine that its settings ask for."""

from __future__ import annotations

from pathlib import Path

from jaxinfer.core.kv_events import kv_events_config
from jaxinfer.core.version import VERSION
from jaxinfer.engine.events.publisher import EventPublisher
from jaxinfer.engine.loop.interfaces import Observer
from jaxinfer.engine.record.file import Header
from jaxinfer.engine.record.recorder import Recorder
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.fingerprint import of_machine, of_model


def observers_of(plan: EnginePlan) -> tuple[Observer, ...]:
    """The observers; raises ``ConfigError`` if a recording cannot be written, or an endpoint of
    events cannot be opened.
    """
    config, found = plan.config, list[Observer]()
    if config.record is not None:
        found.append(Recorder(Path(config.record), config.record_size, header_of(plan)))
    if config.kv_events_config is not None:
        events = kv_events_config(config.kv_events_config)
        if events.publishes:
            found.append(EventPublisher(events, plan.program.limits))
    return tuple(found)


def header_of(plan: EnginePlan) -> Header:
    """The header of a recording of this plan's engine."""
    program = plan.program
    return Header(
        run="",
        number=0,
        jaxinfer=VERSION,
        config=plan.config,
        limits=program.limits,
        model=plan.source.name,
        model_fields=of_model(program.model),
        weights=plan.source.fingerprint,
        machine=of_machine(program.placement),
        overlap=plan.config.overlap,
        is_redacted=plan.config.record_redact,
    )
