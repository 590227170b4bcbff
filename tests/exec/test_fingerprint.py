"""A bundle's fingerprint covers the sources that are traced and every field of the layers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest

from jaxinfer.exec.compile import fingerprint
from jaxinfer.exec.compile.fingerprint import (
    TRACED_FOLDERS,
    differences,
    family_digest,
    family_module,
    family_sources,
    imported_models,
    of_machine,
    of_model,
    source_digest,
)
from jaxinfer.models import ModelFamily, build_model
from jaxinfer.nn.placement import default_placement
from kit.mixed_family import mixed_model
from kit.tiny_models import NAMES, tiny_config
from pallas_kernels.lib.quantised import Form


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Two packages instead of our own."""
    folders = ("jaxinfer/models", *(f"jaxinfer/{one}" for one in TRACED_FOLDERS))
    for folder in ("pallas_kernels/op/tuned", *folders):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(fingerprint, "files", lambda name: tmp_path / name)
    yield tmp_path
    source_digest.cache_clear()
    family_digest.cache_clear()


def sources() -> str:
    """The digest as a new process finds it."""
    source_digest.cache_clear()
    return of_machine(default_placement())["sources"]


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        *((f"jaxinfer/{folder}/new.py", True) for folder in TRACED_FOLDERS),
        ("pallas_kernels/op/tuned/nvidia.json", True),
        ("pallas_kernels/op/triton.py", True),
        ("pallas_kernels/op/notes.md", False),
        ("jaxinfer/models/new.py", False),
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


MODULES = {  # of ``models``: an own family that imports most of them, and another one
    "__init__": "from jaxinfer.models.registry import FAMILIES",
    "registry": "FAMILIES = ('jaxinfer.models.own', 'jaxinfer.models.other')",
    "base": "from jaxinfer.models.params import Spec",
    "params": "Spec = object",
    "own": "from jaxinfer.models import readers as r\nfrom jaxinfer.models.shared import config\n",
    "readers": "import numpy",
    "shared": "def config():\n    from . import inner\n    import jaxinfer.models.rope.scales",
    "inner": "",
    "rope/__init__": "from .more import x",
    "rope/more": "",
    "rope/scales": "from ..late import x",
    "late": "",
    "other": "from jaxinfer.models import own",
}
NOT_OWN = {"__init__", "registry", "other", "new"}


@pytest.mark.parametrize("changed", [*MODULES, "new"])
def test_only_modules_that_a_family_imports_change_its_digest(root: Path, changed: str) -> None:
    def digest() -> str:
        family_digest.cache_clear()
        return family_digest("jaxinfer.models.own")

    folder = root / "jaxinfer" / "models"
    (folder / "rope").mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    before = digest()
    (folder / f"{changed}.py").write_text(MODULES.get(changed, "") + "\nx = 1\n")
    assert (digest() != before) == (changed not in NOT_OWN)


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_that_a_step_uses_are_in_the_digest(name: str) -> None:
    """Of ``models``, ``exec`` and ``nn`` import nothing that is not in every family's digest."""
    model = build_model(tiny_config(name), "float32")
    module = family_module(model.family)
    sources = family_sources(module)
    others = {"jaxinfer.models.registry", *(f"jaxinfer.models.{other}" for other in NAMES)}
    assert module in sources and not (sources.keys() & others - {module})
    package = Path(fingerprint.__file__).parents[2]
    for folder in ("exec", "nn"):
        for path in (package / folder).rglob("*.py"):
            found = imported_models(path.read_bytes(), f"jaxinfer.{folder}")
            modules = {each for each in found if fingerprint._source_path(each)}
            assert modules <= sources.keys(), path


def test_a_family_outside_the_library_is_in_the_digest() -> None:
    family = mixed_model("full")[0].family
    assert family_sources(family_module(family)).keys() == {
        "kit.mixed_family",
        *(f"jaxinfer.models.{name}" for name in ("arguments", "base", "params", "quantised")),
        *("jaxinfer.models.division", "jaxinfer.models.sources"),
    }
    reader = partial(partial(family.config_from_hf))
    assert family_module(ModelFamily("partial", reader, family.param_specs)) == "kit.mixed_family"


def test_sources_are_read_once_in_a_process() -> None:
    """A start needs the fingerprint twice, the second time while weights are loaded."""
    model, placement = build_model(tiny_config("qwen3"), "float32"), default_placement()
    for one in (source_digest, family_digest):
        one.cache_clear()
    for _ in range(2):
        of_machine(placement), of_model(model)
    for one in (source_digest, family_digest):
        assert (one.cache_info().misses, one.cache_info().hits) == (1, 1)


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


def test_forms_that_differ_in_the_dtype_of_scales_differ() -> None:
    """AWQ has scales in float16, compressed-tensors in bfloat16: other arguments of a step."""
    model = build_model(tiny_config("llama"), "float32")
    form = Form("int4", 128, "float16")
    one, two = (
        replace(model, forms=(("w", replace(form, scale_dtype=dtype)),))
        for dtype in ("float16", "bfloat16")
    )
    assert of_model(one) != of_model(two)
