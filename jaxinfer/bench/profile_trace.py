"""A profile's trace as rows: each kernel that ran on the device, with its op and its engine step.

A kernel belongs to the step in whose marked launch (``engine.loop.profiler.MARK``) the host queued
it. On a GPU, CUPTI gives the launch on the host and the kernel on the device one correlation id; a
CUDA graph is one launch of many kernels. On a CPU the ids are those of XLA's runs, which the client
queues in the order of their launches. Of several devices the first one is read.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxinfer.bench.op_costs import GEMMS
from jaxinfer.bench.profile_table import OUTSIDE, Kernel
from jaxinfer.core.errors import BenchError
from jaxinfer.core.profile import Instruction, Steps
from jaxinfer.engine.loop.profiler import MARK, STEPS
from pallas_kernels.harness.registry import OP_NAMES

GPU, HOST = "/device:GPU:", "/host:CPU"  # planes
STREAM = "Stream"  # the lines of a GPU that are not derived from others
# The name of a Mosaic kernel begins with that of its op, linked or not; a C++ kernel's target
# has it after the library's name.
_MOSAIC = re.compile(r"(\w+?)_mosaic_gpu")
_TRITON = re.compile(r"^@triton\.jit\s+def (\w+)", re.MULTILINE)
NATIVE = "jaxinfer_"
# Kernels of XLA and NVIDIA's libraries, by their names
_COPY = re.compile(r"memcpy|memset|copy", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|cublas|gemv|splitk|^dot", re.IGNORECASE)
_FUSION = re.compile(r"fusion|^wrapped_|^(reduce|scatter|gather|broadcast|sort|call|transpose)")
QUEUED = "CommonPjRtLoadedExecutable::ExecuteHelperOnSingleDevice"  # the host queues a CPU's run
UNEMBED = "unembed"  # in the scope of what the head computes


class Event(NamedTuple):
    """An event of a trace, in ns since its start."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any]


def read_steps(folder: Path) -> Steps:
    """The engine's file next to its trace; raises ``BenchError`` if it cannot be read."""
    try:
        return msgspec.json.decode((folder / STEPS).read_bytes(), type=Steps)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(
            f"{folder} has no profile of an engine ({error}); take it again"
        ) from error


def read_trace(folder: Path) -> bytes:
    """The trace in a profile's folder; raises ``BenchError`` if there is none."""
    found = sorted(folder.rglob("*.xplane.pb"))
    if not found:
        raise BenchError(f"{folder} has no trace; JAX's profiler wrote none, so take it again")
    return found[-1].read_bytes()


def kernels_of(trace: bytes, steps: Steps) -> list[Kernel]:
    """The kernels of the window in the order of their starts.

    Raises ``BenchError`` for a trace without events of a device.
    """
    from jax.profiler import ProfileData

    with warnings.catch_warnings():  # JAX's own, about the type of its events
        warnings.simplefilter("ignore", DeprecationWarning)
        data = ProfileData.from_serialized_xspace(
            trace
        )  # planes read its memory and do not hold it
        planes = {plane.name: plane for plane in data.planes}
        host = list(_events(planes.get(HOST)))
        gpus = sorted((name for name in planes if name.startswith(GPU)), key=_number)
        on_gpu = list(_events(planes[gpus[0]], STREAM)) if gpus else []
        del planes, data
    if on_gpu:
        step_of = step_by_correlation(host)
    else:
        on_gpu = [one for one in host if "hlo_op" in one.stats]
        step_of = step_by_run(host, on_gpu)
    if not on_gpu:
        raise BenchError(
            "the trace has no events of a device, so there is no table of kernels; end other "
            "profilers (nsys, ncu, dcgm), which may hold the device's counters"
        )
    op_of, origin = Ops(steps), min(one.start for one in on_gpu)
    found = [
        Kernel(
            step=(number := step_of(one)),
            kernel=one.name,
            op=op_of(one, number),
            start_ns=round(one.start - origin),
            duration_ns=round(one.end - one.start),
        )
        for one in sorted(on_gpu, key=lambda one: (one.start, one.end))
    ]
    known = {one.step for one in steps.steps}
    return [
        one if one.step in known else msgspec.structs.replace(one, step=OUTSIDE) for one in found
    ]


def _number(plane: str) -> int:
    return int(plane.removeprefix(GPU).split()[0])


def _events(plane: Any, lines: str = "") -> Iterator[Event]:
    for line in plane.lines if plane is not None else ():
        if (line.name or "").startswith(lines):
            for one in line.events:
                yield Event(one.name, one.start_ns, one.start_ns + one.duration_ns, dict(one.stats))


type StepOf = Callable[[Event], int]


def _marks(host: Iterable[Event]) -> list[Event]:
    return sorted((one for one in host if one.name == MARK), key=lambda one: one.start)


def step_by_correlation(host: Sequence[Event]) -> StepOf:
    """The step of a GPU's event: that of the launch with its correlation id."""
    marks = _marks(host)
    starts = [one.start for one in marks]
    steps: dict[int, int] = {}
    for one in host:
        if (key := one.stats.get("correlation_id")) is None:
            continue
        at = bisect_right(starts, one.start) - 1
        if at >= 0 and one.start <= marks[at].end:
            steps[key] = marks[at].stats["step_num"]
    return lambda event: steps.get(event.stats.get("correlation_id", -1), OUTSIDE)


def step_by_run(host: Sequence[Event], kernels: Sequence[Event]) -> StepOf:
    """The step of a CPU's event: runs begin in the order in which the host queues them."""
    queued = deque(sorted(one.start for one in host if one.name == QUEUED))
    marks = _marks(host)
    starts = [one.start for one in marks]
    first: dict[int, float] = {}
    for one in kernels:
        run = one.stats.get("run_id", -1)
        first[run] = min(first.get(run, one.start), one.start)
    steps: dict[int, int] = {}
    for run, begin in sorted(first.items(), key=lambda item: item[1]):
        if not queued or queued[0] > begin:
            continue  # it was queued before the window
        at = bisect_right(starts, when := queued.popleft()) - 1
        if at >= 0 and when <= marks[at].end:
            steps[run] = marks[at].stats["step_num"]
    return lambda event: steps.get(event.stats.get("run_id", -1), OUTSIDE)


class Ops:
    """The op of a kernel: by the kernel's name, or by the HLO instruction that it computes."""

    def __init__(self, steps: Steps) -> None:
        self._triton = triton_ops()
        self._buckets = {one.step: one.bucket for one in steps.steps}
        self._instructions = {
            bucket: {
                (module, _plain(name)): one
                for module, own in modules.items()
                for name, one in own.items()
            }
            for bucket, modules in steps.instructions.items()
        }

    def __call__(self, event: Event, step: int) -> str:
        """The op's name, as in ``pallas_kernels``; or a word for XLA's and others' kernels."""
        stats = event.stats
        known = self._instructions.get(self._buckets.get(step, ""), {})
        module = str(stats.get("hlo_module", ""))
        names = (str(stats.get("hlo_op", "")), event.name)
        one = next((found for n in names if (found := known.get((module, _plain(n))))), None)
        scope = str(stats.get("name", "")) or (one.scope if one else "")
        return op_of(event.name, one or Instruction(), scope, self._triton)


def op_of(kernel: str, instruction: Instruction, scope: str, triton: Mapping[str, str]) -> str:
    """The op of a kernel with this name, HLO instruction and name of JAX's."""
    op = _plain_op(kernel, instruction.target, triton)
    return UNEMBED if op in GEMMS and f".{UNEMBED}/" in scope else op


def _plain_op(kernel: str, target: str, triton: Mapping[str, str]) -> str:
    if target.startswith(NATIVE):
        return target.removeprefix(NATIVE)
    if (match := _MOSAIC.match(kernel)) and match[1] in OP_NAMES:
        return match[1]
    if kernel in triton:
        return triton[kernel]
    if _GEMM.search(kernel):
        return "gemm"
    if _COPY.search(kernel):
        return "copy"
    return "fusion" if _FUSION.search(kernel) else kernel


def triton_ops() -> dict[str, str]:
    """The ops of Triton kernels, by the names of their functions, which one op alone has."""
    found: dict[str, str] = {}
    for op in OP_NAMES:
        for file in files("pallas_kernels").joinpath(op).iterdir():
            if file.name.endswith(".py"):
                for name in _TRITON.findall(file.read_text()):
                    found[name] = op if found.get(name, op) == op else name
    return found


def _plain(name: str) -> str:
    """An instruction's name as the names of kernels have it."""
    return re.sub(r"[.-]", "_", name)
