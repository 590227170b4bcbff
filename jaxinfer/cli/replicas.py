"""The devices of each of several engines behind one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def replica_environments(
    count: int, devices_each: int, environment: Mapping[str, str], gpus: int | None = None
) -> Sequence[Mapping[str, str]]:
    """The variables that each of ``count`` engines needs besides those of this process, by rank.

    Each sees ``devices_each`` GPUs of its own; engines on a CPU share it. ``gpus``: how many this
    machine has (None: it is looked up). Raises ``ConfigError`` if there are fewer than needed.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if count == 1 or platforms.split(",")[0] == "cpu":
        return ({},) * count
    if gpus is None:
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [str(i) for i in range(gpus)]
    if names and environment.get(VISIBLE) is not None:
        names = [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    if not gpus:
        return ({},) * count
    if len(names) < (needed := count * devices_each):
        each = "" if devices_each == 1 else f" of {devices_each} GPUs each (tensor_parallel_size)"
        raise ConfigError(
            f"data_parallel_size is {count}: {count} engines{each} need {needed} GPUs, and there "
            f"are {len(names)}; lower it, or set JAX_PLATFORMS=cpu for engines on the CPU"
        )
    starts = range(0, needed, devices_each)
    return tuple({VISIBLE: ",".join(names[start : start + devices_each])} for start in starts)


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The settings of the engine of a rank: a recording, a disk tier and KV events of its own.

    The disk tier of rank 1 is in the folder ``rank1`` of the one that is given, of which rank 0 has
    the rest.
    """
    from dataclasses import replace

    from jaxinfer.core.kv_events import with_rank

    record, disk, events = config.record, config.kv_offloading_disk, config.kv_events_config
    return replace(
        config,
        record=f"{record}.rank{rank}" if record and rank else record,
        kv_offloading_disk=str(Path(disk, f"rank{rank}")) if disk and rank else disk,
        kv_events_config=None if events is None else with_rank(events, rank),
    )
