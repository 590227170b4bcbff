"""A server's first start: requests are served while most executables are still compiled."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import CacheError, ConfigError, EngineError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.news import News
from jaxinfer.engine.start.build import build_engine, plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile import background, build, memory_plan, stages
from jaxinfer.exec.compile.build import LaterExecutables, compile_missing
from jaxinfer.exec.compile.bundle import Bundle, open_bundle
from jaxinfer.exec.compile.memory_plan import DeviceMemory
from jaxinfer.exec.compile.process import CompilerProcess
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.stages import first_names, in_order_of_use
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.executor import Executor
from jaxinfer.sched.choose import choose_step
from kit.checkpoints import tiny_llama_config
from kit.tiny_models import tiny_config

SECONDS = 30  # timeout of waits
FIRST = (Bucket(4), Bucket(4, 16, 1, scores=True))


class Compiler(CompilerProcess):
    """Compiles in this process and its own thread, which takes a quarter of the time."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self.store, self.names = store, names
        self.closed = False

    def saved(self) -> Iterator[str]:
        for name in self.names:
            if self.closed:
                return
            compile_missing(self.store, [name], NO_PROGRESS)
            yield name

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> EnginePlan:
    """A plan whose program, as on a GPU, needs only some of its executables at first."""
    hf_config, first = getattr(request, "param", (tiny_llama_config(), FIRST))
    chunk = first[-1].num_prefill_tokens
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=chunk,
        prefill_bucket_start=16,
        cache_dir=str(tmp_path / "cache"),
    )
    monkeypatch.setattr(stages, "first_buckets", lambda _: first)
    monkeypatch.setattr(background, "CompilerProcess", Compiler)
    return plan_engine(config)


@contextmanager
def paused(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """Let the other executables wait for an event, which is set at the end at the latest."""
    proceed = threading.Event()

    class Paused(Compiler):
        def saved(self) -> Iterator[str]:
            proceed.wait(SECONDS)
            return super().saved()

    monkeypatch.setattr(background, "CompilerProcess", Paused)
    try:
        yield proceed
    finally:
        proceed.set()


def answers(
    engine: Engine, in_flight: Callable[[], object] = lambda: None
) -> list[tuple[int, ...]]:
    """The tokens of three requests at once, one of them with logprobs of its prompt. ``in_flight``
    is called when their first step is in flight.
    """
    settings = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for number, more in enumerate(({}, {"prompt_logprobs": 1}, {"logprobs": 1})):
        own = msgspec.structs.replace(settings, **more)
        engine.add_request(str(number), RequestSpec([5, 9, 3 + number], own))
    tokens: dict[str, list[int]] = {}
    engine.step()
    in_flight()
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [tuple(tokens[str(number)]) for number in range(3)]


class Early(NamedTuple):
    """An engine that serves early, and the executables that were delivered to it."""

    engine: Engine
    delivered: SimpleQueue[LaterExecutables]

    def take(self) -> None:
        """Add the next delivered executables, as the engine's thread does."""
        self.engine.add_executables(self.delivered.get(timeout=SECONDS))

    def until_compiled(self) -> Engine:
        """Step until all executables are there and have run."""
        while self.engine.is_compiling:
            self.take()
            self.engine.step()
        while self.engine.has_work:
            self.engine.step()
        return self.engine


def early_engine(plan: EnginePlan) -> Early:
    """An engine that is built before all its executables are there."""
    early = Early(build_engine(plan, serves_early=True), SimpleQueue())
    early.engine.load_others(early.delivered.put)
    return early


def planned_buckets(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    seen: list[Bucket] = []

    def chosen(draft: Any) -> Any:
        step = choose_step(draft)
        if step is not None:
            seen.append(step.bucket)
        return step

    monkeypatch.setattr("jaxinfer.sched.schedule.choose_step", chosen)
    return seen


def stages_of(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records whether the first or the other executables are being compiled or loaded."""
    order: list[str] = []
    load_all = background.load_all

    def record(names: Any) -> None:
        order.append("first" if {*names} <= {*first_names(plan.program)} else "others")

    def loaded(bundle: Bundle, progress: Any, names: Any, devices: Any) -> Any:
        record(names)
        return load_all(bundle, progress, names, devices)

    def compiled(store: Store, names: Any, *arguments: Any) -> Any:
        record(names)
        return compile_missing(store, names, *arguments)

    class Recorded(Compiler):
        def saved(self) -> Iterator[str]:
            record(self.names)
            return super().saved()

    monkeypatch.setattr(background, "load_all", loaded)
    monkeypatch.setattr(background, "compile_missing", compiled)
    monkeypatch.setattr(background, "CompilerProcess", Recorded)
    return order


@pytest.mark.parametrize("saved", [False, True])
def test_others_are_compiled_or_loaded_after_the_first_ones_have_run(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    if saved:
        early_engine(plan).until_compiled()
    order, warm_up = stages_of(plan, monkeypatch), Executor.warm_up

    def run(executor: Executor) -> None:
        threading.Event().wait(0.2)  # in which a thread would begin with the others
        order.append("run")
        warm_up(executor)

    monkeypatch.setattr(Executor, "warm_up", run)
    monkeypatch.setattr(background, "release_free_heap", lambda: order.append("released"))
    early_engine(plan).until_compiled()
    assert order == ["first", "run", "others", "released"]


def test_first_executables_are_loaded_while_others_of_them_compile(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, saved = threading.Event(), list[str]()
    load_executable, executable_file = background.load_executable, build.executable_file

    def load(*arguments: Any) -> Any:
        made = load_executable(*arguments)
        loaded.set()
        return made

    def save(program: Program, name: str, compiled: Any) -> Any:
        assert not saved or loaded.wait(SECONDS)
        saved.append(name)
        return executable_file(program, name, compiled)

    monkeypatch.setattr(background, "load_executable", load)
    monkeypatch.setattr(build, "executable_file", save)
    early_engine(plan).until_compiled()
    assert len(saved) == len(plan.program.names())


def test_requests_are_served_before_all_is_compiled(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = planned_buckets(monkeypatch)
    with paused(monkeypatch) as proceed:
        engine = (early := early_engine(plan)).engine
        first = answers(engine)
        assert engine.is_compiling
        assert set(seen) <= {*FIRST}
        stats = engine.stats()
        assert stats.num_compiled == stats.num_executables == len(first_names(plan.program))
        proceed.set()
        early.until_compiled()
    seen.clear()
    assert answers(engine) == first
    assert {*seen} - {*FIRST}, "smaller buckets are used once they are there"
    assert engine.stats().num_late_compiles == 0
    assert engine.stats().num_compiled == engine.stats().num_executables
    assert engine.stats().num_executables == len(plan.program.names())
    folder = next((plan.cache_dir / "executables").iterdir())
    assert {*open_bundle(folder).manifest.executables} == {*plan.program.names()}


@pytest.mark.parametrize(
    "plan", [(tiny_config("qwen3_5"), (Bucket(4), Bucket(4, 128, 4, scores=True)))], indirect=True
)
def test_a_hybrid_is_served_before_all_is_compiled(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paused(monkeypatch) as proceed:
        engine = (early := early_engine(plan)).engine
        first = answers(engine)
        assert engine.is_compiling
        proceed.set()
        early.until_compiled()
    assert answers(engine) == first
    assert engine.stats().num_late_compiles == 0


def test_requests_are_served_before_all_is_loaded(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``paused``, but the bundle exists."""
    first = answers(build_engine(plan))
    proceed, load_all = threading.Event(), background.load_all
    num_executables = len(plan.program.names())

    def loaded(bundle: Bundle, progress: Any, names: Any, devices: Any) -> Any:
        if not {*names} <= {*first_names(plan.program)}:
            proceed.wait(SECONDS)
        return load_all(bundle, progress, names, devices)

    monkeypatch.setattr(background, "load_all", loaded)
    engine = (early := early_engine(plan)).engine
    assert answers(engine) == first
    assert engine.stats().num_executables == len(first_names(plan.program))
    proceed.set()
    early.until_compiled()
    assert answers(engine) == first
    assert engine.stats().num_executables == num_executables
    assert engine.stats().num_compiled == engine.stats().num_late_compiles == 0


def test_others_are_loaded_after_the_tokenizer(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_engine(plan)
    order = stages_of(plan, monkeypatch)

    def read(_: EnginePlan) -> None:
        time.sleep(0.3)
        order.append("tokenizer")

    monkeypatch.setattr(EnginePlan, "tokenizer", property(read))
    early_engine(plan).until_compiled()
    assert order.index("first") < order.index("tokenizer") < order.index("others")


def test_new_executables_run_once_while_no_request_is_there(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run takes a GPU 25 ms, for which requests in flight would wait."""
    build_engine(plan)
    engine = (early := early_engine(plan)).engine
    run_once, warmed = Executor.run_once, list[Bucket]()

    def recorded(executor: Executor, buckets: list[Bucket]) -> None:
        assert engine._loop.idle
        warmed.extend(buckets)
        run_once(executor, buckets)

    monkeypatch.setattr(Executor, "run_once", recorded)
    answers(engine, early.take)
    early.until_compiled()
    assert {*warmed} == {*plan.program.limits.buckets} - {*FIRST}


def test_executables_join_an_engine_without_requests(plan: EnginePlan) -> None:
    thread, awaited = EngineThread(build_engine(plan, serves_early=True)), SimpleQueue[int]()

    def listen(message: object) -> None:
        if isinstance(message, News):
            awaited.put(message.stats.num_awaited)

    thread.connect(listen)
    while awaited.get(timeout=SECONDS):
        pass
    thread.stop()


def test_executables_join_an_engine_that_sleeps(plan: EnginePlan) -> None:
    early = early_engine(plan)
    first = answers(early.engine)
    early.engine.sleep()
    early.take()
    early.engine.wake_up()
    assert answers(early.until_compiled()) == first


def test_a_damaged_file_after_the_start_ends_no_request(
    plan: EnginePlan, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(plan)
    (folder,) = (plan.cache_dir / "executables").iterdir()
    name = next(name for name in plan.program.names() if name not in first_names(plan.program))
    damaged = folder / f"{name}.bin"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with caplog.at_level(logging.ERROR):
        engine = (early := early_engine(plan)).engine
        early.until_compiled()
    assert f"cannot be loaded (the executables in {folder} cannot be used" in caplog.text
    assert all(len(tokens) == 6 for tokens in answers(engine))
    with pytest.raises(CacheError, match="delete that folder"):
        build_engine(plan)


def test_executables_join_while_a_step_is_in_flight(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paused(monkeypatch) as proceed:
        engine = (early := early_engine(plan)).engine
        alone = answers(engine)

        def load() -> None:
            proceed.set()
            for _ in range(2):  # the first one completes no bucket
                early.take()

        assert answers(engine, load) == alone
        assert {*engine._loop.state.buckets} > {*FIRST}
        early.until_compiled()


def test_an_engine_that_ends_early_leaves_what_it_has_compiled(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is killed: nothing is written at its end."""
    first = first_names(plan.program)
    with paused(monkeypatch):
        engine = (early := early_engine(plan)).engine
        (folder,) = (plan.cache_dir / "executables").glob("*[!k]")
        assert {*open_bundle(folder).manifest.executables} == {*first}
        engine.close()
    names = in_order_of_use(plan.program, {*plan.program.names()} - {*first})
    compile_missing(plan.store, names[:1], NO_PROGRESS)
    order, compiled = stages_of(plan, monkeypatch), list[str]()

    class Recorded(Compiler):
        def __init__(self, store: Store, names: Sequence[str]) -> None:
            super().__init__(store, names)
            compiled.extend(names)

    monkeypatch.setattr(background, "CompilerProcess", Recorded)
    engine = (early := early_engine(plan)).engine
    early.until_compiled()
    assert order == ["first", "others"]
    assert compiled == names[1:]
    assert engine.stats().num_compiled == len(compiled)
    assert engine.stats().num_executables == len(plan.program.names())
    assert {*open_bundle(folder).manifest.executables} == {*plan.program.names()}


def test_a_first_start_that_ends_early_leaves_what_it_has_compiled(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one, saved = build._Compilation.save_one, list[bool]()

    def save(self: Any) -> bool:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.extend([True] * (found := save_one(self)))
        return found

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(build._Compilation, "save_one", save)
        build_engine(plan)
    (folder,) = (plan.cache_dir / "executables").iterdir()
    assert len(open_bundle(folder).manifest.executables) == 2
    assert build_engine(plan).stats().num_compiled == len(plan.program.names()) - 2


def test_a_failure_after_the_start_ends_no_request(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Compiler):
        def saved(self) -> Iterator[str]:
            yield from super().saved()
            raise EngineError("no space left")

    monkeypatch.setattr(background, "CompilerProcess", Fails)
    with caplog.at_level(logging.ERROR):
        engine = (early := early_engine(plan)).engine
        assert all(len(tokens) == 6 for tokens in answers(engine))
        early.until_compiled()
    assert "cannot be compiled (no space left)" in caplog.text
    assert all(len(tokens) == 6 for tokens in answers(engine))


def test_a_failure_before_the_start_is_the_start_s(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ConfigError("no kernel")

    monkeypatch.setattr(build, "compile_all", fails)
    with pytest.raises(ConfigError, match="no kernel"):
        build_engine(plan, serves_early=True)
    assert not [*(plan.cache_dir / "executables").iterdir()]


def test_a_workspace_beyond_the_plan_is_refused(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceMemory(10**12, 10**12)
    monkeypatch.setattr(memory_plan, "RESERVE_BYTES", -(10**15))
    with pytest.raises(ConfigError, match="of workspace"):
        build_engine(replace(plan, memory=replace(plan.memory, device=device)), serves_early=True)
