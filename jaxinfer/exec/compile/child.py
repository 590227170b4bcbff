"""The process of ``process.CompilerProcess``: its main program.

It answers with the name of each executable that it has saved, and then with None, or with an
``EngineError`` instead.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.exec.compile.process import Job


def main() -> None:
    """Compile the job that arrives through the pipe whose file descriptor is the first argument.

    The other arguments are the module search path of the caller.
    """
    os.nice(19)
    _, descriptor, *sys.path = sys.argv
    connection = Connection(int(descriptor))
    job: Job = pickle.loads(connection.recv_bytes())
    threading.Thread(target=_end_with_caller, args=(connection,), daemon=True).start()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-job.num_cores :])
    try:
        _compile(job, connection)
        connection.send(None)
    except Exception as error:
        from jaxinfer.core.errors import EngineError

        connection.send(EngineError(f"{type(error).__name__}: {error}"))


def _compile(job: Job, connection: Connection) -> None:
    # imported here, as each imports JAX, which takes as many threads as there are cores to run on
    from jaxinfer.core.progress import NO_PROGRESS
    from jaxinfer.exec.compile.build import compile_missing
    from jaxinfer.exec.compile.bundle import load_kernel_compiler

    load_kernel_compiler()
    compile_missing(
        job.store(),
        job.names,
        NO_PROGRESS,
        lambda name, _: connection.send(name),
        as_they_come=True,
    )


def _end_with_caller(connection: Connection) -> None:
    """End this process, and by their pipes its workers, when the caller closes its end or ends."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
