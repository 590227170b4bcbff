"""The executables of the cache: a bundle that grows, of one user."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.exec.compile.bundle import StoredExecutable
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model

STORED = StoredExecutable("d1.bin", 4, "", 0)


@pytest.fixture
def shared_umask() -> Generator[None]:
    """The umask of systems on which each user has a group of one's own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    limits = tiny_limits(max_num_seqs=1, max_num_batched_tokens=16)
    program = Program(tiny_model("llama")[0], limits, platform="cpu")
    return Store.of(program, program_memory(program, None), tmp_path / "cache")


def added(store: Store) -> Path:
    """The file of an executable that was added."""
    file = store.folder / STORED.file
    with store.adding():
        file.write_bytes(b"code")
        file.chmod(0o644)
        store.add("d1", STORED)
    return file


def test_nothing_is_left_if_nothing_was_added(store: Store) -> None:
    assert store.bundle() is None and not store.saved()
    with pytest.raises(RuntimeError), store.adding():
        raise RuntimeError
    assert not [*store.folder.parent.iterdir()]


@pytest.mark.usefixtures("shared_umask")
def test_what_is_added_is_of_this_user_alone(store: Store) -> None:
    file = added(store)
    assert store.saved() == {"d1": STORED}
    assert [one.stat().st_mode & 0o777 for one in (store.cache, store.folder)] == [0o700, 0o700]
    with store.adding():
        store.add("admit", STORED)
    assert [*store.saved()] == ["admit", "d1"]
    assert {*os.listdir(store.folder)} == {file.name, "manifest.json"}


@pytest.mark.parametrize("which", ["cache", "folder", "file"])
def test_executables_that_others_may_change_are_refused(which: str, store: Store) -> None:
    file = added(store)
    changed = {"cache": store.cache, "folder": store.folder, "file": file}[which]
    changed.chmod(0o777)
    with pytest.raises(CacheError, match=f"{changed} may be written by other users"):
        store.saved()
    with (
        pytest.raises(CacheError, match=f"{changed} may be written by other users"),
        store.adding(),
    ):
        pass
