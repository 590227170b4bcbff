"""What each target of the Makefile would install, read from ``make --dry-run`` in a bare folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The files that targets depend on, without a .venv."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(folder: Path, *targets: str) -> list[str]:
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *targets]
    text = subprocess.check_output(command, cwd=folder, text=True)
    return text.replace("\\\n", " ").splitlines()


def at(lines: list[str], words: str) -> int:
    """The number of the one line with these words."""
    [number] = [number for number, line in enumerate(lines) if words in line]
    return number


def test_the_demo_installs_no_tools(bare: Path) -> None:
    lines = commands(bare, "demo")
    install = at(lines, "pip install")
    assert lines[install].endswith("-e .")
    assert "--quiet" not in lines[install]
    assert at(lines, "echo 'Installing jaxinfer") < at(lines, "-m venv .venv") < install
    assert at(lines, "jaxinfer generate") > install
    assert not any("optional-dependencies" in line or "[dev]" in line for line in lines)


@pytest.mark.parametrize(
    "targets", [("tools",), ("test-others",), ("lint", "test-models"), ("format",), ("nightly",)]
)
def test_tools_come_after_the_package_which_is_built_once(
    targets: tuple[str, ...], bare: Path
) -> None:
    lines = commands(bare, *targets)
    installs = [line for line in lines if "pip install" in line]
    package, tools = installs[:2]
    assert package.endswith("-e .")
    assert tools.endswith("-r .venv/tools.txt") and " -e " not in tools
    assert not any(line.endswith("-e .") for line in installs[1:])
    assert 'optional-dependencies"]["dev"]' in lines[at(lines, ">.venv/tools.txt")]


def test_a_change_of_the_native_sources_builds_again(bare: Path) -> None:
    (bare / ".venv").mkdir()
    (bare / ".venv" / ".installed").touch()
    assert not any("pip install" in line for line in commands(bare, "demo"))
    source = bare / "pallas_kernels" / "native" / "src" / "one.cc"
    source.parent.mkdir(parents=True)
    source.touch()
    assert any(line.endswith("-e .") for line in commands(bare, "demo"))
