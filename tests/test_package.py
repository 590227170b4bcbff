"""The package as a whole: its version, its public names, and what it imports."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

import jaxinfer

ROOT = Path(__file__).parents[1]
NATIVE = "pallas_kernels/native/src"


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"] == jaxinfer.__version__ == metadata.version("jaxinfer")


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(Path(jaxinfer.__file__).read_text())
    imported = {
        alias.name
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert imported == set(jaxinfer.__all__)


@pytest.mark.parametrize("name", jaxinfer.__all__)
def test_public_name_loads(name: str) -> None:
    assert getattr(jaxinfer, name).__name__ == name
    assert name in dir(jaxinfer)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'jaxinfer' has no attribute 'Engine'"):
        _ = jaxinfer.Engine


def test_a_source_distribution_has_all_native_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setuptools, which tests do not have, puts an extension's sources and dependencies into it."""
    given: dict[str, Any] = {}
    setuptools, commands, build_ext = map(
        ModuleType, ("setuptools", "setuptools.command", "setuptools.command.build_ext")
    )
    setuptools.setup = lambda **arguments: given.update(arguments)  # type: ignore[attr-defined]
    setuptools.Extension = lambda name, **files: files  # type: ignore[attr-defined]
    build_ext.build_ext = object  # type: ignore[attr-defined]
    for module in (setuptools, commands, build_ext):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runpy.run_path(str(ROOT / "setup.py"))
    [extension] = given["ext_modules"]
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / NATIVE).iterdir()}
    assert {*extension["sources"], *extension["depends"]} == own
    assert f"{NATIVE}/variant_avx2.cc" in extension["sources"]


def test_a_wheel_has_all_native_sources() -> None:
    """The native library is refused if its version is not their hash."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["setuptools"]["package-data"]["pallas_kernels.native"] == ["src/*"]


NAMES = "from jaxinfer import EngineConfig; from jaxinfer.weights.catalog import known_models; "
SCRIPT = f"{NAMES}assert EngineConfig and known_models()\n"


@pytest.mark.parametrize("how", ["script", "statement", "module", "a folder on the path"])
def test_a_folder_of_the_same_name_hides_nothing(how: str, tmp_path: Path) -> None:
    """Whoever works in the parent of a clone has a folder ``jaxinfer`` without ``__init__`` on the
    path, which import prefers to hooks of an editable install, but not to a package.
    """
    work = tmp_path / "work"
    (work / "jaxinfer" / "docs").mkdir(parents=True)
    (work / "run_it.py").write_text(SCRIPT)
    arguments = {
        "script": ["run_it.py"],
        "statement": ["-c", SCRIPT],  # as in a notebook, whose path begins with the folder
        "module": ["-m", "run_it"],
        "a folder on the path": ["-c", f"import sys; sys.path.insert(0, {str(work)!r}); {SCRIPT}"],
    }[how]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = tmp_path if how == "a folder on the path" else work
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_an_installation_brings_no_other_package() -> None:
    """Of what lies beside the package in a clone, nothing may hide a user's own folder: only a
    folder with an ``__init__`` could.
    """
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == {"jaxinfer", "pallas_kernels"}


def test_import_is_light() -> None:
    script = "import sys, jaxinfer; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not {"jax", "numpy", "msgspec", "flax"} & set(modules)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("jinja2", "3.1.5"),  # CVE-2024-56326, CVE-2025-27516: a template leaves the sandbox
        ("starlette", "1.2.1"),  # CVE-2026-48710
        ("pip", "25.3"),  # CVE-2025-8869, CVE-2026-1703: an archive writes outside its folder
    ],
)
def test_no_version_with_a_known_advisory_is_admitted(name: str, last: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (given,) = [one for one in map(Requirement, project["dependencies"]) if one.name == name]
    assert not given.specifier.contains(last)
    pinned = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M | re.I)
    assert pinned is not None and given.specifier.contains(pinned[1])
