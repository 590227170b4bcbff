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
from jaxinfer.exec.calls.copy import SAVE
from jaxinfer.nn.state import Entry, LayerState
from kit.checkpoints import tiny_llama_config, write_hf_folder
from kit.mixed_family import RecurrentSpec, mixed_model

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
    monkeypatch.setattr(RecurrentSpec, "state", lambda *_: LayerState(per_slot=(entry,)))
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
        "32 sequences need 2.60 GB of layer state (40.0 MB for each of 32 slots, the padding slot "
        "and 32 snapshots); serving 6, set max_num_seqs to choose another number"
    ]
    assert made.program.limits.max_num_seqs == made.config.max_num_seqs == 6
    assert made.program.limits.num_snapshots == 6 and made.program.limits.enable_prefix_caching
    assert max(bucket.num_decodes for bucket in made.program.limits.buckets) == 6
    assert made.memory.state_bytes == 13 * STATE_BYTES
    assert SAVE.name in made.program.names()
    assert made.bundle_settings["max_num_seqs"] == 6


def test_without_prefix_caching_there_are_no_snapshots(folder: Path) -> None:
    made, said = planned(folder, enable_prefix_caching=False)
    assert "and 0 snapshots); serving 12," in said[0]
    assert made.program.limits.max_num_seqs == 12 and made.program.limits.num_snapshots == 0
    assert SAVE.name not in made.program.names()


def test_more_memory(folder: Path) -> None:
    made, said = planned(folder, kv_cache_memory_bytes=6 << 30)
    assert made.program.limits.max_num_seqs == 32 and not said


def test_a_chosen_number_that_fits(folder: Path) -> None:
    """State may take more than half, as the user has said what to serve."""
    made, said = planned(folder, max_num_seqs=12)
    assert made.program.limits.max_num_seqs == made.program.limits.num_snapshots == 12 and not said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 16}, r"16 sequences need 1.32 GB .* and 12 fit; set max_num_seqs to 12"),
        ({"kv_cache_memory_bytes": 1 << 26}, "32 sequences need 2.60 GB .* and not one fits"),
    ],
)
def test_refused(folder: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(folder, **settings)
