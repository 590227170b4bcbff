"""Loading a bundle in a process: kernel libraries and unusable files. See also tests/cli."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.compile import bundle

PROGRAM = """
import sys
import jax
from jaxinfer.exec.compile import bundle
from jaxinfer.core.progress import NoProgress
jax.default_backend = lambda: sys.argv[1]
class Empty:
    class manifest:
        executables = {}
bundle.load_bundle(Empty, NoProgress(), ())
print("jax.experimental.mosaic.gpu" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Mosaic's library is only for Linux")
@pytest.mark.parametrize(("platform", "loaded"), [("gpu", "True"), ("cpu", "False")])
def test_the_kernel_library_is_loaded_before_executables(platform: str, loaded: str) -> None:
    """Without it a process that has compiled nothing cannot load a step with Mosaic kernels."""
    command = [sys.executable, "-c", PROGRAM, platform]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == loaded


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"junk", "UnpicklingError"), (None, "FileNotFoundError")],
    ids=["junk", "missing"],
)
def test_an_unusable_file_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    stored = {"d1": bundle.StoredExecutable("d1.bin", 0, sha256(b"junk").hexdigest(), 0)}
    manifest = SimpleNamespace(executables=stored)
    if content is not None:
        (tmp_path / "d1.bin").write_bytes(content)
    with pytest.raises(CacheError, match=f"d1.bin.*{words}"):
        bundle.load_bundle(bundle.Bundle(tmp_path, manifest), NoProgress(), ["d1"])  # type: ignore[arg-type]
