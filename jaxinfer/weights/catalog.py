"""Finds and reads the TOML files of models with a short name, which the package contains."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CatalogEntry:
    """The source of a known model; ``sha256`` is the hash of a file in a wheel.

    ``sampling`` holds its sampling defaults, with the names of generation_config.json. ``size`` is
    that of the download in bytes, ``about`` says what the model is good at.
    """

    source: str
    sha256: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    size: int = 0
    about: str = ""


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
