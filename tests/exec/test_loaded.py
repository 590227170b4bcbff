"""Executables that are loaded when somebody asks for one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jaxinfer.exec.loaded import LoadedExecutables


def test_others_are_loaded_together_when_one_is_asked_for() -> None:
    began: list[str] = []
    every = threading.Event()

    def load(name: str) -> Any:
        began.append(name)
        if len(began) == 2:
            every.set()
        assert every.wait(10)
        return f"loaded {name}"

    now: Any = "at once"
    loaded = LoadedExecutables({"now": now}, ("later", "other"), load, threads=2)
    assert loaded["now"] == now and set(loaded) == {"now", "later", "other"} and len(loaded) == 3
    assert "later" in loaded and "nobody" not in loaded
    with pytest.raises(KeyError):
        loaded["nobody"]
    assert not began
    assert loaded["other"] == "loaded other" and loaded["later"] == "loaded later"
    assert sorted(began) == ["later", "other"]


def test_one_that_cannot_be_loaded_is_an_error_of_who_asks() -> None:
    def load(name: str) -> Any:
        raise ValueError(f"{name} is junk")

    loaded = LoadedExecutables({}, ("one", "other"), load, threads=1)
    for name in ("other", "one", "other"):
        with pytest.raises(ValueError, match=f"{name} is junk"):
            loaded[name]
