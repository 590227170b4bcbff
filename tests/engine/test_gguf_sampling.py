"""Sampling defaults of a GGUF file: its own keys, else llama.cpp's; and where the log says they are
from. They are in the plan, which serve, generate and LLM share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.summary import describe_plan
from jaxinfer.models.registry import build_model
from jaxinfer.weights.catalog import CatalogEntry
from kit.checkpoints import (
    random_hf_tensors,
    tiny_llama_config,
    write_gguf,
    write_hf_folder,
)

LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def gguf_file(path: Path, **sampling: float) -> Path:
    """A tiny model with these keys below general.sampling."""
    config = tiny_llama_config(num_key_value_heads=4)
    tensors = random_hf_tensors(build_model(config, "float32"))
    keys = {f"general.sampling.{name}": value for name, value in sampling.items()}
    return write_gguf(path, config, tensors, metadata=keys)


def planned(model: Path | str, **settings: Any) -> EnginePlan:
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, **settings)
    return plan_engine(config, NO_PROGRESS)


def told(plan: EnginePlan) -> str:
    """What the first line about a plan says of the sampling defaults."""
    return next(describe_plan(plan.config, plan)).partition("; sampling defaults: ")[2]


@pytest.mark.parametrize(
    ("sampling", "defaults", "text"),
    [
        ({}, {}, "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (llama.cpp's defaults)"),
        (
            {"temp": 0.6, "min_p": 0.0, "penalty_repeat": 1.1},
            {"temperature": 0.6, "min_p": 0.0, "repetition_penalty": 1.1},
            "temperature 0.6, repetition_penalty 1.1 (general.sampling of the file), "
            "top_k 40, top_p 0.95 (llama.cpp's defaults)",
        ),
    ],
)
def test_defaults(
    sampling: dict[str, float], defaults: dict[str, float], text: str, tmp_path: Path
) -> None:
    path = gguf_file(tmp_path / "m.gguf", **sampling)
    plan = planned(path)
    assert plan.facts.default_sampling == SamplingParams(**{**LLAMA_CPP, **defaults})
    assert told(plan) == text
    without = planned(path, generation_config="vllm")
    assert without.facts.default_sampling == SamplingParams()
    assert told(without) == "as vLLM, since generation_config is vllm"


@pytest.mark.parametrize("sampling", [{"temperature": 0.3}, {}])
def test_a_short_name_has_defaults_of_its_own(
    sampling: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are whole: llama.cpp's are not added to them."""
    path = gguf_file(tmp_path / "m.gguf", top_p=0.5)
    entry = CatalogEntry(str(path), sampling=sampling)
    monkeypatch.setattr("jaxinfer.weights.locate.find_model", lambda _: entry)
    plan = planned("short")
    own = sampling or LLAMA_CPP
    assert plan.facts.default_sampling == SamplingParams(**{**own, "top_p": 0.5})
    assert ("configs/models/short.toml" in told(plan)) == bool(sampling)


def test_folders_have_no_defaults_of_another_program(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    plan = planned(folder, load_format="dummy")
    assert plan.facts.default_sampling == SamplingParams()
    assert told(plan) == "as vLLM, since the model has no defaults of its own"
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 5, "max_new_tokens": 9}))
    assert (
        told(planned(folder, load_format="dummy"))
        == "top_k 5, max_tokens 9 (generation_config.json)"
    )


def test_what_is_saved_is_the_models_own(tmp_path: Path) -> None:
    """A saved folder says no more than the file did."""
    loaded = jaxinfer.load(
        str(gguf_file(tmp_path / "m.gguf", temp=0.5)), cache_dir=str(tmp_path / "c")
    )
    sampling = {name for name in loaded.generation_config if not name.endswith("_id")}
    assert sampling == {"temperature"}
