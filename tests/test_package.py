"""The package as a whole: its version, its public names, and what it imports."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import jaxinfer

ROOT = Path(__file__).parents[1]


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


def test_import_is_light() -> None:
    script = "import sys, jaxinfer; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not {"jax", "numpy", "msgspec", "flax"} & set(modules)
