"""``profile.json`` of a run, and the table that follows from its rows: ops by bucket, with floors.

Kernels overlap: with programmatic dependent launch the next one starts while the one before it
still runs, and waits. So a kernel's own time is what it adds to the device's: from its start, or
from the end of all earlier kernels if that is later, to its end. Own times and idle times of a step
add up to the time that the device spent on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxinfer.bench.numbers import mean
from jaxinfer.bench.op_costs import floors_of
from jaxinfer.core.errors import BenchError
from jaxinfer.core.profile import OpCosts, ProfiledStep

OUTSIDE = -1  # the step of a kernel that no step of the window launched
FORMAT = 1


class Kernel(msgspec.Struct, frozen=True, array_like=True):
    """A kernel that ran on the device, in ns since the first one; the columns of a row."""

    step: int
    kernel: str
    op: str
    start_ns: int
    duration_ns: int


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """``profile.json``: raw rows of one device, and what floors are computed from."""

    format: int = FORMAT
    device: str
    num_devices: int = 1
    bytes_per_s: float | None = None  # the device's measured ceilings; None: not measured
    flops_per_s: float | None = None
    costs: OpCosts | None = None
    trace: str = ""  # the trace's folder, within the run's
    columns: tuple[str, ...] = Kernel.__struct_fields__
    steps: list[ProfiledStep]
    kernels: list[Kernel]  # in the order of their starts


def read_profiled(data: bytes, name: str) -> Profiled:
    """A run's profile; raises ``BenchError`` if a file of this name has none."""
    try:
        found = msgspec.json.decode(data, type=Profiled)
    except msgspec.DecodeError as error:
        raise BenchError(f"{name} has no profile ({error}); the run must be repeated") from error
    if found.format != FORMAT:
        raise BenchError(
            f"{name} has format {found.format} and this jaxinfer reads {FORMAT}; use the version "
            "that wrote it"
        )
    return found


class _Spent:
    """Times of a step on the device, in ns."""

    def __init__(self) -> None:
        self.own: dict[str, int] = defaultdict(int)  # by op
        self.calls: dict[str, int] = defaultdict(int)
        self.between = self.before = 0  # idle

    @property
    def total(self) -> int:
        return sum(self.own.values()) + self.between + self.before


def spent_by_step(kernels: Sequence[Kernel]) -> dict[int, _Spent]:
    """The times of each step. The device is idle before a step from the end of another one."""
    found: dict[int, _Spent] = defaultdict(_Spent)
    end, last = (kernels[0].start_ns if kernels else 0), None
    for one in sorted(kernels, key=lambda one: (one.start_ns, one.duration_ns)):
        spent = found[one.step]
        spent.calls[one.op] += 1
        idle, stop = max(one.start_ns - end, 0), one.start_ns + one.duration_ns
        if last == one.step:
            spent.between += idle
        else:
            spent.before += idle
        own = max(stop - max(one.start_ns, end), 0)
        spent.own[one.op] += own
        if own:
            end, last = stop, one.step
    return found


def tables_of(profiled: Profiled) -> dict[str, Any]:
    """The result of a profile: a table for each bucket, the one with the most time first."""
    spent = spent_by_step(profiled.kernels)
    steps: dict[str, list[ProfiledStep]] = defaultdict(list)
    for one in profiled.steps:
        if one.step in spent:
            steps[one.bucket].append(one)
    tables = [_table(bucket, own, spent, profiled) for bucket, own in steps.items()]
    tables.sort(key=lambda one: -one["steps"] * one["device_us"])
    outside = spent[OUTSIDE].own if OUTSIDE in spent else {}
    return {
        "device": profiled.device,
        "num_devices": profiled.num_devices,
        "outside_us": sum(outside.values()) / 1e3,
        "buckets": tables,
    }


def _table(
    bucket: str, steps: Sequence[ProfiledStep], spent: Mapping[int, _Spent], profiled: Profiled
) -> dict[str, Any]:
    own = [spent[one.step] for one in steps]
    device_us = mean([one.total for one in own]) / 1e3
    names = list(dict.fromkeys(op for one in own for op in one.own))
    floors = _mean_floors(steps, spent, profiled)
    rows = [
        _row(
            name,
            mean([one.calls.get(name, 0) for one in own]),
            mean([one.own.get(name, 0) for one in own]) / 1e3,
            device_us,
            floors.get(name),
        )
        for name in names
    ]
    rows.sort(key=lambda row: (-row["us"], row["op"]))
    idle = {
        "idle between kernels": mean([one.between for one in own]) / 1e3,
        "idle before the step": mean([one.before for one in own]) / 1e3,
    }
    rows += [_row(name, None, us, device_us, None) for name, us in idle.items()]
    return {
        "bucket": bucket,
        "steps": len(steps),
        "requests": len({name for one in steps for name in one.requests}),
        "wall_us": mean([one.wall_ns for one in steps]) / 1e3,
        "device_us": device_us,
        "floor_us": floors.get(""),
        "gemm_floor_us": floors.get("gemms"),
        "rows": rows,
    }


def _row(
    op: str, calls: float | None, us: float, device_us: float, floor_us: float | None
) -> dict[str, Any]:
    return {
        "op": op,
        "calls": calls,
        "us": us,
        "share": us / device_us if device_us else 0.0,
        "floor_us": floor_us,
        "share_of_floor": floor_us / us if floor_us and us else None,
    }


def _mean_floors(
    steps: Sequence[ProfiledStep], spent: Mapping[int, _Spent], profiled: Profiled
) -> dict[str, float]:
    """Floors in us, by op; "" is that of the step, "gemms" that of all its matrices."""
    costs, bandwidth, flops = profiled.costs, profiled.bytes_per_s, profiled.flops_per_s
    if costs is None or not bandwidth or not flops:
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for op, (size, operations) in floors_of(costs, step, spent[step.step].calls).items():
            seconds = max(size / bandwidth, operations / flops) / profiled.num_devices
            found[op].append(1e6 * seconds)
    return {op: mean(of) for op, of in found.items() if len(of) == len(steps)}
