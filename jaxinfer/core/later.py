"""What a thread makes beside everything else, for who may want it.

Owns: ``Later``. Must not know: what is made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

# After which a thread that computes gives Python's lock to another that wants it, meanwhile. With
# the default, 5 ms, whoever waits for a device and wakes often is slowed down tenfold.
TURN_SECONDS = 0.0005


class Later[T]:
    """A value that ``make`` returns, in a thread that runs from ``begin`` on.

    The thread is no daemon: a process that ends meanwhile waits for it. What ``make`` raises is
    raised to who asks for the value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._on_failure: Callable[[BaseException], None] | None = None
        self._value = Future[T]()
        self._thread = threading.Thread(target=self._run, name="later")
        self._starting = threading.Lock()

    def begin(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Begin to make it, if nobody has. What ``make`` raises is told to ``on_failure`` first,
        unless the process is ending: that cuts the making off, and nobody wants the value any more.
        """
        with self._starting:
            if self._thread.ident is None:
                self._on_failure = on_failure
                self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is made, or cannot be."""
        return self._value.done()

    @property
    def made(self) -> bool:
        """Whether it is made."""
        return self._value.done() and self._value.exception() is None

    @property
    def under_way(self) -> bool:
        """Whether it is being made."""
        return self._thread.is_alive()

    def when_done(self, then: Callable[[], object]) -> None:
        """Call ``then`` when it is made, or cannot be: on its thread; or now, if it is by now."""
        self._value.add_done_callback(lambda _: then())

    def wait(self, seconds: float) -> None:
        """Return when it is done, or after so many seconds."""
        wait((self._value,), seconds)

    def result(self) -> T:
        """The value; waits for it."""
        self.begin()
        return self._value.result()

    def _run(self) -> None:
        turn = sys.getswitchinterval()
        sys.setswitchinterval(TURN_SECONDS)
        try:
            self._value.set_result(self._make())
        except BaseException as error:
            if self._on_failure is not None and not _process_is_ending():
                self._on_failure(error)
            self._value.set_exception(error)
        finally:
            sys.setswitchinterval(turn)


def _process_is_ending() -> bool:
    """Whether the main thread has returned, and Python waits for the other threads.

    From then on no pool takes work, which is what cuts off who makes something, and the first thing
    that can be seen of the end: until all pools are idle the main thread still counts as alive.
    """
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(int)
    except RuntimeError as error:  # also of a machine that has no thread left
        return "interpreter shutdown" in str(error)
    finally:
        pool.shutdown(wait=False)
    return False
