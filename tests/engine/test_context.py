"""The longest context of a model and its default depend on the kind of rope scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.compile.program import Program
from kit.checkpoints import tiny_llama_config, write_hf_folder

POSITIONS = 256  # of ``tiny_llama_config``
ORIGINAL = "original_max_position_embeddings"
FACTORS = [1.0] * 8  # one for each pair of components of heads of 16
KINDS: dict[str, tuple[dict[str, Any], int, int]] = {  # section, default, longest
    "yarn": ({"factor": 4, ORIGINAL: POSITIONS}, 1024, 1024),
    "yarn_derived": ({"factor": 2, "finetuned": True, "truncate": False}, 512, 512),
    "linear": ({"factor": 2}, 512, 512),
    "dynamic": ({"factor": 3}, 256, 768),
    "llama3": (
        {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, ORIGINAL: 64},
        256,
        512,
    ),
    "longrope": (
        {"factor": 4, "short_factor": FACTORS, "long_factor": FACTORS, ORIGINAL: 128},
        128,
        512,
    ),
}


def plan(folder: Path, kind: str, max_model_len: int | None) -> Program:
    section, _, _ = KINDS[kind]
    rope = {"rope_type": kind.partition("_")[0], **section}
    write_hf_folder(folder, tiny_llama_config(rope_scaling=rope))
    return plan_engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
        )
    ).program


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_may_have_the_scaled_length(tmp_path: Path, kind: str) -> None:
    _, default, longest = KINDS[kind]
    assert plan(tmp_path, kind, None).limits.max_model_len == default
    assert plan(tmp_path, kind, longest).limits.max_model_len == longest
    with pytest.raises(ConfigError, match=f"is beyond the model's {longest} positions"):
        plan(tmp_path, kind, longest + 1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_depend_on_max_model_len(tmp_path: Path, kind: str) -> None:
    """Only if it is longer than the original length, as in transformers."""
    _, default, longest = KINDS[kind]
    short, same, long = (
        plan(tmp_path, kind, length).model.config for length in (default // 2, default, longest)
    )
    assert short == same == plan(tmp_path, kind, None).model.config
    assert long != same
