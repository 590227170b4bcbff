"""Short names of known models: one TOML file each, shipped with the package.

Owns: finding and reading the files. Must not know: how a source is downloaded.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class CatalogEntry:
    """Where a known model comes from; ``sha256`` is that of the model file."""

    source: str
    sha256: str


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
