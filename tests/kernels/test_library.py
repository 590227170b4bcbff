"""The file of the native library: it is there, and a broken one is refused by name."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from numpy.random import _generator

from pallas_kernels.native import library

# ziglang, with which setup.py builds where there is no compiler, has packages for these.
CAN_BUILD = shutil.which("c++") or platform.machine() in ("x86_64", "aarch64", "arm64")


@pytest.mark.skipif(not CAN_BUILD, reason="there is no C++ compiler for this machine")
def test_the_library_is_built() -> None:
    """An installation goes on without it, and tests of its kernels are skipped."""
    assert library.variants(), f"{library.MISSING}; pip install -v -e . says why it was left out"
    assert library.variants()[-1] == "plain"


def refused(file: Path, reason: str) -> None:
    with pytest.raises(library.BrokenLibrary) as caught:
        library._opened(file)
    assert str(caught.value).startswith(f"the native library {file} cannot be used ({reason}")
    assert str(caught.value).endswith("; install jaxinfer again, which builds it")


@pytest.mark.skipif(library.library() is None, reason=library.MISSING)
@pytest.mark.parametrize("kept", [40, 5000, -1])
def test_a_file_that_is_cut_off(kept: int, tmp_path: Path) -> None:
    """The dynamic linker would end the process."""
    [whole] = Path(library.__file__).parent.glob("_library*.so")
    file = tmp_path / "_library.so"
    file.write_bytes(whole.read_bytes()[:kept])
    refused(file, "file too short" if kept == 40 else "it is cut off")


def test_a_library_without_the_functions(tmp_path: Path) -> None:
    """As one that was built of other sources; this one is numpy's."""
    file = Path(shutil.copy(_generator.__file__, tmp_path / "_library.so"))
    refused(file, "")


def test_a_file_of_text(tmp_path: Path) -> None:
    file = tmp_path / "_library.so"
    file.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    refused(file, "")
