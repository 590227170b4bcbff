"""Logits and greedy tokens equal those of Hugging Face transformers (see tests/golden)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from golden.cases import CASES as ROWS
from jaxinfer.models import Model, Params, build_model, forward
from jaxinfer.models.params import nested
from jaxinfer.models.registry import text_config
from jaxinfer.weights.plan import canonical_name
from kit.checkpoints import built_arrays, unstacked

DATA = Path(__file__).parents[1] / "golden" / "data"
OTHERS = {  # the models of these are in other files, or make no text
    *("smollm2_greedy", "gguf_rope", "gguf_experts", "gguf_hybrid"),
    "gguf_families",
    *("embeddings", "reranker"),
}
CASES = sorted({path.stem for path in DATA.glob("*.safetensors")} - OTHERS)


def params_of(model: Model, tensors: dict[str, np.ndarray]) -> Params:
    """Apply the family's specs; every tensor must be used or ignored by the family."""
    tensors = unstacked(tensors) if model.family.stacked_experts else tensors
    tensors = {canonical_name(model.family, name): tensor for name, tensor in tensors.items()}
    sources = [source for spec in model.param_specs for source in spec.sources]
    assert all(tensors[source.name].shape == source.shape for source in sources)
    used, ignored = (
        {source.name for source in sources},
        re.compile("|".join(model.family.ignored_tensors)),
    )
    assert [name for name in tensors if name not in used and not ignored.fullmatch(name)] == []
    return nested(built_arrays(model, tensors))


def loaded(case: str) -> tuple[Model, Params, dict[str, np.ndarray]]:
    """The model of a golden file, its parameters, and all tensors of the file."""
    with safe_open(DATA / f"{case}.safetensors", "numpy") as file:
        config = text_config(json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    length = tensors["token_ids"].shape[1] + tensors["greedy_tokens"].shape[1]
    model = build_model(config, "float32", length)  # transformers scales rope by the same length
    weights = {
        n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")
    }
    return model, params_of(model, weights), tensors


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str) -> None:
    model, params, tensors = loaded(case)
    sequence = np.concatenate([tensors["token_ids"], tensors["greedy_tokens"]], axis=1)
    start = tensors["token_ids"].shape[1]
    logits = jax.jit(jax.vmap(lambda ids: forward(model, params, ids)))(sequence)
    np.testing.assert_allclose(logits[:, :start], tensors["logits"], atol=1e-4, rtol=0)
    # teacher-forced: each greedy token is the most likely one after those before it
    choices = np.argmax(logits, axis=-1)[:, start - 1 : -1]
    assert np.array_equal(choices, tensors["greedy_tokens"])


def test_every_row_of_the_table_has_a_file() -> None:
    assert sorted(ROWS) == CASES


# norms of the stream after blocks are here those before the next ones: see models/openai_gpt.py
ENDS = ("openai_gpt",)
WITHOUT_PATTERNS = ("deepseek_v4",)  # attention to tokens and to windows of them
HIDDEN = sorted(path.stem for path in (DATA / "hidden").glob("*.safetensors"))


@pytest.mark.parametrize("case", HIDDEN)
def test_activations_equal_transformers(case: str) -> None:
    """The residual stream before each layer, attention patterns, and the final norm's output."""
    model, params, tensors = loaded(case)
    depth, expected = len(model.config.layers), load_file(DATA / "hidden" / f"{case}.safetensors")
    layers, dtype = model.config.layers, model.config.dtype
    used = [*range(depth)]
    if len(expected["hidden"]) != depth + 1:  # transformers may not count layers without blocks
        used = [i for i in range(depth) if not layers[i].is_empty]
    each = len(used) // (len(expected["hidden"]) - 1)  # layers for one of transformers
    streams = [f"layers.{i}.resid_pre" for i in used[::each]] + ["final_norm"]
    states = [layer.mixer.state(dtype) for layer in layers]
    patterns = [f"layers.{i}.pattern" for i, own in enumerate(states) if own.paged or own.follows]
    patterns = [] if case in WITHOUT_PATTERNS else patterns
    read = jax.jit(lambda ids: forward(model, params, ids, taps=(*streams, *patterns))[1])
    found = read(tensors["token_ids"][0])
    assert len(expected["patterns"]) == len(patterns)
    if case in ENDS:
        streams, expected["hidden"] = [streams[0], "final_norm"], expected["hidden"][[0, -1]]
    for points, name in ((streams, "hidden"), (patterns, "patterns")):
        if not points:  # no layer has attention
            continue
        width = expected[name].shape[-1]  # of the first of several streams
        ours = np.stack([found[point][..., :width] for point in points])
        np.testing.assert_allclose(ours, expected[name], atol=1e-4, rtol=0)


def test_every_family_has_golden_activations() -> None:
    families = {loaded(case)[0].family.name for case in HIDDEN}
    missing = {loaded(case)[0].family.name for case in CASES} - families
    assert not missing, (
        f"{', '.join(missing)} has golden logits but no activations; add a case of it to CASES of "
        "tests/golden/make_hidden.py and make its file"
    )
