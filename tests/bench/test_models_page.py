"""The table of docs/models.md is what the registry and the committed results say."""

from __future__ import annotations

from bench.models_page import GGUF_FAMILIES, PAGE, rendered
from jaxinfer.models.registry import family_for, known_architectures, wrapping_architectures
from jaxinfer.weights.gguf.config import known_architectures as gguf_architectures


def test_the_page_is_rendered() -> None:
    assert rendered(PAGE.read_text("utf-8")) == PAGE.read_text("utf-8"), "run bench.models_page"


def test_every_gguf_architecture_has_a_family() -> None:
    names = [one for one in known_architectures() if one not in wrapping_architectures()]
    known = {family_for({"architectures": [name]}).name for name in names}
    assert {GGUF_FAMILIES.get(name, name) for name in gguf_architectures()} <= known
