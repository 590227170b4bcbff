"""From settings to a running engine: find the model, plan memory, load, run.

Everything is checked before slow work begins. Defaults that depend on the device are added here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from jaxinfer.core.config import (
    COMPILED,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    cache_root,
    prepare_backend,
)
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.loop.later import LaterBuckets
from jaxinfer.engine.requests.facts import facts_of_configs
from jaxinfer.engine.requests.news import EngineStats
from jaxinfer.engine.start.hosts import described, share_executables, wait_for_others
from jaxinfer.engine.start.invariance import check_invariant, fixed_pins
from jaxinfer.engine.start.join import join, starting
from jaxinfer.engine.start.loading import load
from jaxinfer.engine.start.model import model_of
from jaxinfer.engine.start.observers import observers_of
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.task import pooling_of, with_task
from jaxinfer.engine.start.tiers import begin_tiers, check_tiers, free_host_bytes, open_disk
from jaxinfer.engine.start.weights import EngineWeights
from jaxinfer.exec.compile.build import compile_bundle
from jaxinfer.exec.compile.bundle import Bundle, Manifest, load_kernel_runtime, open_bundle
from jaxinfer.exec.compile.memory_plan import DeviceMemory, program_memory
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.sizes import resolve, with_device_defaults
from jaxinfer.exec.run.device_memory import least_memory, release_freed_blocks
from jaxinfer.exec.run.executor import Executor
from jaxinfer.nn.placement import Placement, default_placement, one_kind, placement_in
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import resolve_source
from pallas_kernels.harness.pins import Pins, checked_pins
from pallas_kernels.harness.tuned import check_choices
from pallas_kernels.native.library import BrokenLibrary, library

# of bundles that were made before there were these settings
_OF_OLD_BUNDLES = MappingProxyType(
    {"tensor_parallel_size": 1, "enable_expert_parallel": False, "batch_invariant": False}
)


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
    joined = join(config)
    with starting(joined):
        plan = _planned(config, cache_dir, bundle, progress, platform_of_backend, mesh)
        if joined is None:
            return plan
        joined.agree(described(plan))
        return replace(plan, joined=joined)


def _planned(
    config: EngineConfig,
    cache_dir: Path,
    bundle: Bundle | None,
    progress: Progress,
    platform_of_backend: Callable[[], str] | None,
    mesh: Mesh | None,
) -> EnginePlan:
    """See ``plan_engine``."""
    check_device(platform_of_backend)
    placement = _placement(config, mesh)
    config = replace(
        config,
        tensor_parallel_size=placement.num_devices,
        enable_expert_parallel=bool(config.enable_expert_parallel),
        batch_invariant=bool(config.batch_invariant),
    )
    if bundle is not None:
        bundle.check_machine(placement)
    _check_tuned()
    device = least_memory(placement.own_devices)
    plan = _plan_on(config, placement, device, cache_dir, progress, bundle)
    load_kernel_runtime()
    return plan


def plan_elsewhere(config: EngineConfig, placement: Placement, device: DeviceMemory) -> EnginePlan:
    """The plan for devices that this machine need not have; see ``plan_engine``.

    ``placement`` states their platform and number. Nothing of the plan can be loaded or run here.
    """
    config = replace(
        config,
        tensor_parallel_size=placement.num_devices,
        enable_expert_parallel=bool(config.enable_expert_parallel),
        batch_invariant=bool(config.batch_invariant),
    )
    return _plan_on(config, placement, device, cache_root(config.cache_dir), NO_PROGRESS, None)


def _plan_on(
    config: EngineConfig,
    placement: Placement,
    device: DeviceMemory | None,
    cache_dir: Path,
    progress: Progress,
    bundle: Bundle | None,
) -> EnginePlan:
    platform = placement.platform
    given, config = config, with_device_defaults(config, platform)
    pins = _pins(config, platform)
    source = resolve_source(
        config.model,
        load_format=config.load_format,
        cache_dir=cache_dir,
        progress=progress,
        tokenizer=config.tokenizer,
        revision=config.revision,
        hf_overrides=config.hf_overrides,
        download_dir=config.download_dir,
    )
    config, source = with_task(config, source)
    source, model = model_of(source, config, platform, placement.num_devices)
    if source.checkpoint is not None:
        plan_params(model, source.checkpoint)  # names and shapes, before anything slow begins
    if bundle is not None:
        bundle.check_model(model)
    spec = None if config.skip_tokenizer_init else source.tokenizer_spec()
    sizes = resolve(config, given, model, device, pins, placement)
    for note in sizes.notes:
        progress.note(note)
    program = Program(model, sizes.limits, platform, pins, placement)
    check_invariant(program)
    if bundle is not None:
        bundle.check_program(program)
    has_tiers = config.kv_offloading_size is not None
    memory = program_memory(program, device, has_tiers=has_tiers)
    taken = memory.total_bytes if device is None else 0
    check_tiers(config, program, free_host_bytes() - taken)
    facts = facts_of_configs(
        source.name,
        model.config.vocab_size,
        source.hf_config,
        {**source.runtime_sampling, **source.generation_config},
        use_generation_config=config.generation_config == "auto",
    )
    facts = replace(facts, pooling=pooling_of(config, source, model))
    return EnginePlan(
        config=sizes.config,
        source=source,
        program=program,
        memory=memory,
        tokenizer_spec=spec,
        config_facts=facts,
        cache_dir=cache_dir,
        bundle=bundle,
    )


def _placement(config: EngineConfig, mesh: Mesh | None) -> Placement:
    """The devices: those of the mesh, or as many as the settings say."""
    count = config.tensor_parallel_size
    if mesh is None:
        return default_placement(count or 1, config.num_hosts)
    if config.hosts is not None:
        raise ConfigError("a mesh is of one host; leave out num_hosts")
    placement = placement_in(mesh)
    if count not in (None, placement.num_devices):
        raise ConfigError(
            f"tensor_parallel_size is {count}, and the mesh has {placement.num_devices} devices; "
            "leave it out"
        )
    one_kind(list(placement.devices))
    return placement


def _pins(config: EngineConfig, platform: str) -> Pins:
    if config.batch_invariant:
        return fixed_pins(config, platform)
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


def build_engine(
    plan: EnginePlan, progress: Progress = NO_PROGRESS, *, serves_early: bool = False
) -> Engine:
    """Build a ready engine: weights are on the device, and every executable that a request may need
    is compiled, loaded and has run once. Raises a ``JaxinferError``.

    With ``serves_early`` it has only those that hold every step, a thread compiles or loads the
    others after ``Engine.load_others`` (``exec.compile.background``), and the draws of requests
    without a seed are random unless the settings have one. That is for engines that run for long:
    if the process exits before all are compiled, the bundle is not saved.
    """
    devices, observers = plan.program.placement.devices, observers_of(plan)
    disk = open_disk(plan)
    # a GPU that loads an executable may wait for one that waits for it in a step
    loads_later = serves_early and len(devices) == 1
    with starting(joined := plan.joined):
        if joined is not None:
            share_executables(plan, progress)
        loaded = load(plan, progress, loads_later)
        if joined is not None:
            wait_for_others(joined)
    (executables, compile_seconds), (state, load_seconds) = loaded.executables, loaded.state
    send = None if joined is None else joined.send
    executor = Executor(plan.program, executables, *state, send)
    for device in plan.program.placement.own_devices:
        release_freed_blocks(device)
    executor.warm_up()
    loaded.tokenizer_read.result()
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
    return Engine(
        executor,
        plan.program.limits,
        plan.facts,
        plan.tokenizer,
        seed=seed,
        overlap=plan.config.overlap,
        start=start_stats,
        weights=EngineWeights(plan, executor),
        later=None if (later := executables.later) is None else LaterBuckets(later, executor),
        tiers=begin_tiers(plan, executor, disk, progress),
        observers=observers,
    )


def write_planned(
    plan: EnginePlan, folder: Path, progress: Progress = NO_PROGRESS
) -> tuple[Manifest, bool]:
    """Write the executables of a plan as a bundle, without weights; see ``compile_bundle``."""
    return compile_bundle(plan.store, folder, settings=plan.bundle_settings, progress=progress)


def with_bundle_settings(config: EngineConfig, bundle: Bundle) -> EngineConfig:
    """Replace missing settings by the bundle's; raises ``ConfigError`` for contradicting ones."""
    changes: dict[str, Any] = {}
    for name in COMPILED:
        made = bundle.manifest.settings.get(name, _OF_OLD_BUNDLES.get(name))
        given = getattr(config, name)
        if given in (None, "auto"):
            changes[name] = made
        elif given != made and name != "num_pages":  # compared after planning, which may need fewer
            raise ConfigError(
                f"{name} is {'not set' if made is None else made} in the bundle {bundle.folder} "
                f"and {given} was asked for; leave it out, or compile another bundle"
            )
    return replace(config, **changes)


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
