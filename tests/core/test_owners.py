"""Files that other users own or may change are not trusted; what the cache creates is private."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.core.owners import check_owner, check_parents, check_tree
from jaxinfer.core.staging import build_once, prepare_folder

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The one of systems where each user has a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def fill(folder: Path) -> None:
    (folder / "data").write_text("whole")
    (folder / "more").mkdir()
    (folder / "more" / "data").write_text("whole")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """An entry of a cache."""
    found = tmp_path / "cache" / "downloads" / "entry"
    assert build_once(found, fill, root=tmp_path / "cache")
    return found


def modes(root: Path) -> dict[str, int]:
    return {one.name: one.stat().st_mode & 0o777 for one in (root, *root.rglob("*"))}


def test_what_the_cache_creates_is_private(tmp_path: Path, entry: Path) -> None:
    found = modes(tmp_path / "cache")
    assert {found[name] for name in ("cache", "downloads", "entry")} == {0o700}
    assert not any(mode & 0o022 for mode in found.values())
    assert not build_once(entry, fill, root=tmp_path / "cache")
    prepare_folder(tmp_path / "other" / "executables", tmp_path / "other")
    assert set(modes(tmp_path / "other").values()) == {0o700}


def test_a_folder_that_the_user_names_has_the_users_umask(tmp_path: Path) -> None:
    assert build_once(tmp_path / "a" / "out", fill, elsewhere="choose another folder")
    assert modes(tmp_path / "a")["out"] == 0o775
    assert not build_once(tmp_path / "a" / "out", fill)  # nothing is checked


CHANGES: dict[str, Callable[[Path], Any]] = {
    "the root": lambda entry: entry.parents[1].chmod(0o777),
    "a parent": lambda entry: entry.parent.chmod(0o770),
    "the entry": lambda entry: entry.chmod(0o707),
    "a file": lambda entry: (entry / "data").chmod(0o664),
    "a folder below": lambda entry: (entry / "more").chmod(0o775),
    "a file below": lambda entry: (entry / "more" / "data").chmod(0o646),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_others_may_write_is_refused(
    tmp_path: Path, entry: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES[name](entry)
    with pytest.raises(
        CacheError, match=r"may be written by other users \(mode [67]\d\d\), .*chmod"
    ):
        build_once(entry, fill, root=tmp_path / "cache")
    monkeypatch.setenv("JAXINFER_TRUST_CACHE", "1")
    assert not build_once(entry, fill, root=tmp_path / "cache")


@as_root
@pytest.mark.parametrize("name", [".", "data", "more", "more/data", "..", "../.."])
def test_what_others_own_is_refused(tmp_path: Path, entry: Path, name: str) -> None:
    os.chown(entry / name, NOBODY, NOBODY)
    with pytest.raises(CacheError, match=r"belongs to the user .*JAXINFER_TRUST_CACHE=1 if all"):
        build_once(entry, fill, root=tmp_path / "cache")


@as_root
def test_what_root_owns_is_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o644)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from jaxinfer.core.owners import check_owner\n"
        "os.setuid(65534); check_owner(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "file"], check=True)


def test_links_are_followed(tmp_path: Path, entry: Path) -> None:
    (tmp_path / "link").symlink_to(entry)
    check_owner(tmp_path / "link")
    check_tree(tmp_path / "link")
    entry.chmod(0o777)
    with pytest.raises(CacheError, match="link may be written"):
        check_owner(tmp_path / "link")


def test_a_file_may_be_removed_while_a_folder_is_checked(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(str(entry), [], ["data", "manifest.json.4711"])]
    monkeypatch.setattr(os, "walk", lambda _: found)
    check_tree(entry)
    (entry / "manifest.json.4711").symlink_to(entry / "nothing")
    with pytest.raises(FileNotFoundError):
        check_tree(entry)


def test_only_folders_of_the_cache_are_checked(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    root = tmp_path / "open" / "cache"
    check_parents(root / "downloads" / "entry", root)  # neither is there
    assert build_once(root / "downloads" / "entry", fill, root=root)
    check_parents(root / "downloads" / "entry", root)
    with pytest.raises(CacheError, match="open may be written by other users"):
        check_parents(root / "downloads" / "entry", tmp_path / "open")
