"""Recordings of engines whose pages go to tiers and come back: they replay, and are checked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from jaxinfer import LLM, AsyncLLM, SamplingParams
from jaxinfer.cli.main import cli
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.connector import Unit
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import StepPlan
from jaxinfer.core.tiers import CostModel, TierUnit
from jaxinfer.engine.api.vllm_args import RENAMED
from jaxinfer.engine.start import tiers
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.run.executor import Executor
from jaxinfer.exec.tiers.mover import ArrayMover
from kit.tiny_models import tiny_config

RESTORES = CostModel(token_seconds=1.0)  # so that a prefix in a tier is always restored
SIZES = {"num_pages": 14, "max_num_seqs": 3, "kv_offloading_size": 0.01}
FREE = SamplingParams(max_tokens=14, ignore_eos=True, seed=3)


@pytest.fixture(autouse=True)
def _restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "fitted_costs", lambda executor, mover: RESTORES)


def record(
    path: Path, folder: Path, settings: dict[str, Any], length: int = 24, **more: Any
) -> int:
    """Conversations in a pool that holds one of them; returns how many units were restored."""
    given = settings | SIZES | {"record": str(path), "record_digests": True} | more
    llm = LLM(str(folder), **given, seed=5)
    prompts = [list(range(first, first + length)) for first in (3, 40, 77, 114)]
    outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], FREE, use_tqdm=False)
    turns = [
        {"prompt_token_ids": [*own, *output.outputs[0].token_ids[:8], 9, 7]}
        for own, output in zip(prompts, outputs, strict=True)
    ]
    llm.generate(turns, FREE, use_tqdm=False)
    llm.generate(turns[:2], FREE, use_tqdm=False)
    num_restored = llm._engine.stats().tiers.num_restored
    llm._engine.close()
    return num_restored


def replayed(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["replay", str(path), *arguments])


def checked(path: Path, settings: dict[str, Any]) -> Any:
    return replayed(path, "--check", "--cache-dir", settings["cache_dir"])


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_restores_are_replayed(
    preemption: str, tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    path = tmp_path / "rec"
    assert record(path, folder, settings, preemption=preemption) > 10
    assert "every plan is equal" in replayed(path).stdout
    result = checked(path, settings)
    assert result.exit_code == 0, result.output
    assert ", all equal" in result.stdout and "were not" not in result.stdout


def test_saves_of_an_idle_engine_are_replayed(
    tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    """They are calls without a step, between those of prompts."""
    path = tmp_path / "rec"
    given = settings | SIZES | {"record": str(path), "record_digests": True}

    async def answered() -> None:
        llm = await AsyncLLM.create(str(folder), **given)
        for first in (3, 40, 77, 114, 3):
            prompt = {"prompt_token_ids": list(range(first, first + 24))}
            async for _ in llm.generate(prompt, FREE):
                pass
            async with asyncio.timeout(20):
                while llm.engine.saves_ahead:
                    await asyncio.sleep(0.001)
        stats = llm.stats()
        assert stats.tiers.num_saved >= stats.num_cached_pages > 0 < stats.tiers.num_restored
        await llm.shutdown()

    asyncio.run(answered())
    assert "every plan is equal" in replayed(path).stdout
    result = checked(path, settings)
    assert result.exit_code == 0, result.output
    assert ", all equal" in result.stdout and "were not" not in result.stdout


def test_states_of_the_delta_rule_are_replayed(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Saved states are units, too."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3_5"), default=dict))
    more = {"load_format": "dummy", "skip_tokenizer_init": True, "num_snapshots": 4}
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "num_pages": 42}
    path = tmp_path / "rec"
    assert record(path, folder, settings, length=140, **more, **sizes) > 10
    result = checked(path, settings)
    assert result.exit_code == 0, result.output
    assert ", all equal" in result.stdout and "were not" not in result.stdout


def test_a_page_that_changed_in_a_tier_is_found_at_its_step(
    tmp_path: Path, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded engine computed with it; the replay, which saved the page itself, does not."""
    load, launch = ArrayMover.load, Executor.launch
    damaged, steps = list[int](), list[int]()

    def damaging(self: ArrayMover, units: list[Unit], places: list[TierUnit]) -> Any:
        if not damaged and any(unit.key != bytes(16) for unit in units):
            damaged.extend(place.place for place in places)
            content = units[0].content.copy()
            keys = self.forms[units[0].group].views(content)[2]  # of the second layer
            keys[3] += np.float32(5.0)
            units = [units[0]._replace(content=content), *units[1:]]
        return load(self, units, places)

    def noting(self: Executor, plan: StepPlan) -> Any:
        ids = {int(page) for row in plan.rows for page in row.pages[0].ids}
        if damaged and not steps and damaged[0] in ids:
            steps.append(plan.step_id)
        return launch(self, plan)

    with monkeypatch.context() as patched:
        patched.setattr(ArrayMover, "load", damaging)
        patched.setattr(Executor, "launch", noting)
        assert record(tmp_path / "rec", folder, settings) > 10
    result = checked(tmp_path / "rec", settings)
    assert result.exit_code == 3, result.output
    assert f"step {steps[0]}: request" in result.stdout
    assert "so the recorded run was wrong" in result.stdout


def test_a_page_that_is_damaged_in_the_replay_is_named(
    tmp_path: Path, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record(tmp_path / "rec", folder, settings) > 10
    load, damaged = ArrayMover.load, list[int]()

    def damaging(self: ArrayMover, units: list[Unit], places: list[TierUnit]) -> Any:
        found = load(self, units, places)
        if not damaged and units[0].key != bytes(16):
            damaged.append(places[0].place)
            state = self._arrays.state
            self._arrays.replace((2,), (state[2].at[places[0].place].add(9.0),))
        return found

    monkeypatch.setattr(ArrayMover, "load", damaging)
    result = checked(tmp_path / "rec", settings)
    assert result.exit_code == 3, result.output
    assert f"layers.1.k deviates in page {damaged[0]}, tokens 0 to 7" in result.stdout


def test_units_from_before_the_recording_are_unknown(
    tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    """Another engine left them on a disk."""
    disk = {"kv_offloading_disk": str(tmp_path / "disk"), "kv_offloading_disk_size": 0.01}
    record(tmp_path / "first", folder, settings, **disk)
    assert record(tmp_path / "rec", folder, settings, **disk) > 10
    assert "every plan is equal" in replayed(tmp_path / "rec").stdout
    result = checked(tmp_path / "rec", settings)
    assert result.exit_code == 0, result.output
    assert ", all equal" in result.stdout and "rows were not, as they depend" in result.stdout


def test_a_redacted_recording_has_keys_of_its_own(
    tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    redacted = {"record_redact": True, "record_digests": False}
    assert record(tmp_path / "rec", folder, settings, **redacted) > 10
    result = replayed(tmp_path / "rec")
    assert result.exit_code == 0 and "every plan is equal" in result.stdout, result.output


def test_a_redacted_recording_cannot_know_the_keys_on_a_disk(
    tmp_path: Path, folder: Path, settings: dict[str, Any]
) -> None:
    disk = {"kv_offloading_disk": str(tmp_path), "kv_offloading_disk_size": 0.01}
    given = {RENAMED.get(k, k): v for k, v in (settings | SIZES | disk).items()}
    with pytest.raises(ConfigError, match="record_redact replaces the keys"):
        plan_engine(EngineConfig(model=str(folder), record_redact=True, **given))
