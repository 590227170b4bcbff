"""Stacks are read, built and placed piece by piece, and a weight may be several arrays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.models.base import Model, ModelFamily, abstract_params
from jaxinfer.models.params import ParamSpec, by_path, join_outputs
from jaxinfer.models.registry import build_model
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights import converted, dummy
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.load import LOAD_THREADS, load_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import ModelSource
from kit.checkpoints import built_arrays, random_hf_tensors
from kit.memory_checkpoint import Held, InMemory, source_of
from kit.mixed_family import FAMILY, mixed_decoder, mixed_model, mixed_tensors
from kit.tiny_models import NAMES, tiny_config

EXPERTS, WIDTH, INNER = 128, 8, 12
KINDS = ("full", "latent")
MIXED = Model(FAMILY, "MixedForTests", mixed_decoder(*KINDS))


def load(model: Model, source: ModelSource, cache: Path = Path("unused")) -> dict[str, jax.Array]:
    placement, progress = default_placement(), NoProgress()
    params = load_params(
        model, source, placement=placement, cache_dir=cache, seed=0, progress=progress
    )
    return by_path(params)


def many_experts(layers: int, held: Held | None = None) -> Model:
    """A model whose layers have only stacks of experts."""
    held = held or Held()

    def build(*weights: np.ndarray) -> np.ndarray:
        return held.watch(np.ascontiguousarray(join_outputs(*weights)))  # in the placed layout

    def specs(config: Any) -> tuple[ParamSpec, ...]:
        del config
        return tuple(spec for i in range(layers) for spec in of_layer(f"layers_{i}/"))

    def of_layer(path: str) -> tuple[ParamSpec, ...]:
        pairs = [f"{path}{e}.{name}" for e in range(EXPERTS) for name in ("gate", "up")]
        inputs = tuple(Source(name, (INNER, WIDTH)) for name in pairs)
        outputs = tuple(Source(f"{path}{e}.down", (WIDTH, INNER)) for e in range(EXPERTS))
        axes = ("experts", None, None)
        gate_up = ArraySpec((EXPERTS, WIDTH, 2 * INNER), axes)
        down = ArraySpec((EXPERTS, INNER, WIDTH), axes)
        return (
            ParamSpec(path + "gate_up", gate_up, inputs, build, pieces=EXPERTS),
            ParamSpec(path + "down", down, outputs, build, pieces=EXPERTS),
        )

    return Model(ModelFamily("many", lambda *_: None, specs), "Many", MIXED.config)  # type: ignore[arg-type, return-value]


def test_the_host_holds_one_piece_per_thread() -> None:
    held = Held()
    model = many_experts(8, held)
    tensors = random_hf_tensors(model)
    loaded = load(model, source_of(InMemory(tensors, held)))
    peak = held.peak
    expected = built_arrays(model, tensors)
    assert loaded.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)
    piece = WIDTH * 2 * INNER * 4
    threads = min(LOAD_THREADS, os.cpu_count() or 1)
    # a piece's sources and the built piece, and the previous piece, which may not be freed yet
    assert 2 * piece <= peak <= threads * 3 * piece
    assert threads * 3 * piece < EXPERTS * piece


def test_large_parameters_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.weights.load.LOAD_THREADS", 1)  # in the order of the plan
    read: list[int] = []

    class Recorded(InMemory):
        def read(self, name: str, part: int | None = None) -> np.ndarray:
            read.append(self.tensors[name].nbytes)
            return super().read(name, part)

    model = MIXED
    load(model, source_of(Recorded(mixed_tensors(model))))
    assert max(read) > 2 * min(read)
    assert read[0] == max(read)


def test_a_plan_of_many_sources_is_quick() -> None:
    """Qwen3-30B-A3B has 48 layers of 128 experts of 3 matrices."""
    model = many_experts(48)
    tensor = np.zeros((INNER, WIDTH), np.float32), np.zeros((WIDTH, INNER), np.float32)
    start = time.process_time()
    names = [source.name for spec in model.param_specs for source in spec.sources]
    checkpoint = InMemory({name: tensor[name.endswith("down")] for name in names})
    plan_params(model, checkpoint)
    assert len(names) == 18_432
    assert time.process_time() - start < 2  # measured: 0.1 s


def test_sources_of_several_arrays_are_read_once() -> None:
    checkpoint = InMemory(mixed_tensors(MIXED))
    loaded = load(MIXED, source_of(checkpoint))
    expected = by_path(mixed_model(*KINDS)[1])
    assert loaded.keys() == expected.keys()
    assert (loaded["layers_1/experts/values"].dtype, loaded["embed"].dtype) == ("int8", "float32")
    for path, array in expected.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)
        assert loaded[path].dtype == array.dtype
    assert set(checkpoint.reads.values()) == {1}


def test_stacks_and_several_arrays_are_cached(tmp_path: Path) -> None:
    checkpoint = InMemory(mixed_tensors(MIXED))
    source = source_of(checkpoint, quantised=True)
    loaded, again = load(MIXED, source, tmp_path), load(MIXED, source, tmp_path)
    assert set(checkpoint.reads.values()) == {1}
    for path, array in by_path(mixed_model(*KINDS)[1]).items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)
        np.testing.assert_array_equal(again[path], array, err_msg=path)


@pytest.mark.parametrize(
    "change",
    [
        {"arrays": ArraySpec((4, 6), (None, None), np.dtype(np.int8))},
        {"arrays": ArraySpec((4, 6), ("experts", None))},
        {"sources": tuple(Source(f"other{i}", (6,)) for i in range(4))},
        {"build": join_outputs},
        {"pieces": None},
    ],
    ids=["dtype", "axes", "sources", "build", "pieces"],
)
def test_a_cache_entry_depends_on_every_field_of_a_spec(change: dict[str, Any]) -> None:
    first = {
        "path": "stack",
        "arrays": ArraySpec((4, 6), (None, None)),
        "sources": tuple(Source(f"tensor{i}", (6,)) for i in range(4)),
        "build": np.asarray,
        "pieces": 4,
    }

    def entry(**fields: Any) -> Path:
        specs = (ParamSpec(**(first | fields)),)
        family = ModelFamily("one", lambda *_: None, lambda _: specs)  # type: ignore[arg-type, return-value]
        model = Model(family, "One", MIXED.config)
        return converted.entry_path(Path(), "fingerprint", model)

    assert entry() == entry() != entry(**change)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_a_cache_entry(name: str) -> None:
    """The same one for an equal model, and no address of this process in it."""
    made = [build_model(tiny_config(name), "float32") for _ in range(2)]
    first, second = (converted.entry_path(Path(), "fingerprint", model) for model in made)
    assert first == second
    names = [converted._identity(spec) for spec in made[0].param_specs]
    assert not [one for one in names if " at 0x" in one]


def test_random_integers_are_spread_and_their_scales_fit() -> None:
    params = dummy_params(MIXED, placement=default_placement(), seed=0, progress=NoProgress())
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract_params(MIXED)
    )
    experts = params["layers_1"]["experts"]
    values = np.asarray(experts["values"], np.float32)
    assert (values.min(), values.max()) == (-128, 127)
    weights = values * np.asarray(experts["scales"])[:, None, None]
    assert 0.019 < weights.std() < 0.021


def test_random_stacks_need_no_temporary_memory() -> None:
    def uniform(seed: jax.Array) -> jax.Array:
        indices = jax.lax.iota(np.uint32, EXPERTS * 64 * 96)
        made = dummy._uniform(seed, indices, jax.numpy.dtype(jax.numpy.bfloat16))
        return made.reshape(EXPERTS, 64, 96)

    compiled = jax.jit(uniform).lower(jax.ShapeDtypeStruct((), np.uint32)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.output_size_in_bytes == EXPERTS * 64 * 96 * 2
    assert memory.temp_size_in_bytes < 1 << 16
