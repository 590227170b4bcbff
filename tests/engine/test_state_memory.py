"""An engine of a model with much layer state for each sequence plans as many sequences as fit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.progress import Advance
from jaxinfer.engine.start import build
from jaxinfer.engine.start import model as start_model
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.nn.state import Entry, LayerState
from kit.checkpoints import tiny_llama_config, write_hf_folder
from kit.mixed_family import RecurrentSpec, mixed_model
from kit.tiny_models import tiny_config

STATE_BYTES = 40_000_000  # of one sequence; state and pages have 1 GiB


class Notes:
    """A ``Progress`` that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def task(self, description: str, total: float | None) -> AbstractContextManager[Advance]:
        del description, total
        return nullcontext(lambda _: None)

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model that the registry does not know."""
    entry = Entry("sum", (STATE_BYTES // 4,), np.dtype(np.float32))
    state = LayerState(per_slot=(entry,), align=64)
    monkeypatch.setattr(RecurrentSpec, "state", lambda *_: state)
    monkeypatch.setattr(start_model, "build_model", lambda *_: mixed_model("recurrent", "full")[0])
    write_hf_folder(tmp_path, tiny_llama_config())
    return tmp_path


def planned(folder: Path, **settings: Any) -> tuple[EnginePlan, list[str]]:
    notes = Notes()
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        **({"kv_cache_memory_bytes": 1 << 30} | settings),
    )
    return build.plan_engine(config, notes), notes.said


def test_fewer_sequences_by_default(folder: Path) -> None:
    made, said = planned(folder)
    assert said == [
        "32 sequences need 3.88 GB of layer state (40.0 MB for each of 32 slots, the padding slot "
        "and 64 snapshots); serving 4, set max_num_seqs to choose another number"
    ]
    assert made.program.limits.max_num_seqs == made.config.max_num_seqs == 4
    assert made.program.limits.num_snapshots == 8 and made.program.limits.enable_prefix_caching
    assert max(bucket.num_decodes for bucket in made.program.limits.buckets) == 4
    assert made.memory.state_bytes == 13 * STATE_BYTES
    assert made.bundle_settings["max_num_seqs"] == 4


def test_without_prefix_caching_there_are_no_snapshots(folder: Path) -> None:
    made, said = planned(folder, enable_prefix_caching=False)
    assert "and 0 snapshots); serving 12," in said[0]
    assert made.program.limits.max_num_seqs == 12 and made.program.limits.num_snapshots == 0


def test_the_scheduler_keeps_to_the_grid_of_the_layers(folder: Path) -> None:
    made, _ = planned(folder, max_num_batched_tokens=128, max_num_mixed_tokens=128)
    assert made.program.limits.align == made.program.model.state.align == 64


def test_more_memory(folder: Path) -> None:
    made, said = planned(folder, kv_cache_memory_bytes=8 << 30)
    assert made.program.limits.max_num_seqs == 32 and not said


def test_a_chosen_number_that_fits(folder: Path) -> None:
    """State may take more than half, as the user has said what to serve."""
    made, said = planned(folder, max_num_seqs=8)
    limits = made.program.limits
    assert (limits.max_num_seqs, limits.num_snapshots) == (8, 16) and not said
    assert limits.saves_answers


def test_a_chosen_number_of_snapshots(folder: Path) -> None:
    """Fewer leave memory for more sequences, whose answers are not saved then."""
    made, said = planned(folder, max_num_seqs=16, num_snapshots=8)
    limits = made.program.limits
    assert (limits.max_num_seqs, limits.num_snapshots) == (16, 8) and not said
    assert not limits.saves_answers and made.bundle_settings["num_snapshots"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 16}, r"16 sequences need 1.96 GB .* and 8 fit; set max_num_seqs to 8"),
        ({"kv_cache_memory_bytes": 1 << 26}, "32 sequences need 3.88 GB .* not one fits; raise"),
        ({"num_snapshots": 10**6}, "1000000 snapshots.* and not one fits; lower num_snapshots, or"),
        (
            {"max_num_batched_tokens": 63},
            r"in multiples of 64 tokens, and no step holds 31 decodes and 1 prefills of 64 tokens "
            r"with prompt logprobs; raise max_num_batched_tokens \(63\) to 128 or more",
        ),
        (
            {"max_num_batched_tokens": 63, "max_num_seqs": 4},
            r"no step holds .*; raise max_num_batched_tokens \(63\) to 64 or more",
        ),
        (
            {"max_num_batched_tokens": 63, "max_num_mixed_tokens": 32, "max_num_seqs": 1},
            r"no step holds .*; raise max_num_batched_tokens \(63\) to 64 or more",
        ),
        (
            {"max_num_batched_tokens": 63, "max_num_mixed_tokens": 32, "max_num_seqs": 4},
            r"raise max_num_batched_tokens \(63\) and max_num_mixed_tokens \(32\) to 64 or more",
        ),
        (
            {"max_num_batched_tokens": 512, "max_num_mixed_tokens": 32},
            r"no step holds .*; raise max_num_mixed_tokens \(32\) to 128 or more",
        ),
    ],
)
def test_refused(folder: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(folder, **settings)


def test_a_model_without_attention_has_pages_of_no_bytes(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, tiny_config("mamba2"))
    plan, _ = planned(tmp_path, max_num_seqs=2)
    limits = plan.program.limits
    assert limits.num_pages[0] > limits.pages_needed(limits.max_model_len)[0]
    assert plan.memory.kv_bytes == 0 < plan.memory.state_bytes


def test_pages_that_no_sequence_can_fill_are_not_made(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, tiny_llama_config())
    settings = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16}
    plan, said = planned(tmp_path, num_pages=10, **settings)
    assert plan.program.limits.num_pages == (9,)
    assert said == [
        "num_pages is 10, and 2 sequences of 64 tokens fill 9 (the padding page included), which "
        "are made; raise max_num_seqs or max_model_len to use more"
    ]
    assert planned(tmp_path, num_pages=9, **settings)[1] == []


def test_layers_without_state_are_refused(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, {**tiny_config("nemotron_h"), "hybrid_override_pattern": "--"})
    with pytest.raises(ConfigError, match="no layer of this NemotronHForCausalLM reads other"):
        planned(tmp_path)


def test_snapshots_of_a_model_without_state_are_refused(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, tiny_llama_config())
    message = "num_snapshots is 4, and LlamaForCausalLM has no state"
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, num_snapshots=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": False}, "and enable_prefix_caching is off; leave it out"),
        ({"task": "embed", "pooling": "mean"}, "and the task reuses none; leave it out"),
    ],
)
def test_snapshots_are_for_prefixes_that_are_reused(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"num_snapshots is 4, which is for .*, {message}"):
        planned(folder, num_snapshots=4, max_num_seqs=2, **settings)
    made, _ = planned(folder, max_num_seqs=2, **settings)
    assert made.program.limits.num_snapshots == 0
