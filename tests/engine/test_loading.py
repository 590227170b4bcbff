"""The order in which weights, pages and executables are loaded or created."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError
from jaxinfer.engine.start import build, loading
from jaxinfer.engine.start import plan as engine_plan
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.memory_plan import DeviceMemory
from jaxinfer.exec.run import device_memory
from kit.checkpoints import tiny_llama_config

SECONDS = 10  # timeout of waits


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> EnginePlan:
    """The plan of an engine whose executables are saved."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_llama_config()))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        prefill_bucket_start=64,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    made = build.plan_engine(config)
    assert build.build_engine(made).stats().num_compiled
    return made


@pytest.fixture
def gpu_plan(plan: EnginePlan) -> EnginePlan:
    """The same plan for a device with its own memory."""
    return replace(plan, memory=replace(plan.memory, device=DeviceMemory(10**12, 10**12)))


def record_order(
    monkeypatch: pytest.MonkeyPatch, before_weights: Callable[[], None], events: list[str]
) -> None:
    """Record the order in which weights are loaded and pages created."""
    load_params, compile_init_state = engine_plan.load_params, loading.compile_init_state

    def weights(*arguments: Any, **settings: Any) -> Any:
        before_weights()
        params = load_params(*arguments, **settings)
        events.append("weights")
        return params

    def pages(*arguments: Any) -> Any:
        make = compile_init_state(*arguments)

        def made() -> Any:
            state = make()
            events.append("pages")
            return state

        return made

    monkeypatch.setattr(engine_plan, "load_params", weights)
    monkeypatch.setattr(loading, "compile_init_state", pages)


def test_pages_are_created_while_weights_load_if_the_device_has_its_own_memory(
    gpu_plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def wait_for_pages() -> None:
        end = time.monotonic() + SECONDS
        while "pages" not in events:
            assert time.monotonic() < end, "pages wait for weights"
            time.sleep(0.01)

    record_order(monkeypatch, wait_for_pages, events)
    assert not build.build_engine(gpu_plan).stats().num_compiled
    assert events == ["pages", "weights"]


def test_pages_are_created_after_the_weights_in_host_memory(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    record_order(monkeypatch, lambda: time.sleep(0.5), events)
    assert not build.build_engine(plan).stats().num_compiled
    assert events == ["weights", "pages"]


def test_no_thread_waits_for_memory_that_could_not_be_claimed(
    gpu_plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {*threading.enumerate()}

    def claim_memory(*_: Any) -> None:
        raise EngineError("9 GB are planned")

    monkeypatch.setattr(loading, "claim_memory", claim_memory)
    with pytest.raises(EngineError, match="9 GB are planned"):
        build.build_engine(gpu_plan)
    for thread in {*threading.enumerate()} - threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), thread.name


def test_the_kernel_runtime_is_loaded_before_threads_compile(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since loading it changes the environment in which XLA starts ptxas."""
    threads: list[int] = []
    before = threading.active_count()
    monkeypatch.setattr(
        build, "load_kernel_runtime", lambda: threads.append(threading.active_count())
    )
    build.plan_engine(plan.config)
    assert threads and max(threads) <= before


def test_on_a_cpu_an_array_of_pages_is_released_before_the_next_is_made(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all pages, which few users need, are in the peak of the resident memory."""
    page = plan.program.state()[0]

    def made() -> int:
        return sum(one.shape == page.shape for one in jax.live_arrays())

    before, counts = made(), list[int]()
    monkeypatch.setattr(device_memory, "release_zeros", lambda *_: counts.append(made() - before))
    state, _ = device_memory.init_state(plan.program)
    assert len(state) > 1 and counts == [*range(1, 1 + len(state))]
