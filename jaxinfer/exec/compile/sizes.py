"""The sizes of an engine: from settings, a model and a device to limits, as one pure function."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from math import gcd
from typing import Any

import msgspec

from jaxinfer.core.config import DEFAULT_PAGE_SIZE, EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.limits import Limits
from jaxinfer.core.points import Point
from jaxinfer.core.step import TAPS, PageGroup
from jaxinfer.core.structured import FormLimits
from jaxinfer.exec.compile.buckets import GPU_ROWS, bucket_table
from jaxinfer.exec.compile.memory_plan import (
    DeviceMemory,
    fitting_seqs,
    plan_memory,
    shown,
    snapshots_for,
)
from jaxinfer.exec.compile.mixed_tokens import free_prompt_tokens
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.step.points import points_named
from jaxinfer.models.base import Model
from jaxinfer.nn.placement import Placement
from jaxinfer.sched.state import missing_size
from pallas_kernels.harness.pins import Pins


@dataclass(frozen=True)
class Sizes:
    """The sizes of an engine."""

    config: EngineConfig  # with numbers in place of None
    limits: Limits
    notes: tuple[str, ...] = ()  # for the user: what is smaller than it was set or planned


def resolve(
    config: EngineConfig,
    given: EngineConfig,
    model: Model,
    device: DeviceMemory | None,
    pins: Pins,
    placement: Placement,
) -> Sizes:
    """The sizes of an engine; raises ``ConfigError`` if something does not fit.

    ``config`` has the device's defaults where ``given`` has None; these may be reduced, or raised
    for a model with experts. ``device`` is None if it reports no memory (a CPU).
    """
    if given.max_num_mixed_tokens is None:
        config = replace(config, max_num_mixed_tokens=_mixed_tokens(config, model))
    platform, chosen = placement.platform, given.max_num_seqs is not None
    limits = _limits(config, model, platform)
    program = Program(model, limits, platform, pins, placement)
    fitting, note = _fitting_seqs(config, program, device, chosen=chosen)
    if fitting != limits.max_num_seqs:
        config = replace(config, max_num_seqs=fitting)
        program = replace(program, limits=_limits(config, model, platform))
    limits = _with_pages(config, program, device)
    return Sizes(config, limits, tuple(filter(None, (note, _unused_pages(config, limits)))))


def with_device_defaults(config: EngineConfig, platform: str) -> EngineConfig:
    """Replace missing settings by the platform's defaults (configs/engine)."""
    name = "cpu" if platform == "cpu" else "gpu"
    text = files("jaxinfer.configs").joinpath("engine", f"{name}.toml").read_text()
    defaults: dict[str, Any] = tomllib.loads(text)
    if config.dtype != "auto":
        del defaults["dtype"]
    missing = {
        key: value for key, value in defaults.items() if getattr(config, key) in (None, "auto")
    }
    return replace(config, **missing)


def _mixed_tokens(config: EngineConfig, model: Model) -> int | None:
    """The device's default for prompt tokens beside decode rows, or more for a model's experts."""
    default, most = config.max_num_mixed_tokens, config.max_num_batched_tokens
    assert most is not None, "with_device_defaults"
    return default and max(default, min(free_prompt_tokens(model), most))


def _fitting_seqs(
    config: EngineConfig, program: Program, device: DeviceMemory | None, *, chosen: bool
) -> tuple[int, str]:
    """The sequences that fit with their layer state, and a note if these are fewer than planned.

    Raises ``ConfigError`` for a number that the user has ``chosen``, or if no sequence fits.
    """
    limits, each = program.limits, program.model.state.bytes_per_slot
    if not each:
        return limits.max_num_seqs, ""
    fitting = fitting_seqs(config, program, device, chosen=chosen)
    if fitting == limits.max_num_seqs:
        return fitting, ""
    needed = (
        f"{limits.max_num_seqs} sequences need {shown(limits.num_state_rows * each)} of layer "
        f"state ({shown(each)} for each of {limits.max_num_seqs} slots, the padding slot and "
        f"{limits.num_snapshots} snapshots)"
    )
    if not fitting:
        fewer = "" if config.num_snapshots is None else "lower num_snapshots, or "
        raise ConfigError(
            f"{needed} and not one fits; {fewer}raise kv_cache_memory_bytes (on a GPU: "
            "gpu_memory_utilization), or use a larger device"
        )
    if chosen:
        raise ConfigError(
            f"{needed} and {fitting} fit; set max_num_seqs to {fitting} or less, or raise "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization)"
        )
    return fitting, f"{needed}; serving {fitting}, set max_num_seqs to choose another number"


def _with_pages(config: EngineConfig, program: Program, device: DeviceMemory | None) -> Limits:
    """The program's limits with the number of pages."""
    num_pages = plan_memory(config, program, device).num_pages
    limits = msgspec.structs.replace(program.limits, num_pages=num_pages)
    if config.max_model_len is None:  # derived: as much of the model's context as fits
        limits = msgspec.structs.replace(limits, max_model_len=limits.longest_context())
    return limits


def _unused_pages(config: EngineConfig, limits: Limits) -> str:
    """A note if the pages that the user has set are more than all sequences can fill."""
    made = sum(limits.num_pages)
    if config.num_pages is None or config.num_pages <= made:
        return ""
    return (
        f"num_pages is {config.num_pages}, and {limits.max_num_seqs} sequences of "
        f"{limits.max_model_len} tokens fill {made} (the padding page included), which are made; "
        "raise max_num_seqs or max_model_len to use more"
    )


def _limits(config: EngineConfig, model: Model, platform: str) -> Limits:
    """The limits for a model, without pages."""
    if config.num_snapshots is not None and not model.state.bytes_per_slot:
        raise ConfigError(
            f"num_snapshots is {config.num_snapshots}, and {model.architecture} has no state for "
            "each sequence, whose pages are reused without snapshots; leave it out"
        )
    if config.num_snapshots is not None and not _reuses_prefixes(config):
        off = "enable_prefix_caching is off"
        reason = "the task reuses none" if config.enable_prefix_caching else off
        raise ConfigError(
            f"num_snapshots is {config.num_snapshots}, which is for prefixes that are reused, and "
            f"{reason}; leave it out"
        )
    if not model.state.groups:
        raise ConfigError(
            f"no layer of this {model.architecture} reads other tokens than its own, and such "
            "models are not served; correct the kinds of layers in config.json"
        )
    state, names = model.state, () if config.tap_points is None else config.tap_points.split(",")
    return limits_of(
        replace(config, page_size=_page_size(config, model)),
        _context(config, model),
        state.groups,
        platform=platform,
        has_slot_state=state.bytes_per_slot > 0,
        align=state.align,
        points=points_named(names, model.config),
    )


def _page_size(config: EngineConfig, model: Model) -> int:
    """The tokens of a page; raises ``ConfigError`` if chunks of the context do not begin pages."""
    states = [layer.mixer.state(model.config.dtype) for layer in model.config.layers]
    chunk = gcd(*[state.chunk or 0 for state in states])
    if config.page_size is None:
        return gcd(DEFAULT_PAGE_SIZE, chunk)
    if chunk % config.page_size:
        raise ConfigError(
            f"page_size is {config.page_size}, and layers of this {model.architecture} attend "
            f"within chunks of {chunk} tokens, which have to be whole pages; set page_size to "
            f"{gcd(config.page_size, chunk)}, or leave it out"
        )
    return config.page_size


def _reuses_prefixes(config: EngineConfig) -> bool:
    """True if prompts may use pages of earlier ones."""
    # the mean and the first token need hidden states of the whole prompt
    return config.enable_prefix_caching and config.pooling in (None, "last")


def limits_of(
    config: EngineConfig,
    max_model_len: int,
    groups: tuple[PageGroup, ...] = (PageGroup(),),
    *,
    platform: str = "cpu",
    has_slot_state: bool = False,
    align: int = 1,
    points: tuple[Point, ...] = (),
) -> Limits:
    """The limits that settings with their device's defaults amount to, without pages.

    ``groups``: those of the model's layers. A model with state for each sequence reuses prefixes
    through snapshots, and computes prompts in multiples of ``align`` tokens. ``points``: those that
    requests may read and steer. Raises ``ConfigError`` if a step has no space for ``align`` tokens.
    """
    max_num_seqs, chunk = config.max_num_seqs, config.max_num_batched_tokens
    decode_start, mixed_start = config.decode_bucket_start, config.mixed_bucket_start
    prefill_start, prefill_factor = config.prefill_bucket_start, config.prefill_bucket_factor
    assert max_num_seqs and chunk and decode_start and mixed_start, "with_device_defaults"
    assert prefill_start and prefill_factor, "with_device_defaults"
    reuses = _reuses_prefixes(config)
    snapshots = reuses and has_slot_state

    def of_tokens(chunk: int, mixed: int | None) -> Limits:
        return Limits(
            num_pages=(0,) * (1 + max(group.pool for group in groups)),
            page_size=config.page_size or DEFAULT_PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=chunk,
            buckets=bucket_table(
                max_num_seqs,
                chunk,
                decode_start=decode_start,
                prefill_start=prefill_start,
                prefill_factor=prefill_factor,
                mixed_start=mixed_start,
                max_num_mixed_tokens=mixed,
                mixed_multiple=1 if platform == "cpu" else GPU_ROWS,
                variants=(TAPS,) if points else (),
                pools=config.pooling is not None,
            ),
            enable_prefix_caching=reuses,
            prefill_first=bool(config.prefill_first),
            groups=groups,
            num_snapshots=snapshots_for(config, max_num_seqs) if snapshots else 0,
            align=align,
            points=points,
            pooling=config.pooling or "",
            form=FormLimits(config.max_form_seconds, config.max_form_bytes),
            digests=config.record_digests,
        )

    def missing(chunk: int, mixed: int | None) -> str:
        limits = of_tokens(chunk, mixed)
        return missing_size(limits.buckets, limits, max_num_seqs)

    mixed = config.max_num_mixed_tokens
    limits = of_tokens(chunk, mixed)
    if align > 1 and (words := missing_size(limits.buckets, limits, max_num_seqs)):
        raise ConfigError(
            f"this model computes prompts in multiples of {align} tokens, and no step holds "
            f"{words}; {_remedy(chunk, mixed, align, missing)}"
        )
    return limits


def _remedy(
    chunk: int, mixed: int | None, align: int, missing: Callable[[int, int | None], str]
) -> str:
    """The fewest limits of tokens to raise, and the least power of two times ``align``, so that no
    step is ``missing``.
    """
    of_chunk, of_mixed = f"max_num_batched_tokens ({chunk})", f"max_num_mixed_tokens ({mixed})"
    size = align
    while True:  # a large step holds every prompt
        raised = max(chunk, size), None if mixed is None else max(mixed, size)
        if not missing(raised[0], mixed):
            return f"raise {of_chunk} to {size} or more"
        if not missing(chunk, raised[1]):
            return f"raise {of_mixed} to {size} or more"
        if not missing(*raised):
            return f"raise {of_chunk} and {of_mixed} to {size} or more"
        size *= 2


def _context(config: EngineConfig, model: Model) -> int:
    """The context; raises ``ConfigError`` if it is longer than the model's positions."""
    default, longest = model.config.lengths
    if config.max_model_len is None:
        return default
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's {longest} positions; "
            f"use {longest} or less"
        )
    return config.max_model_len
