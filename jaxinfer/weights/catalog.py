"""Finds and reads the TOML files of models with a short name, which the package contains."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CatalogEntry:
    """The source of a known model; ``sha256`` is the hash of the model file.

    ``sampling`` holds its sampling defaults, with the names of generation_config.json.
    """

    source: str
    sha256: str
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


def known_models() -> tuple[str, ...]:
    """The short names, sorted."""
    entries = (files("jaxinfer.configs") / "models").iterdir()
    return tuple(sorted(e.name.removesuffix(".toml") for e in entries if e.name.endswith(".toml")))


def find_model(name: str) -> CatalogEntry | None:
    """The entry of a short name, if there is one."""
    if name not in known_models():
        return None
    text = (files("jaxinfer.configs") / "models" / f"{name}.toml").read_text("utf-8")
    return CatalogEntry(**tomllib.loads(text))
