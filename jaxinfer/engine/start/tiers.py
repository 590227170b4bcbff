"""The tiers of an engine: their settings are checked before weights are read, and costs are fitted.

Whether a prefix is restored or computed depends on two straight lines: the time of a step over its
tokens, and the time of a copy over its bytes. A start measures both.
"""

from __future__ import annotations

import hashlib
import math
import runpy
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, cast

from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.connector import Connector, Forms
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import Progress
from jaxinfer.core.step import Bucket
from jaxinfer.core.tiers import SNAPSHOTS, CostModel, SaveAhead
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.memory_plan import shown
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.tier_memory import block_bytes, saving_bytes
from jaxinfer.exec.run.copy_stream import CudaCopyStream
from jaxinfer.exec.run.cuda_driver import registered_memory
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.tiers.chain import Chain
from jaxinfer.exec.tiers.device_mover import DeviceMover
from jaxinfer.exec.tiers.disk import DiskTier
from jaxinfer.exec.tiers.disk_folder import check_folder, opened
from jaxinfer.exec.tiers.guarded import METHODS, Guarded
from jaxinfer.exec.tiers.host import HostTier, Memory
from jaxinfer.exec.tiers.locked_memory import LockedMemory
from jaxinfer.exec.tiers.mover import ArrayMover, forms_of
from jaxinfer.exec.tiers.runner import TierRunner, policy_of

GIB = 1 << 30
FORMAT = 1  # of the disk tier; raised when files or keys change
MEASURED_RUNS = 4
TIER_SHARE = 0.5  # of the host tier, for pages that the device still has
CPU_BYTES = 4 << 20  # that a request waits for, if it arrives at an idle engine on a CPU: 2 ms


def check_tiers(config: EngineConfig, program: Program, free_bytes: int) -> None:
    """Raise ``ConfigError`` if the settings of tiers do not fit the engine or the machine.

    ``free_bytes``: of the host's memory, once the engine has taken its part.
    """
    size, folder, disk = (
        config.kv_offloading_size,
        config.kv_offloading_disk,
        config.kv_offloading_disk_size,
    )
    if (folder is None) != (disk is None):
        raise ConfigError(
            "kv_offloading_disk and kv_offloading_disk_size name a folder and its size; give both"
        )
    if folder is not None and config.kv_connector is not None:
        raise ConfigError("kv_offloading_disk and kv_connector exclude each other; leave one out")
    if size is None and config.preemption == "offload":
        raise ConfigError(
            "preemption offload saves pages in a tier in host memory; give kv_offloading_size too, "
            "or leave preemption out"
        )
    if size is None:
        name = "kv_offloading_disk" if folder is not None else "kv_connector"
        if folder is not None or config.kv_connector is not None:
            raise ConfigError(
                f"{name} is behind a tier in host memory; give kv_offloading_size too"
            )
        return
    if config.record_redact and (folder is not None or config.kv_connector is not None):
        raise ConfigError(
            "record_redact replaces the keys of pages that the engine has saved, and others may be "
            "in kv_offloading_disk or kv_connector; leave one out"
        )
    if not program.limits.enable_prefix_caching:
        raise ConfigError(
            "kv_offloading_size keeps prefixes for reuse, and this engine reuses none; leave it "
            "out, or enable_prefix_caching"
        )
    if not any(program.model.state.bytes_per_entry):
        raise ConfigError(
            "kv_offloading_size keeps pages, and a model without attention has none; leave it out"
        )
    if program.placement.num_hosts > 1 or (
        program.placement.num_devices > 1 and program.platform != "cpu"
    ):
        raise ConfigError(
            "kv_offloading_size is for one GPU, or one host's CPU devices; leave it out, or "
            "tensor_parallel_size"
        )
    if len(program.limits.groups) > SNAPSHOTS:
        raise ConfigError(f"kv_offloading_size is for {SNAPSHOTS} groups of layers; leave it out")
    largest = max(form.num_bytes for form in forms_of(program).values())
    if size * GIB < largest:
        raise ConfigError(
            f"kv_offloading_size {size:g} GiB holds not one page of {shown(largest)}; raise it"
        )
    if size * GIB > free_bytes:
        raise ConfigError(
            f"kv_offloading_size {size:g} GiB does not fit the host's free memory, of which "
            f"{max(0, free_bytes) / GIB:.2f} GiB are left next to the model; lower it"
        )
    if folder is not None:
        check_folder(Path(folder).expanduser())
    if config.kv_connector is not None:
        _own_connector(config.kv_connector)


def _own_connector(name: str) -> Callable[[Forms], Connector]:
    """The function that a setting names; raises ``ConfigError`` if there is none."""
    path, _, function = name.rpartition(":")
    try:
        found = runpy.run_path(path).get(function)
    except Exception as error:
        raise ConfigError(
            f"kv_connector {name!r} cannot be run ({error}); give FILE.py:FUNCTION"
        ) from error
    if not callable(found):
        raise ConfigError(f"kv_connector {name!r}: {path} defines no function {function!r}")
    return cast("Callable[[Forms], Connector]", found)


def connected(name: str, forms: Forms) -> Connector:
    """The connector that a setting names; raises ``ConfigError`` if it cannot be made."""
    make = _own_connector(name)
    try:
        made = make(forms)
        missing = [method for method in (*METHODS, "is_shared") if not hasattr(made, method)]
    except Exception as error:
        raise ConfigError(
            f"kv_connector {name!r} cannot begin ({type(error).__name__}: {error}); correct "
            "it, or leave it out"
        ) from error
    if missing:
        raise ConfigError(
            f"kv_connector {name!r} returns no connector, as it has no {missing[0]}; see "
            "jaxinfer.core.connector"
        )
    return Guarded(made, name)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that the system can give to processes; very many where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return 1 << 62


def identity_of(plan: EnginePlan) -> Mapping[str, str]:
    """Facts that units of a disk tier depend on: engines that differ cannot read each other's."""
    program, source = plan.program, plan.source
    limits, config = program.limits, program.model.config
    counts = {group: Counter(form.arrays) for group, form in sorted(forms_of(program).items())}
    arrays = "; ".join(
        f"{group}: " + ", ".join(f"{n} {dtype}{list(s)}" for (s, dtype), n in count.items())
        for group, count in counts.items()
    )
    return {
        "format": str(FORMAT),
        "model": source.name,
        "weights": f"{source.fingerprint} {plan.config.seed if source.checkpoint is None else ''}",
        "quantization": str(plan.config.quantization),
        "dtype": str(config.dtype),
        "kv_cache_dtype": plan.config.kv_cache_dtype,
        "page_size": str(limits.page_size),
        "devices": str(program.placement.num_devices),
        "groups": str([(g.window, g.tokens_per_entry, g.pool) for g in limits.groups]),
        "arrays": arrays,
        "config": hashlib.sha256(repr(config).encode()).hexdigest()[:32],
    }


def open_disk(plan: EnginePlan) -> tuple[Path, IO[str]] | None:
    """Lock the folder of the disk tier, before weights are read; None if there is none."""
    if (name := plan.config.kv_offloading_disk) is None:
        return None
    folder = Path(name).expanduser()
    return folder, opened(folder, identity_of(plan))


def begin_tiers(
    plan: EnginePlan, executor: Executor, disk: tuple[Path, IO[str]] | None, progress: Progress
) -> TierRunner | None:
    """The tiers of a built engine; None if it has none."""
    config = plan.config
    if config.kv_offloading_size is None:
        return None
    size = int(config.kv_offloading_size * GIB)
    mover = mover_of(plan.program, executor)
    cost = fitted_costs(executor, mover)
    # memory is locked after the measurement, which it would disturb
    host = HostTier(size, mover.forms, _memory(plan.program, mover.forms, size))
    connector: Connector = host
    described, lower = f"host tier of {config.kv_offloading_size:g} GiB", None
    if disk is not None and config.kv_offloading_disk_size is not None:
        folder, lock = disk
        lower = DiskTier(folder, int(config.kv_offloading_disk_size * GIB), mover.forms, lock)
        connector = Chain(host, lower)
        described += f", disk tier of {config.kv_offloading_disk_size:g} GiB in {folder} (holds "
        described += f"{shown(lower.used_bytes)})"
    if config.kv_connector is not None:
        connector = Chain(host, connected(config.kv_connector, mover.forms))
        described += f", behind it {config.kv_connector}"
    progress.note(
        f"{described}: restores {cost.bytes_per_second / 1e9:.2f} GB/s, a step takes "
        f"{cost.step_seconds * 1e3:.2f} ms and {cost.token_seconds * 1e6:.1f} us a prompt token; "
        f"prefixes are restored {_from_length(cost, mover.forms, plan.program)}"
    )

    def sizes() -> Mapping[str, float]:
        return {
            "host_bytes": host.used_bytes,
            "host_size": host.num_bytes,
            "disk_bytes": 0 if lower is None else lower.used_bytes,
            "disk_size": 0 if lower is None else lower.num_bytes,
            "bytes_per_second": cost.bytes_per_second,
            "step_seconds": cost.step_seconds,
            "token_seconds": cost.token_seconds,
        }

    limits = plan.program.limits
    policy = policy_of(mover.forms, limits, cost, offloads=config.preemption == "offload")
    ahead = saved_ahead(plan.program, mover.forms, size)
    policy = replace(
        policy,
        most_save_bytes=block_bytes(plan.program),
        watermark=min(policy.watermark, ahead.share),
        ahead=ahead,
    )
    return TierRunner(mover, connector, policy, sizes, saving_bytes(plan.program))


def saved_ahead(program: Program, forms: Forms, size: int) -> SaveAhead:
    """The pages and states that are saved before they are evicted: at most those of half the host
    tier (``size`` bytes), or the tier would replace them before the device does.
    """
    limits = program.limits
    pages = {one.pool: forms[group].num_bytes for group, one in enumerate(limits.groups)}
    whole = sum(count * pages[pool] for pool, count in enumerate(limits.num_pages))
    if SNAPSHOTS in forms:
        whole += limits.num_snapshots * forms[SNAPSHOTS].num_bytes
    share = min(1.0, TIER_SHARE * size / whole)
    if program.platform != "cpu":
        return SaveAhead(share, block_bytes(program))
    largest = max(form.num_bytes for form in forms.values())
    return SaveAhead(share, max(CPU_BYTES, largest), beside_decodes=False)


def mover_of(program: Program, executor: Executor) -> ArrayMover | DeviceMover:
    """The page mover of an engine."""
    if program.platform == "cpu":
        return ArrayMover(program, executor.arrays)
    allocate = partial(registered_memory, ordinal := _ordinal(program))
    streams = CudaCopyStream(ordinal), CudaCopyStream(ordinal)
    return DeviceMover(program, executor.arrays, streams, allocate)


def _memory(program: Program, forms: Forms, size: int) -> Memory | None:
    """The source of the host tier's memory; None: ordinary memory."""
    if program.platform == "cpu":
        return None
    largest = max(form.num_bytes for form in forms.values())
    return LockedMemory(size, largest, partial(registered_memory, _ordinal(program)))


def _ordinal(program: Program) -> int:
    (device,) = program.placement.own_devices
    return int(device.local_hardware_id)


def fitted_costs(executor: Executor, mover: ArrayMover | DeviceMover) -> CostModel:
    """The costs of steps and copies, measured on prompts of padding pages.

    Of steps the shortest and the longest are measured: between the two shortest ones a GPU's time
    hardly differs, as their weights take longer to read than their tokens to compute.
    """
    buckets = [
        bucket
        for bucket in executor.buckets
        if bucket.num_prefills and not (bucket.num_decodes or bucket.variants or bucket.scores)
    ]
    by_tokens = sorted(buckets or executor.buckets, key=lambda bucket: bucket.num_tokens)
    two = by_tokens[0], by_tokens[-1]
    short, long = (_least_seconds(partial(_run, executor, one)) for one in two)
    few, many = (one.num_tokens for one in two)
    each = short / few if many == few else max(long - short, 0.1 * long) / (many - few)
    step = max(0.0, short - few * each)

    many = mover.most_measured
    one, all_units = (_least_seconds(partial(mover.copy_to_sink, n)) for n in (1, many))
    of_unit = max(all_units - one, 0.1 * all_units) / max(1, many - 1)
    load = max(0.0, one - of_unit)
    return CostModel(step, each, mover.forms[0].num_bytes / of_unit, load_seconds=load)


def _run(executor: Executor, bucket: Bucket) -> None:
    executor.run_once([bucket], filled=True)


def _least_seconds(work: Callable[[], None]) -> float:
    """The shortest of a few runs; the first one may load kernels, or make memory resident."""
    least = math.inf
    for _ in range(MEASURED_RUNS):
        since = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - since)
    return least


def _from_length(cost: CostModel, forms: Forms, program: Program) -> str:
    """Words for the shortest prefix of K and V alone that is restored."""
    limits = program.limits
    size = limits.page_size * limits.reuse_step
    page_bytes = sum(
        forms[group].num_bytes * limits.reuse_step // one.tokens_per_entry
        for group, one in enumerate(limits.groups)
        if one.window is None
    )
    state = forms[SNAPSHOTS].num_bytes if SNAPSHOTS in forms else 0
    for count in range(1, limits.max_model_len // size + 1):
        seconds = cost.restoring(count * page_bytes + state)
        if cost.restores(seconds, count * size, limits.max_num_batched_tokens):
            return f"from {count * size} tokens on"
    return "never, as computing them takes less time"
