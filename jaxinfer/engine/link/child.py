"""The engine's own process: ``python -m jaxinfer.engine.link.child FD``, started by ``spawn``.

It builds the engine that the server requests over the socket ``FD``, runs it, and ends as soon as
the server's process has exited, also during a build.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.host_memory import (
    collect_seldom,
    gc_paused,
    limit_heap_arenas,
    release_startup_memory,
)
from jaxinfer.core.log import log_to
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.engine.link.wire import (
    Build,
    Channel,
    Failed,
    FromEngine,
    Planned,
    Ready,
    Submission,
    ToEngine,
)
from jaxinfer.engine.start.progress import LOGGER, logged_progress
from jaxinfer.engine.start.start import backend_starting

if TYPE_CHECKING:
    from jaxinfer.engine.link.thread import EngineThread
    from jaxinfer.engine.loop.engine import Engine

LIBRARIES = ("jaxinfer", "pallas_kernels")  # loggers
RETRY_SECONDS = 0.01  # from an interrupt that the garbage collector dropped to the next one
CLEANUP_SECONDS = 0.5  # to remove temporary files, if the server exits during a build


# plans an engine, and returns the function that builds it
type Planner = Callable[[EngineConfig, Progress], tuple[Planned, Callable[[], Engine]]]
type Load = Callable[[Callable[[], EngineConfig]], Planner]


def load_planner(settings: Callable[[], EngineConfig]) -> Planner:
    """Import JAX, which takes seconds, and return the function that plans an engine.

    ``settings`` waits for the server, whose own imports are still running.
    """
    with gc_paused():
        import_module("jax")  # the slowest import, which needs no settings
    with backend_starting(settings()) as platform:
        from jaxinfer.engine.start.build import build_engine, plan_engine
        from jaxinfer.engine.start.summary import describe_plan
    gc.freeze()  # modules are never freed

    def plan(config: EngineConfig, progress: Progress) -> tuple[Planned, Callable[[], Engine]]:
        made = replace(plan_engine(config, progress, platform), encodes=False)
        for line in describe_plan(config, made):
            progress.note(line)
        planned = Planned(made.program.limits, made.tokenizer_spec)
        return planned, lambda: build_engine(made, progress, serves_early=True)

    return plan


class EngineChild:
    """The engine of this process: built, then run until the server stops it or exits."""

    def __init__(self, channel: Channel[FromEngine, ToEngine]) -> None:
        self._channel = channel
        self._build_message: Future[Build] = Future()
        self._engine: EngineThread | None = None  # set once it is built
        self._progress: Progress = NO_PROGRESS
        self._phase = ExitStack()
        self._building = False
        self._server_gone = False
        self._interrupt_dropped = threading.Event()  # it has to be sent again

    def run(self, load: Load) -> int:
        """Build and run the engine on the main thread; returns the exit code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server stops the engine
        signal.signal(signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._unraisable
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process may write progress
        threading.Thread(target=self._follow, daemon=True).start()
        try:
            self._serve(load)
        except KeyboardInterrupt:  # the server has exited
            return 1
        except JaxinferError as error:
            self._channel.send(Failed.of(error))
        self._channel.flush()
        return 0

    def _serve(self, load: Load) -> None:
        """Build the engine, which may raise a ``JaxinferError``, and run it until it ends."""
        try:
            # signs of life from the first import on, which needs no settings
            self._build_message.add_done_callback(self._begin)
            planner = load(lambda: self._build_message.result().config)
            message = self._build_message.result()
            self._building = True  # from here on: an import interrupted in C code prints errors
            with gc_paused():
                planned, build = planner(message.config, self._progress)
                self._channel.send(planned)
                engine = build()
        except JaxinferError:
            raise
        except Exception as error:
            if not self._server_gone:
                traceback.print_exc()
            words = f"the engine cannot be built ({type(error).__name__}: {error})"
            raise EngineError(words) from error
        finally:
            self._building = False
            self._phase.close()
        from jaxinfer.engine.link.thread import EngineThread

        collect_seldom()
        thread = EngineThread(engine)
        self._engine = thread
        self._channel.send(Ready(thread.facts, thread.stats))
        thread.connect(self._channel.send)  # it may send news at once: of executables loaded late
        release_startup_memory()
        thread.wait()

    def _begin(self, message: Future[Build]) -> None:
        """Configure the log and open the phase that ends with the engine."""
        settings = message.result().log
        if settings is not None:
            log_to(sys.stderr, settings, dict.fromkeys(LIBRARIES, settings.library_number))
            logging.getLogger(LOGGER).setLevel(settings.number)
            self._progress = logged_progress(settings)
            self._phase.enter_context(self._progress.phase("the engine starts"))

    def _follow(self) -> None:
        """Pass commands to the engine until the server exits, then end this process."""
        try:
            for message in self._channel.messages():
                if isinstance(message, Build):
                    self._build_message.set_result(message)
                elif self._engine is not None:
                    if isinstance(message, Submission):
                        message = message.unpacked()
                    with suppress(EngineError):  # it has ended: the last message has the reason
                        self._engine.send(message)
        finally:
            self._end()

    def _end(self) -> None:
        """Interrupt a build, so that it removes its temporary files, and kill this process."""
        self._server_gone = True
        end = time.monotonic() + CLEANUP_SECONDS
        while self._building:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not self._interrupt_dropped.wait(end - time.monotonic()):
                break
            self._interrupt_dropped.clear()
            time.sleep(RETRY_SECONDS)
        os.killpg(0, signal.SIGKILL)  # and the processes that this one has started

    def _interrupt(self, *_: object) -> None:
        if self._building and self._server_gone:
            raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """Python drops an exception raised in the garbage collector, also KeyboardInterrupt."""
        if self._server_gone and isinstance(what.exc_value, KeyboardInterrupt):
            self._interrupt_dropped.set()
        else:
            sys.__unraisablehook__(what)


def main(load: Load = load_planner) -> None:
    """Serve the socket whose file descriptor is on the command line."""
    limit_heap_arenas()
    end = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(EngineChild(Channel(end, ToEngine)).run(load))


if __name__ == "__main__":
    main()
