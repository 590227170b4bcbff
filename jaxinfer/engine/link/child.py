"""The engine's own process: ``python -m jaxinfer.engine.link.child FD``, started by ``spawn``.

Owns: what the process does with the socket ``FD``: build what is asked for, run it, and end as soon
as the server's process has gone, whatever it is at.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from jaxinfer.core.after_start import release_memory_of_start
from jaxinfer.core.collector import nothing_collected
from jaxinfer.core.config import EngineConfig, Limits
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.heap import keep_heap_small
from jaxinfer.core.progress import NoProgress, Progress
from jaxinfer.engine.link.wire import (
    Build,
    Channel,
    FromEngine,
    Planned,
    Pong,
    Ready,
    ToEngine,
    Told,
    engine_end,
    failed,
    refused,
)
from jaxinfer.engine.news import News
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.engine.start.start import backend_starting
from jaxinfer.text.tokenizer_config import TokenizerSpec

if TYPE_CHECKING:
    from jaxinfer.engine.link.thread import EngineThread
    from jaxinfer.engine.loop.engine import Engine

AFTER_IGNORED = 0.01  # seconds until the collection that ignored an interrupt is over, or goes on
TIDY_SECONDS = 0.5  # to remove temporary files, when the server has gone during a build


@dataclass(frozen=True)
class Blueprint:
    """An engine that is decided on but not built."""

    limits: Limits
    tokenizer: TokenizerSpec | None
    build: Callable[[], Engine]


type Planner = Callable[[EngineConfig, Progress], Blueprint]
type Load = Callable[[Callable[[], EngineConfig]], Planner]


def load_planner(settings: Callable[[], EngineConfig]) -> Planner:
    """What plans the engine that the settings describe; imports JAX, which takes seconds.

    ``settings`` waits for the server, which is still importing itself.
    """
    with nothing_collected():
        import_module("jax")  # the longest of all, for which no settings are needed
    with backend_starting(settings()) as platform:
        from jaxinfer.engine.start.build import build_planned, plan_engine
    gc.freeze()  # modules stay

    def plan(config: EngineConfig, progress: Progress) -> Blueprint:
        made = plan_engine(config, progress, platform)
        return Blueprint(made.limits, made.tokenizer_spec, lambda: build_planned(made, progress))

    return plan


class EngineChild:
    """This process's one engine: built, then run until the server says stop or has gone."""

    def __init__(self, channel: Channel[FromEngine, ToEngine]) -> None:
        self._channel = channel
        self._order: Future[Build] = Future()
        self._engine: EngineThread | None = None  # once it is built
        self._building = False
        self._server_left = False
        self._ignored = threading.Event()  # an interrupt was, and has to come again

    def run(self, load: Load) -> int:
        """The whole life, on the main thread; returns the exit code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server decides
        signal.signal(signal.SIGINT, self._interrupt)
        sys.unraisablehook = self._unraisable
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # progress, though not in the foreground
        threading.Thread(target=self._follow, daemon=True).start()
        try:
            error = self._serve(load)
        except KeyboardInterrupt:  # the server left
            return 1
        self._channel.send(failed(error))
        self._channel.flush()
        return 0

    def _serve(self, load: Load) -> JaxinferError:
        """Build and run; returns why it is over."""
        try:
            planner = load(lambda: self._order.result().config)
            order = self._order.result()
            progress = progress_on(sys.stderr) if order.progress else NoProgress()
            self._building = True  # not before: an import interrupted within C would complain
            blueprint = planner(order.config, progress)
            self._channel.send(Planned(blueprint.limits, blueprint.tokenizer))
            engine = blueprint.build()
        except JaxinferError as error:
            return error
        except Exception as error:
            if not self._server_left:
                traceback.print_exc()
            return EngineError(f"the engine cannot be built ({type(error).__name__}: {error})")
        finally:
            self._building = False
        from jaxinfer.engine.link.thread import EngineThread

        gc.freeze()  # JAX's 140,000 objects stay; looking at them takes 0.1 s of a full collection
        thread = EngineThread(engine)
        thread.connect(self)
        self._engine = thread
        self._channel.send(Ready(engine.facts, engine.stats()))
        release_memory_of_start()
        return thread.wait()

    def _follow(self) -> None:
        """Pass commands on until the server has gone, then end this process."""
        try:
            for message in self._channel.messages():
                if isinstance(message, Build):
                    self._order.set_result(message)
                elif self._engine is not None:
                    with suppress(EngineError):  # it has ended: the last message tells why
                        self._engine.put(message)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._server_left = True
        end = time.monotonic() + TIDY_SECONDS
        while self._building:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not self._ignored.wait(end - time.monotonic()):
                break
            self._ignored.clear()
            time.sleep(AFTER_IGNORED)
        self._kill()

    def _kill(self) -> None:
        """End this process with whatever it has started, and from whatever it is at."""
        os.killpg(0, signal.SIGKILL)

    def _interrupt(self, *_: object) -> None:
        if self._building and self._server_left:
            raise KeyboardInterrupt

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised while it collects garbage, an interrupt too."""
        if self._server_left and isinstance(what.exc_value, KeyboardInterrupt):
            self._ignored.set()
        else:
            sys.__unraisablehook__(what)

    # Listener: called on the engine's thread

    def news(self, news: News) -> None:
        """See ``Listener``."""
        self._channel.send(Told(news))

    def refuse(self, request_id: str, error: JaxinferError) -> None:
        """See ``Listener``."""
        self._channel.send(refused(request_id, error))

    def pong(self) -> None:
        """See ``Listener``."""
        self._channel.send(Pong())


def main(load: Load = load_planner) -> None:
    """Serve the socket that the command line names."""
    keep_heap_small()
    end = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(EngineChild(engine_end(end)).run(load))


if __name__ == "__main__":
    main()
