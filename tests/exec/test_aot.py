"""What loading a bundle needs of its process; bundles themselves are tried in tests/cli."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
from jaxinfer.exec import aot
from jaxinfer.core.progress import NoProgress
jax.default_backend = lambda: sys.argv[1]
class Empty:
    class manifest:
        executables = {}
aot.load_bundle(Empty, NoProgress())
print("jax.experimental.mosaic.gpu" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Mosaic's library is Linux's")
@pytest.mark.parametrize(("platform", "loaded"), [("gpu", "True"), ("cpu", "False")])
def test_the_library_of_kernels_is_there_before_they_are(platform: str, loaded: str) -> None:
    """On an H200 a process that had compiled nothing could not load a step with Mosaic kernels."""
    command = [sys.executable, "-c", PROGRAM, platform]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == loaded
