"""``TrialProcess``: an engine's side of the process that tries forms."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from jaxinfer.core.errors import EngineError
from jaxinfer.core.frames import read_frame, send_frame
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.text.grammar.trial import Accepted, Outcome, Refused, died
from jaxinfer.text.grammar.trial_process import Died

PROGRAM = """
import sys
descriptor, *sys.path = sys.argv[1:]
from jaxinfer.text.grammar.trial_process import serve
serve(int(descriptor))
"""
EXIT_SECONDS = 5.0  # for the process to end once its socket is closed


class TrialProcess:
    """The process, which the first trial starts, and which is started again if it has died.

    ``vocabulary``: a ``Vocabulary`` in msgpack's form. Trials may be begun on several threads.
    """

    def __init__(self, vocabulary: Callable[[], bytes]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.RLock()  # the garbage collector may call ``close`` anywhere
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None before the first trial."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it has been started before; see ``begin`` for errors."""
        with self._lock:
            if self._process is None and not self._closed:
                self._start()

    def begin(self) -> socket.socket:
        """Begin a trial; returns the socket for ``outcome``. Closing it ends the trial.

        Raises ``EngineError`` if the process cannot be started, and the errors of ``vocabulary``.
        """
        with self._lock:
            if self._closed:
                raise EngineError("the engine is shut down; build a new one")
            ours, theirs = socket.socketpair()
            with theirs:
                if not self._pass(theirs):
                    self._start()
                    self._pass(theirs)  # if it fails again, ``ours`` hangs up
            return ours

    def close(self) -> None:
        """End the process and its trials; no further one can begin."""
        with self._lock:
            self._closed = True
            self._end()

    def _pass(self, theirs: socket.socket) -> bool:
        """Pass the end of a trial to the process; False if there is none, or it has died."""
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [b"t"], [theirs.fileno()])
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C goes to the caller only
                )
            except OSError as error:
                raise EngineError(f"the process that tries forms cannot start: {error}") from None
        try:
            send_frame(self._control, self._vocabulary())
        except OSError:  # it has died, and trials hang up
            pass
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def outcome(end: socket.socket, params: StructuredOutputsParams) -> Outcome | None:
    """The outcome of a trial of this form; None if its process, or that of all trials, has died
    for another reason than the form, or if the socket was shut down.
    """
    try:
        send_frame(end, msgspec.msgpack.encode(params))
    except OSError:
        return None
    frame = read_frame(end)
    if frame is None:
        return None
    found = msgspec.msgpack.decode(frame, type=Accepted | Refused | Died)
    if isinstance(found, Died):
        return died(params.kind, found.signal, found.limits)
    return found
