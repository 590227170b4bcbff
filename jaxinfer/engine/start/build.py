"""From settings to a running engine: find the model, plan memory, load, run.

Everything is checked before slow work begins. Defaults that depend on the device are added here.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from jaxinfer.core.config import (
    COMPILED,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_PAGE_SIZE,
    EngineConfig,
    Limits,
    cache_root,
    prepare_backend,
)
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.points import Point
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.step import TAPS, PageGroup
from jaxinfer.core.structured import FormLimits
from jaxinfer.engine.facts import facts_of_configs
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.news import EngineStats
from jaxinfer.engine.start.later import LaterExecutables
from jaxinfer.engine.start.loading import load
from jaxinfer.engine.start.model import model_of
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.task import pooling_of, with_task
from jaxinfer.engine.start.weights import EngineWeights
from jaxinfer.exec.compile.buckets import bucket_table
from jaxinfer.exec.compile.build import compile_bundle
from jaxinfer.exec.compile.bundle import Bundle, Manifest, load_kernel_runtime, open_bundle
from jaxinfer.exec.compile.memory_plan import (
    MemoryPlan,
    fitting_seqs,
    plan_memory,
    program_memory,
    shown,
    snapshots_for,
)
from jaxinfer.exec.compile.mixed_tokens import free_prompt_tokens
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import device_memory, release_freed_blocks
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.step.points import points_named
from jaxinfer.models.base import Model
from jaxinfer.nn.placement import default_placement, placement_in
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import resolve_source
from pallas_kernels.native.library import BrokenLibrary, library
from pallas_kernels.pins import Pins, checked_pins
from pallas_kernels.tuned import check_choices


def plan_engine(
    config: EngineConfig,
    progress: Progress = NO_PROGRESS,
    platform_of_backend: Callable[[], str] | None = None,
    mesh: Mesh | None = None,
) -> EnginePlan:
    """Resolve the model and all sizes; raises a ``JaxinferError`` if something does not fit.

    ``platform_of_backend``: waits for a backend that is starting, see ``start.backend_starting``.
    ``mesh``: the devices, by default JAX's default device.
    """
    _check_native()
    cache_dir = cache_root(config.cache_dir)
    bundle = None if config.bundle is None else open_bundle(Path(config.bundle))
    if bundle is not None:
        config = with_bundle_settings(config, bundle)
    prepare_backend(config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION)
    platform = check_device(platform_of_backend)
    chose_seqs = config.max_num_seqs is not None
    chose_mixed = config.max_num_mixed_tokens is not None
    placement = default_placement() if mesh is None else placement_in(mesh)
    if bundle is not None:
        bundle.check_machine(placement)
    config = with_device_defaults(config, platform)
    pins = _pins(config, platform)
    _check_tuned()
    source = resolve_source(
        config.model,
        load_format=config.load_format,
        cache_dir=cache_dir,
        progress=progress,
        tokenizer=config.tokenizer,
        revision=config.revision,
        download_dir=config.download_dir,
    )
    config, source = with_task(config, source)
    source, model = model_of(source, config, platform)
    if source.checkpoint is not None:
        plan_params(model, source.checkpoint)  # names and shapes, before anything slow begins
    if not chose_mixed:
        config = replace(config, max_num_mixed_tokens=_mixed_tokens(config, model))
    if bundle is not None:
        bundle.check_model(model)
    spec = None if config.skip_tokenizer_init else source.tokenizer_spec()
    program = Program(model, _limits(config, model), placement.platform, pins, placement)
    config, program = _with_fitting_seqs(config, program, chosen=chose_seqs, progress=progress)
    program, memory = _with_pages(config, program)
    if bundle is not None:
        bundle.check_program(program)
    facts = facts_of_configs(
        source.name,
        model.config.vocab_size,
        source.hf_config,
        {**source.runtime_sampling, **source.generation_config},
        use_generation_config=config.generation_config == "auto",
    )
    facts = replace(facts, pooling=pooling_of(config, source, model))
    load_kernel_runtime()
    return EnginePlan(
        config=config,
        source=source,
        program=program,
        memory=memory,
        tokenizer_spec=spec,
        config_facts=facts,
        cache_dir=cache_dir,
        bundle=bundle,
    )


def _mixed_tokens(config: EngineConfig, model: Model) -> int | None:
    """The device's default for prompt tokens beside decode rows, or more for a model's experts."""
    default, most = config.max_num_mixed_tokens, config.max_num_batched_tokens
    assert most is not None, "with_device_defaults"
    return default and max(default, min(free_prompt_tokens(model), most))


def _pins(config: EngineConfig, platform: str) -> Pins:
    try:
        return checked_pins(config.pinned_kernels, platform)
    except ValueError as error:
        raise ConfigError(f"kernels {config.kernels!r} cannot be used: {error}") from error


def _check_native() -> None:
    try:
        library()
    except BrokenLibrary as error:
        raise EngineError(str(error)) from error


def _check_tuned() -> None:
    try:
        check_choices()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _with_fitting_seqs(
    config: EngineConfig, program: Program, *, chosen: bool, progress: Progress
) -> tuple[EngineConfig, Program]:
    """The settings and the program for no more sequences than fit with their layer state. Raises
    ``ConfigError`` for a number that the user has ``chosen``, or if no sequence fits.
    """
    limits, each = program.limits, program.model.state.bytes_per_slot
    if not each:
        return config, program
    device = device_memory(program.placement.device)
    fitting = fitting_seqs(config, program, device, chosen=chosen)
    if fitting == limits.max_num_seqs:
        return config, program
    needed = (
        f"{limits.max_num_seqs} sequences need {shown(limits.num_state_rows * each)} of layer "
        f"state ({shown(each)} for each of {limits.max_num_seqs} slots, the padding slot and "
        f"{limits.num_snapshots} snapshots)"
    )
    if not fitting:
        raise ConfigError(
            f"{needed} and not one fits; raise kv_cache_memory_bytes (on a GPU: "
            "gpu_memory_utilization), or use a larger device"
        )
    if chosen:
        raise ConfigError(
            f"{needed} and {fitting} fit; set max_num_seqs to {fitting} or less, or raise "
            "kv_cache_memory_bytes (on a GPU: gpu_memory_utilization)"
        )
    progress.note(f"{needed}; serving {fitting}, set max_num_seqs to choose another number")
    config = replace(config, max_num_seqs=fitting)
    return config, replace(program, limits=_limits(config, program.model))


def _with_pages(config: EngineConfig, program: Program) -> tuple[Program, MemoryPlan]:
    """The program with the number of pages in its limits, and the memory plan."""
    device = device_memory(program.placement.device)
    num_pages = plan_memory(config, program, device).num_pages
    limits = msgspec.structs.replace(program.limits, num_pages=num_pages)
    if config.max_model_len is None:  # derived: as much of the model's context as fits
        limits = msgspec.structs.replace(limits, max_model_len=limits.longest_context())
    program = replace(program, limits=limits)
    return program, program_memory(program, device)


def _limits(config: EngineConfig, model: Model) -> Limits:
    """The limits for a model, without pages."""
    state, names = model.state, () if config.tap_points is None else config.tap_points.split(",")
    return limits_of(
        config,
        _context(config, model),
        state.groups,
        has_slot_state=state.bytes_per_slot > 0,
        points=points_named(names, model.config),
    )


def limits_of(
    config: EngineConfig,
    max_model_len: int,
    groups: tuple[PageGroup, ...] = (PageGroup(),),
    *,
    has_slot_state: bool = False,
    points: tuple[Point, ...] = (),
) -> Limits:
    """The limits that settings with their device's defaults amount to, without pages.

    ``groups``: those of the model's layers. A model with state for each sequence reuses prefixes
    through snapshots. ``points``: those that requests may read and steer.
    """
    max_num_seqs, chunk = config.max_num_seqs, config.max_num_batched_tokens
    decode_start, mixed_start = config.decode_bucket_start, config.mixed_bucket_start
    prefill_start, prefill_factor = config.prefill_bucket_start, config.prefill_bucket_factor
    assert max_num_seqs and chunk and decode_start and mixed_start, "with_device_defaults"
    assert prefill_start and prefill_factor, "with_device_defaults"
    # the mean and the first token need hidden states of the whole prompt
    reuses = config.enable_prefix_caching and config.pooling in (None, "last")
    snapshots = reuses and has_slot_state
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
            max_num_mixed_tokens=config.max_num_mixed_tokens,
            variants=(TAPS,) if points else (),
            pools=config.pooling is not None,
        ),
        enable_prefix_caching=reuses,
        prefill_first=bool(config.prefill_first),
        groups=groups,
        num_snapshots=snapshots_for(max_num_seqs) if snapshots else 0,
        points=points,
        pooling=config.pooling or "",
        form=FormLimits(config.max_form_seconds, config.max_form_bytes),
    )


def build_engine(
    plan: EnginePlan, progress: Progress = NO_PROGRESS, *, serves_early: bool = False
) -> Engine:
    """Build a ready engine: weights are on the device, and every executable that a request may need
    is compiled, loaded and has run once. Raises a ``JaxinferError``.

    With ``serves_early`` it has only those that hold every step, and a thread compiles or loads the
    others (``exec.compile.background``), and the draws of requests without a seed are random unless
    the settings have one. That is for engines that run for long: if the process exits before all
    are compiled, the bundle is not saved.
    """
    if (num_devices := plan.program.placement.num_devices) > 1:
        raise ConfigError(
            f"an engine serves on one device, and the mesh has {num_devices}; use a mesh of one"
        )
    loaded = load(plan, progress, serves_early)
    (executables, compile_seconds), (state, load_seconds) = loaded.executables, loaded.state
    executor = Executor(plan.program, executables, *state)
    release_freed_blocks(plan.program.placement.device)
    executor.warm_up()
    loaded.tokenizer_read.result()
    later = None
    if executables.later is not None:
        later = LaterExecutables(executables.later, executor, executor.buckets)
    start_stats = EngineStats(
        num_executables=len(executables.by_name),
        num_awaited=len(plan.program.names()) - len(executables.by_name),
        num_compiled=executables.compiled,
        compile_seconds=compile_seconds,
        load_seconds=load_seconds,
    )
    seed = plan.config.seed
    if seed is None:
        seed = secrets.randbits(63) if serves_early else 0
    engine = Engine(
        executor,
        plan.program.limits,
        plan.facts,
        plan.tokenizer,
        seed=seed,
        overlap=plan.config.overlap,
        start=start_stats,
        weights=EngineWeights(plan, executor),
        later=later,
    )
    if executables.later is not None:
        executables.later.begin_others()
    return engine


def write_planned(
    plan: EnginePlan, folder: Path, progress: Progress = NO_PROGRESS
) -> tuple[Manifest, bool]:
    """Write the executables of a plan as a bundle, without weights; see ``compile_bundle``."""
    return compile_bundle(plan.store, folder, settings=plan.bundle_settings, progress=progress)


def with_bundle_settings(config: EngineConfig, bundle: Bundle) -> EngineConfig:
    """Replace missing settings by the bundle's; raises ``ConfigError`` for contradicting ones."""
    changes: dict[str, Any] = {}
    for name in COMPILED:
        given, made = getattr(config, name), bundle.manifest.settings.get(name)
        if given in (None, "auto"):
            changes[name] = made
        elif given != made and name != "num_pages":  # compared after planning, which may need fewer
            raise ConfigError(
                f"{name} is {'not set' if made is None else made} in the bundle {bundle.folder} "
                f"and {given} was asked for; leave it out, or compile another bundle"
            )
    return replace(config, **changes)


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


def check_device(platform_of_backend: Callable[[], str] | None = None) -> str:
    """The platform of the first device; raises ``EngineError`` when there is none."""
    try:
        return (platform_of_backend or jax.default_backend)()
    except Exception as error:  # JAX has no specific class for it
        clear_backends()  # else JAX would fall back to the CPU on the next call
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        wanted = f" for JAX_PLATFORMS={asked}" if asked else ""
        words = " ".join(f"{type(error).__name__} {error}".split())
        raise EngineError(
            f"JAX finds no device{wanted} ({words}); check JAX_PLATFORMS, that jax[cuda12] or "
            "jax[cuda13] is installed for a GPU, and `jaxinfer doctor`"
        ) from error


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
