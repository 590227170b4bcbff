"""New weights of floats, which are quantised to the forms that an engine keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LLM, LanguageModel
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.weights import EngineWeights
from jaxinfer.models.params import by_path, nested
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.nn.weight import stored
from jaxinfer.weights.load import stream_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.quantised.convert import convert_folder
from jaxinfer.weights.quantised.on_load import quantised_like
from jaxinfer.weights.save import ParamsCheckpoint
from kit.checkpoints import random_hf_tensors, tiny_qwen3_config, write_hf_folder
from kit.served_weights import GREEDY, PROMPT, check_served
from kit.tiny_models import tiny_model
from kit.tokenizers import TINY_VOCAB_SIZE
from pallas_kernels.lib.quantised import Form

CONFIG = tiny_qwen3_config(vocab_size=TINY_VOCAB_SIZE)
SETTINGS: dict[str, Any] = {
    "cpu_weights": "quantised",
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "block_size": 8,
}


def write(folder: Path, seed: int) -> Path:
    tensors = random_hf_tensors(build_model(CONFIG, "float32"), seed=seed)
    return write_hf_folder(folder, CONFIG, tensors)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    parent = tmp_path_factory.mktemp("models")
    return write(parent / "first", 1), write(parent / "second", 2)


def planned(folder: Path, scheme: str | None) -> EnginePlan:
    given: Any = SETTINGS | {"page_size": SETTINGS["block_size"]}
    del given["block_size"]
    return plan_engine(EngineConfig(model=str(folder), quantization=scheme, **given))


def assert_same(one: Any, other: Any) -> None:
    one, other = by_path(one), by_path(other)
    assert one.keys() == other.keys()
    for path, array in one.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other[path]), path)


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_a_tree_and_a_folder_become_what_a_fresh_engine_loads(
    folders: tuple[Path, Path], scheme: str, tmp_path: Path
) -> None:
    """Bit for bit; the engine need not run for it."""
    weights = EngineWeights(planned(folders[0], scheme), cast("Any", None))
    m = jaxinfer.load(str(folders[1]), **SETTINGS)
    m.save(tmp_path / "saved", progress=NO_PROGRESS)
    expected = planned(tmp_path / "saved", scheme).load_params(NO_PROGRESS)
    assert weights.model.forms and by_path(expected).keys() == weights.model.arrays.keys()
    assert_same(weights.prepared(m.params), expected)
    assert_same(weights.prepared(jax.tree.map(np.asarray, m.params)), expected)
    assert_same(weights.prepared(tmp_path / "saved"), expected)
    assert_same(weights.prepared(expected), expected)  # as before
    layer = {**expected["layers_1"], "down": m.params["layers_1"]["down"]}
    assert_same(weights.prepared({**expected, "layers_1": layer}), expected)


def test_a_quantised_engine_serves_new_floats(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = SETTINGS | {"cache_dir": str(tmp_path / "cache")}
    llm = LLM(str(folders[0]), quantization="int8", **settings)
    fresh = planned(folders[1], "int8")
    second = LanguageModel(fresh.program.model, fresh.load_params(NO_PROGRESS))
    floats = jaxinfer.load(str(folders[1]), **settings).params
    before = llm.model.params
    layer, down = floats["layers_1"], floats["layers_1"]["down"]
    for wrong, message in (
        (down.T, r"layers_1/down has shape \(64, 128\) instead of \(128, 64\)"),
        (down.astype(jnp.bfloat16), "layers_1/down is bfloat16 instead of float32; cast it"),
        (down.at[3, 4].set(jnp.nan), "layers_1/down holds NaN or infinity; the old weights stay"),
    ):
        with pytest.raises(JaxinferError, match=message):
            llm.update_weights({**floats, "layers_1": {**layer, "down": wrong}})
        assert llm.model.params is before
    with pytest.raises(JaxinferError, match="params have no embed and"):
        llm.update_weights({"layers_1": layer})
    llm.update_weights(folders[1])
    check_served(llm.generate([PROMPT], GREEDY), second)
    llm.update_weights(folders[0])
    llm.update_weights(floats)
    check_served(llm.generate([PROMPT], GREEDY), second)
    assert llm.stats().num_late_compiles == 0


def test_weights_of_other_forms_get_a_remedy(folders: tuple[Path, Path], tmp_path: Path) -> None:
    weights = EngineWeights(planned(folders[0], "int4"), cast("Any", None))
    convert_folder(str(folders[1]), tmp_path / "int8", "int8", progress=NO_PROGRESS)
    remedy = r"give weights of floats, .* or on a CPU with --cpu-weights float32"
    with pytest.raises(JaxinferError, match=remedy):
        weights.prepared(tmp_path / "int8")


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", Form("int4", 32, "float16", offsets=True)),  # biases next to the matrices
        ("gpt2", Form("int8", 32, "float16")),  # matrices stored [in, out]
        ("mixtral", Form("int8", None, "float32")),  # a tensor for each expert
        ("gpt_oss", Form("fp4", 32, "bfloat16")),  # stacks [E, in, out], gates and ups in turn
        ("deepseek_v2", Form("fp8", None, "float32")),  # a matrix that is divided, not quantised
    ],
)
def test_matrices_of_every_layout(family: str, form: Form) -> None:
    floats, params = tiny_model(family)
    specs = [s for s in floats.declared_specs if s.matrix is not None and s.path != "lm_head"]
    sources = {source.name: source for spec in specs for source in spec.sources}
    fitting = {
        name: form
        for name, source in sources.items()
        if all(size % (form.group or 4) == 0 for size in source.own_shape)
    }
    model = replace(floats, forms=tuple(fitting.items()))
    checkpoint = quantised_like(model, ParamsCheckpoint(floats, params))
    plan = plan_params(model, checkpoint)
    made = nested(stream_params(plan, checkpoint, default_placement(), NO_PROGRESS, threads=1))
    assert by_path(made).keys() == model.arrays.keys() != floats.arrays.keys()
    for spec in specs:
        old, new = (reduce(getitem, spec.path.split("/"), tree) for tree in (params, made))
        found = stored(new, by_output=spec.matrix == "rows").dense(jnp.dtype(jnp.float32))
        error = jnp.linalg.norm((found - old).ravel()) / jnp.linalg.norm(old.ravel())
        assert error < 0.13, spec.path
