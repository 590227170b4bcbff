"""A process that compiles executables into the cache while this one serves requests.

In this process tracing and lowering would take Python's lock from the engine's loop, and the
compiler's threads its cores: on an H100 one chat took 16 to 34 ms a token while 27 steps were
compiled, 2 to 3 ms afterwards. The process has the lowest priority, leaves some cores free, and
ends with this one. It opens the device too, with a context of its own (0.5 GB of a GPU).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Self

from jaxinfer.core.config import beside_environment
from jaxinfer.core.errors import EngineError
from jaxinfer.core.host_cpu import usable_cores
from jaxinfer.core.limits import Limits
from jaxinfer.exec.compile.memory_plan import MemoryPlan
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store
from jaxinfer.models.base import Model
from jaxinfer.nn.placement import placement_of_ids
from pallas_kernels.harness.pins import Pins

CHILD = "from jaxinfer.exec.compile.child import main; main()"
# Of the machine's cores, at most so many and at most this part are left to requests: the engine's
# loop, its threads for masks and results, and the HTTP process.
FREE_CORES, FREE_PART = 4, 4


@dataclass(frozen=True)
class Job:
    """A program for the process to compile; it finds the devices by their ids."""

    model: Model
    limits: Limits
    platform: str
    pins: Pins
    device_ids: tuple[int, ...]
    memory: MemoryPlan
    cache: Path
    folder: Path
    names: tuple[str, ...]  # in the order of their use
    num_cores: int

    @classmethod
    def of(cls, store: Store, names: Sequence[str]) -> Self:
        """The job to compile these executables of a store."""
        program = store.program
        assert program.drafter is None, "a drafter's functions cannot be sent"
        return cls(
            model=replace(program.model, hf_config={}),  # it has been read
            limits=program.limits,
            platform=program.platform,
            pins=program.pins,
            device_ids=tuple(device.id for device in program.placement.devices),
            memory=store.memory,
            cache=store.cache,
            folder=store.folder,
            names=tuple(names),
            num_cores=compiler_cores(usable_cores()),
        )

    def store(self) -> Store:
        """The store in a process that has opened the devices."""
        placement = placement_of_ids(self.device_ids)
        program = Program(self.model, self.limits, self.platform, self.pins, placement)
        return Store(program, self.memory, self.cache, self.folder)


def compiler_cores(cores: int) -> int:
    """The number of cores, of all, on which the process may run."""
    return max(1, cores - min(FREE_CORES, max(1, cores // FREE_PART)))


class CompilerProcess:
    """Compiles executables into the store; as a context manager it kills the process at the end."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self.names = tuple(names)
        job = pickle.dumps(Job.of(store, names))
        self._end, child_end = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(child_end.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to the caller; errors go to stderr
                pass_fds=[child_end.fileno()],
                process_group=0,  # Ctrl-C goes to the caller only
                env=beside_environment(),
            )
        finally:
            child_end.close()
        with suppress(OSError):  # it has died already, which ``saved`` reports
            self._end.send_bytes(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id, which is also its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def hang_up(self) -> None:
        """Close this end of the pipe, upon which the process ends."""
        self._end.close()

    def saved(self) -> Iterator[str]:
        """The names of the executables, each as soon as it is in the store.

        Raises ``EngineError`` if one cannot be compiled, or if the process dies.
        """
        while (answer := self._answer()) is not None:
            yield answer

    def _answer(self) -> str | None:
        try:
            answer = self._end.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with code {code}"
            )
            raise EngineError(
                f"their process {how}; see whether the host is out of memory"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the process and the workers that it has started."""
        if self._process.returncode is None:  # else the group's number may be in use again
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
