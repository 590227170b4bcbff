"""A bundle's fingerprint covers the sources from which steps are traced, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.exec.compile import fingerprint
from jaxinfer.exec.compile.fingerprint import TRACED_FOLDERS, of_machine
from jaxinfer.nn.placement import default_placement


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages instead of our own."""
    for folder in ("pallas_kernels/op/tuned", *(f"jaxinfer/{one}" for one in TRACED_FOLDERS)):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(fingerprint, "files", lambda name: tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        *((f"jaxinfer/{folder}/new.py", True) for folder in TRACED_FOLDERS),
        ("pallas_kernels/op/tuned/nvidia.json", True),
        ("pallas_kernels/op/triton.py", True),
        ("pallas_kernels/op/notes.md", False),
        ("jaxinfer/server/new.py", False),
        ("jaxinfer/new.py", False),
    ],
)
def test_traced_sources_change_the_digest(root: Path, path: str, counts: bool) -> None:
    before = of_machine(default_placement())["sources"]
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x = 1\n")
    made = of_machine(default_placement())["sources"]
    assert (made != before) == counts
    file.write_text("x = 2\n")
    assert (of_machine(default_placement())["sources"] != made) == counts
    file.rename(file.with_stem("other"))
    assert (of_machine(default_placement())["sources"] != made) == counts
