"""A report has its commit, and whether the sources differ from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jaxinfer.bench import circumstances


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One commit with a file in each of two folders, as the bench's own repository."""
    for name in ("jaxinfer/bench/circumstances.py", "jaxinfer/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(
        circumstances, "__file__", str(tmp_path / "jaxinfer" / "bench" / "circumstances.py")
    )
    return tmp_path


def test_changed_sources_are_reported(checkout: Path) -> None:
    def dirty() -> bool:
        return circumstances.host_circumstances("jaxinfer")["git_dirty"]

    assert not dirty()
    (checkout / "notes").write_text("no source")
    assert not dirty()
    (checkout / "jaxinfer" / "a.py").write_text("2")
    assert dirty()
