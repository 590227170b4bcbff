"""Loading a bundle in a process: kernel libraries and unusable files. See also tests/cli."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.compile import bundle

PROGRAM = """
import os
import sys
import jax
from jaxinfer.exec.compile import bundle
from jaxinfer.core.progress import NoProgress
jax.default_backend = lambda: sys.argv[1]
class Empty:
    class manifest:
        executables = {}
list(bundle.load_all(Empty, NoProgress(), (), ()))
print("jax_cuda13_plugin._mosaic_gpu_ext" in sys.modules)
print(os.environ.get("MOSAIC_GPU_RUNTIME_LIB_PATH"))
"""


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_kernel_library_is_loaded_before_executables(platform: str, tmp_path: Path) -> None:
    """Without it a process that has compiled nothing cannot load a step with Mosaic kernels."""
    plugin = tmp_path / "jax_cuda13_plugin"
    plugin.mkdir()
    for name in ("__init__.py", "_mosaic_gpu_ext.py"):
        (plugin / name).touch()
    command = [sys.executable, "-c", PROGRAM, platform]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    runtime = str(plugin / "libmosaic_gpu_runtime.so")
    expected = ["True", runtime] if platform == "gpu" else ["False", "None"]
    assert done.stdout.split() == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"junk", "UnpicklingError"), (b"more", "not what its manifest says"), (None, "is missing")],
    ids=["junk", "changed", "missing"],
)
def test_an_unusable_file_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    stored = {"d1": bundle.StoredExecutable("d1.bin", 4, sha256(b"junk").hexdigest(), 0)}
    manifest = SimpleNamespace(executables=stored)
    if content is not None:
        (tmp_path / "d1.bin").write_bytes(content)
    with pytest.raises(CacheError, match=f"d1.bin.*{words}"):
        given = bundle.Bundle(tmp_path, manifest)  # type: ignore[arg-type]
        list(bundle.load_all(given, NoProgress(), ["d1"], jax.devices()[:1]))


@pytest.mark.parametrize("writable", ["folder", "file"])
def test_code_that_others_may_change_is_refused(writable: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "d1.bin").write_text("code")
    changed = tmp_path if writable == "folder" else tmp_path / "d1.bin"
    changed.chmod(0o775)
    with pytest.raises(CacheError, match=rf"{changed} may be written by other users \(mode 775\)"):
        bundle.open_bundle(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"format": 4, "settings": ' + "[" * 100_000, "nested too deep"),
        ('{"format": 4, "format": 4}', "the key 'format' is there twice"),
        (b"\xff", "it is not UTF-8"),
    ],
    ids=["nested", "nested settings", "twice", "bytes"],
)
def test_a_damaged_manifest_is_named(manifest: str | bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    with pytest.raises(CacheError, match=f"manifest.json is no manifest: .*{why}"):
        bundle.open_bundle(tmp_path)
