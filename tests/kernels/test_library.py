"""The file of the native library: it is there, and a broken one is refused by name."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from numpy.random import _generator

from pallas_kernels.native import library
from pallas_kernels.native.sources import SOURCES, version

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
    assert "`python setup.py build_ext --inplace`" in str(caught.value)


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
    refused(file, "it was built of other sources: it has no version")


@pytest.mark.skipif(library.missing() is not None, reason=library.MISSING)
@pytest.mark.parametrize("change", ["changed", "added", "renamed"])
def test_a_library_that_is_older_than_its_sources(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handlers may take other arguments, which XLA notices in the middle of a run."""
    [file] = Path(library.__file__).parent.glob("_library*.so")
    library._opened(file)
    folder = Path(shutil.copytree(SOURCES, tmp_path / "src"))
    if change == "changed":
        with (folder / "handlers.cc").open("a") as opened:
            opened.write("// one more argument\n")
    elif change == "added":
        (folder / "one.inc").touch()
    else:
        (folder / "ssd.inc").rename(folder / "scan.inc")
    monkeypatch.setattr(library, "version", lambda: version(folder))
    refused(file, f"it was built of other sources: its version is {version(SOURCES)}, that of src")


def test_a_file_of_text(tmp_path: Path) -> None:
    file = tmp_path / "_library.so"
    file.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    refused(file, "")
