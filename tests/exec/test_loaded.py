"""Executables that are loaded when somebody asks for one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.aot import Bundle
from jaxinfer.exec.compile import build_executables
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


def test_a_group_that_was_begun_is_waited_for() -> None:
    began: list[str] = []
    may_end = threading.Event()

    def load(name: str) -> Any:
        began.append(name)
        assert may_end.wait(10)
        return f"loaded {name}"

    loaded = LoadedExecutables({}, (("one", "other"), ("another",)), load, threads=2)
    loaded.begin("other")
    may_end.set()
    assert loaded["one"] == "loaded one" and loaded["other"] == "loaded other"
    assert sorted(began) == ["one", "other"]


def test_of_a_bundle_mixed_steps_follow_when_the_engine_has_its_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    load = Bundle.load

    def noted(self: Bundle, name: str) -> Any:
        names.append(name)
        return load(self, name)

    monkeypatch.setattr(Bundle, "load", noted)
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16)
    program = Program(tiny_model("llama")[0], limits)
    folder = tmp_path / "bundle"
    executables = build_executables(program, folder=folder, progress=NoProgress())
    assert sorted(names) == ["d1", "d2", "p16x1"]
    executables.load_rest()
    assert callable(executables.by_name["d2p16x1"])
    assert sorted(names) == ["d1", "d2", "d2p16x1", "p16x1"]
