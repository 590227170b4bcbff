"""A tiny model of the tests in which weights change, and its settings: compiled once for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.served_weights import SMALL, write_tiny_model


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return SMALL | {"cache_dir": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))
