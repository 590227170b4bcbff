"""Short names of known models: one TOML file each, shipped with the package.

Owns: finding and reading the files.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CatalogEntry:
    """Where a known model comes from; ``sha256`` is that of the model file.

    ``sampling`` are its sampling defaults, by the names of a generation_config.
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
