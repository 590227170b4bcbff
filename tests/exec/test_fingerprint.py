"""A bundle's fingerprint covers the traced sources and every field of the layers."""

from __future__ import annotations

from collections.abc import Generator
from itertools import permutations
from pathlib import Path

import pytest

from jaxinfer.exec.compile import fingerprint
from jaxinfer.exec.compile.fingerprint import TRACED_FOLDERS, differences, of_machine, of_model
from jaxinfer.models import build_model
from jaxinfer.nn.placement import default_placement
from kit.mixed_family import mixed_model
from kit.tiny_models import tiny_config


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Two packages instead of our own."""
    for folder in ("pallas_kernels/op/tuned", *(f"jaxinfer/{one}" for one in TRACED_FOLDERS)):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(fingerprint, "files", lambda name: tmp_path / name)
    yield tmp_path
    fingerprint.source_digest.cache_clear()


def sources() -> str:
    """The digest as a new process finds it."""
    fingerprint.source_digest.cache_clear()
    return of_machine(default_placement())["sources"]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        *((f"jaxinfer/{folder}/new.py", True) for folder in TRACED_FOLDERS),
        ("pallas_kernels/op/tuned/nvidia.json", True),
        ("pallas_kernels/op/triton.py", True),
        ("pallas_kernels/op/notes.md", False),
        ("jaxinfer/server/new.py", False),
        ("jaxinfer/new.py", False),
    ],
)
def test_traced_sources_change_the_digest(root: Path, path: str, counts: bool) -> None:
    before = sources()
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x = 1\n")
    made = sources()
    assert (made != before) == counts
    file.write_text("x = 2\n")
    assert (sources() != made) == counts
    file.rename(file.with_stem("other"))
    assert (sources() != made) == counts


def test_a_field_of_a_layer_is_named_in_a_difference() -> None:
    made, here = (
        of_model(build_model(tiny_config("gemma3") | change, "float32"))
        for change in ({}, {"num_key_value_heads": 1})
    )
    assert differences(made, here) == {
        "mixer.num_kv_heads": "mixer.num_kv_heads is 2 in the bundle and 1 here"
    }


def test_the_order_and_the_kinds_of_layers_are_in_the_fingerprint() -> None:
    orders = permutations(("full", "window", "latent", "recurrent"))
    found = {str(sorted(of_model(mixed_model(*kinds)[0]).items())) for kinds in orders}
    assert len(found) == 24
