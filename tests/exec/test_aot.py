"""What loading a bundle needs of its process; bundles themselves are tried in tests/cli."""

from __future__ import annotations

import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import NoProgress
from jaxinfer.exec import aot

PROGRAM = """
import sys
import jax
from jaxinfer.exec import aot
from jaxinfer.core.progress import NoProgress
jax.default_backend = lambda: sys.argv[1]
class Empty:
    class manifest:
        executables = {}
aot.load_bundle(Empty, NoProgress(), ())
print("jax.experimental.mosaic.gpu" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Mosaic's library is Linux's")
@pytest.mark.parametrize(("platform", "loaded"), [("gpu", "True"), ("cpu", "False")])
def test_the_library_of_kernels_is_there_before_they_are(platform: str, loaded: str) -> None:
    """On an H200 a process that had compiled nothing could not load a step with Mosaic kernels."""
    command = [sys.executable, "-c", PROGRAM, platform]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == loaded


def test_others_are_loaded_together_when_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("later", "now", "other")
    stored = {name: aot.StoredExecutable(f"{name}.bin", 0, "", 0) for name in names}
    bundle = SimpleNamespace(folder=tmp_path, manifest=SimpleNamespace(executables=stored))
    began: list[str] = []
    every = threading.Event()

    def load(folder: Path, one: aot.StoredExecutable) -> str:
        began.append(one.file)
        if len(began) == len(names):
            every.set()
        assert one.file == "now.bin" or every.wait(10)
        return one.file

    monkeypatch.setattr(aot, "_load", load)
    monkeypatch.setattr(aot, "LOAD_THREADS", 2)
    loaded = aot.load_bundle(bundle, NoProgress(), ("now",))  # type: ignore[arg-type]
    assert loaded["now"] == "now.bin" and set(loaded) == set(names) and len(loaded) == 3
    assert "later" in loaded and "nobody" not in loaded
    with pytest.raises(KeyError):
        loaded["nobody"]
    assert began == ["now.bin"]
    assert loaded["later"] == "later.bin" and loaded["other"] == "other.bin"
    assert sorted(began) == ["later.bin", "now.bin", "other.bin"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"junk", "UnpicklingError"), (b"other", "not what its manifest says")],
    ids=["junk", "changed"],
)
@pytest.mark.parametrize("needed", [("d1",), ()], ids=["at_once", "when_asked_for"])
def test_an_unusable_file_is_told(
    needed: tuple[str, ...], content: bytes, words: str, tmp_path: Path
) -> None:
    stored = {"d1": aot.StoredExecutable("d1.bin", 0, sha256(b"junk").hexdigest(), 0)}
    bundle = SimpleNamespace(folder=tmp_path, manifest=SimpleNamespace(executables=stored))
    (tmp_path / "d1.bin").write_bytes(content)
    asked = None
    with pytest.raises(CacheError, match=f"d1.bin.*{words}"):
        asked = aot.load_bundle(bundle, NoProgress(), needed)  # type: ignore[arg-type]
        asked["d1"]
    assert (asked is None) == bool(needed)
