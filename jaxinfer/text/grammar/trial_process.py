"""The process of trials, which ``TrialProcess`` starts.

It has imported llguidance and made the table of the vocabulary, and forks a process for each trial,
which takes a few milliseconds. It has one thread, and ends with the process that has started it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from jaxinfer.core.frames import read_frame, send_frame
from jaxinfer.core.host_memory import limit_heap_arenas, release_free_heap
from jaxinfer.core.structured import FormLimits, StructuredOutputsParams
from jaxinfer.text.grammar.trial import TrialTable, Vocabulary, run_trial, silence


class Died(msgspec.Struct, frozen=True, tag=True):
    """The process of a trial has ended without an outcome, by this signal; 0: by itself."""

    signal: int
    limits: FormLimits  # that it had


@dataclass(eq=False)
class _Running:
    """A trial."""

    pid: int
    end: socket.socket  # the trial's end; the other one hangs up if the form is not needed any more
    alive: int  # a pipe that hangs up when the process ends
    deadline: float
    killed: bool = False
    overdue: bool = False


class TrialServer:
    """Forks trials, and ends those that take too long or whose caller has gone."""

    def __init__(self, control: socket.socket, table: TrialTable) -> None:
        self._control = control
        self._table = table
        self._running: dict[int, _Running] = {}  # by each of its two file descriptors
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until the caller's process ends."""
        while True:
            for descriptor, _ in self._poller.poll(self._milliseconds()):
                if descriptor == self._control.fileno():
                    if not self._begin():
                        self._kill_all()
                        return
                elif (trial := self._running.get(descriptor)) is None:
                    continue  # it has ended in this round
                elif descriptor == trial.alive:
                    self._end(trial)
                else:
                    self._kill(trial)
            for trial in self._unkilled():
                if time.monotonic() > trial.deadline:
                    trial.overdue = True
                    self._kill(trial)

    def _unkilled(self) -> set[_Running]:
        return {trial for trial in self._running.values() if not trial.killed}

    def _milliseconds(self) -> float | None:
        """The time to the next deadline."""
        deadlines = [trial.deadline for trial in self._unkilled()]
        return max(min(deadlines) - time.monotonic(), 0.0) * 1000 + 1 if deadlines else None

    def _begin(self) -> bool:
        """Fork a trial for the socket that comes next; False if the caller has gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        end = socket.socket(fileno=descriptors[0])
        alive, held = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the caller sees its end hang up
            end.close()
            os.close(alive)
            os.close(held)
            return True
        if not pid:
            try:
                self._try(end)
            finally:
                os._exit(1)
        os.close(held)
        trial = _Running(pid, end, alive, time.monotonic() + self._table.limits.wall_seconds)
        self._running |= {alive: trial, end.fileno(): trial}
        self._poller.register(alive, 0)  # hanging up is always reported
        self._poller.register(end, 0)
        return True

    def _try(self, end: socket.socket) -> None:
        """In the trial's process: read the form, and send the outcome."""
        self._control.close()
        for other in {*self._running.values()}:  # whose callers would not see them end
            other.end.close()
            os.close(other.alive)
        silence()
        form = read_frame(end)
        if form is not None:
            params = msgspec.msgpack.decode(form, type=StructuredOutputsParams)
            send_frame(end, msgspec.msgpack.encode(run_trial(params, self._table)))
            os._exit(0)

    def _kill(self, trial: _Running) -> None:
        self._poller.unregister(trial.end)
        trial.killed = True
        os.kill(trial.pid, signal.SIGKILL)  # it has not been waited for, so the id is its own

    def _end(self, trial: _Running) -> None:
        """Note that a trial's process has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(trial.pid, 0)[1])
        if code:
            number = signal.SIGPROF if trial.overdue else max(-code, 0)
            with suppress(OSError):  # the caller has gone
                send_frame(trial.end, msgspec.msgpack.encode(Died(number, self._table.limits)))
        if not trial.killed:
            self._poller.unregister(trial.end)
        self._poller.unregister(trial.alive)
        del self._running[trial.alive], self._running[trial.end.fileno()]
        os.close(trial.alive)
        trial.end.close()

    def _kill_all(self) -> None:
        for trial in {*self._running.values()}:
            os.kill(trial.pid, signal.SIGKILL)


def serve(descriptor: int) -> None:
    """Read the vocabulary from the socket with this file descriptor, and try forms until the other
    end is closed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while its caller completes requests
    limit_heap_arenas(1)  # a further one would be another 64 MiB of address space of each trial
    control = socket.socket(fileno=descriptor)
    frame = read_frame(control)
    if frame is None:
        return
    table = TrialTable(msgspec.msgpack.decode(frame, type=Vocabulary))
    del frame
    gc.collect()
    gc.freeze()
    release_free_heap()  # of what a trial reuses no growth would be seen
    TrialServer(control, table).run()
