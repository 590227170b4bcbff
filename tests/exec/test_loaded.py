"""Executables that are loaded when somebody asks for one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.aot import Bundle
from jaxinfer.exec.compile import (
    Executables,
    build_executables,
    bundle_for,
    compile_bundle,
    load_executables,
)
from jaxinfer.exec.loaded import LoadedExecutables
from jaxinfer.exec.program import Program
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model


def test_a_group_is_loaded_together_when_one_of_it_is_asked_for() -> None:
    began: list[str] = []
    every = threading.Event()

    def load(name: str) -> Any:
        began.append(name)
        if len(began) == 2:
            every.set()
        assert every.wait(10)
        return f"loaded {name}"

    now: Any = "at once"
    groups = (("later", "other"), ("another",))
    loaded = LoadedExecutables({"now": now}, groups, load, threads=2)
    assert loaded["now"] == now and len(loaded) == 4
    assert set(loaded) == {"now", "later", "other", "another"}
    assert "later" in loaded and "nobody" not in loaded
    with pytest.raises(KeyError):
        loaded["nobody"]
    assert not began
    assert loaded["other"] == "loaded other" and loaded["later"] == "loaded later"
    assert sorted(began) == ["later", "other"]


def test_one_that_cannot_be_loaded_is_an_error_of_who_asks() -> None:
    def load(name: str) -> Any:
        raise ValueError(f"{name} is junk")

    loaded = LoadedExecutables({}, (("one", "other"),), load, threads=1)
    for name in ("other", "one", "other"):
        with pytest.raises(ValueError, match=f"{name} is junk"):
            loaded[name]


def test_a_group_is_loaded_whole_for_a_thread_that_waits_for_it_and_only_once() -> None:
    began: list[str] = []
    may_end = threading.Event()

    def load(name: str) -> Any:
        began.append(name)
        assert may_end.wait(10)
        return f"loaded {name}"

    loaded = LoadedExecutables({}, (("one", "other"), ("another",)), load, threads=2)
    waiting = [threading.Thread(target=loaded.load_group, args=("other",)) for _ in range(4)]
    for thread in waiting:
        thread.start()
    assert all(thread.is_alive() for thread in waiting)
    may_end.set()
    for thread in waiting:
        thread.join(10)
    assert loaded["one"] == "loaded one" and loaded["other"] == "loaded other"
    assert sorted(began) == ["one", "other"]


def test_what_loading_a_group_took_is_given_back_after_its_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("jaxinfer.exec.loaded.release_free_heap", lambda: told.append("end"))

    def load(name: str) -> Any:
        told.append(name)
        if name == "other":
            raise ValueError(f"{name} is junk")
        return name

    groups = (("one", "other", "third"), ("another",))
    loaded = LoadedExecutables({}, groups, load, threads=1)
    assert loaded["third"] == "third" and loaded["one"] == "one"
    with pytest.raises(ValueError, match="other is junk"):
        loaded["other"]
    assert loaded["another"] == "another"
    assert told == ["third", "one", "other", "end", "another", "end"]


def test_a_group_of_which_one_cannot_be_loaded_is_an_error_of_who_waits() -> None:
    def load(name: str) -> Any:
        if name == "other":
            raise ValueError(f"{name} is junk")
        return f"loaded {name}"

    with pytest.raises(ValueError, match="other is junk"):
        LoadedExecutables({}, (("one", "other"),), load, threads=1).load_group("one")


def test_mixed_steps_are_made_and_loaded_when_the_engine_has_its_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = Bundle.load

    def noted(self: Bundle, name: str) -> Any:
        loads.append(name)
        return load(self, name)

    monkeypatch.setattr(Bundle, "load", noted)
    program = Program(
        tiny_model("llama")[0], tiny_limits(max_num_seqs=2, max_num_batched_tokens=16)
    )
    cached, given = tmp_path / "cached", tmp_path / "given"

    def ready(executables: Executables) -> list[str]:
        assert sorted(loads) == ["d1", "d2", "p16x1"] and executables.mixed is not None
        executables.mixed.result()
        assert callable(executables.by_name["d2p16x1"]) and "d2p16x1" in loads
        loads.clear()
        return sorted(path.name for path in tmp_path.iterdir())

    first = build_executables(program, folder=cached, progress=NoProgress())
    assert first.compiled == 4 and [path.name for path in tmp_path.iterdir()] == ["cached"]
    assert ready(first) == ["cached", "cached-later"]
    again = build_executables(program, folder=cached, progress=NoProgress())
    assert again.compiled == 0 and again.later is not None
    assert ready(again) == ["cached", "cached-later"]

    compile_bundle(program, given, settings={}, progress=NoProgress())
    loads.clear()
    bundle = bundle_for(program, given, program.names())
    whole = load_executables(program, bundle, NoProgress())
    assert whole.later is None and ready(whole) == ["cached", "cached-later", "given"]
