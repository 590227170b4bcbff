"""What holds for every test: JAX's settings, Ctrl-C and the hypothesis profiles.

Set in the environment before JAX is imported, so that commands started by a test inherit them.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# A shell has what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing makes many objects and few cycles. To look for those after each 700 objects (Python's
# default), and among those of modules too, took 5 % of a process's time.
gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of nightly.txt; a line must name a test of a file that is collected whole."""
    lines = (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    names = {f"tests/{line}" for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.nightly)
    if not any("::" in argument for argument in config.args):
        files = {item.nodeid.partition("::")[0] for item in items}
        found = {item.nodeid for item in items}
        own = {name for name in names if name.partition("::")[0] in files}
        if missing := sorted(own - found):
            raise pytest.UsageError(f"tests/nightly.txt names {missing[0]}, which does not exist")


def pytest_collection_finish() -> None:
    """Modules stay."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """As ``cli.main`` does, and why: Python's last collection crashes now and then."""
    gc.freeze()


settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile("ci")


FORGET = pytest.StashKey[Callable[[], None]]()
TESTS = pytest.StashKey[int]()  # that are done


@pytest.fixture(scope="session", autouse=True)
def each_module_is_compiled_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Steps of the same tiny models are compiled for many tests, and compiling is the time."""
    from kit.compiled_once import compiled_once

    with compiled_once() as forget_if_many:
        request.config.stash[FORGET] = forget_if_many
        yield


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Executables are forgotten before there are too many for one process."""
    stash = item.config.stash
    stash[TESTS] = stash.get(TESTS, 0) + 1
    if stash[TESTS] % 32 == 0 and FORGET in stash:
        stash[FORGET]()


@pytest.fixture(scope="session", autouse=True)
def no_late_compiles() -> Iterator[None]:
    """No engine of the whole session may compile anything while it serves."""
    from jaxinfer.engine.loop import engine
    from jaxinfer.engine.loop.late_compiles import LateCompiles

    watches: list[LateCompiles] = []

    class Recorded(LateCompiles):
        def __init__(self) -> None:
            super().__init__()
            watches.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "LateCompiles", Recorded)
        yield
    assert sum(watch.count for watch in watches) == 0
