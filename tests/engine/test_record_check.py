"""Recordings whose steps run again: equal tokens, and a fault is named by step and array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.main import cli
from jaxinfer.core.step import StepPlan
from jaxinfer.exec.run.executor import Executor

PROMPT = list(range(3, 30))


def record(path: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Requests of several kinds, with a change of weights and a sleep between them."""
    llm = LLM(str(folder), **settings, record=str(path), record_digests=True, seed=5)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    kinds = [
        free,
        SamplingParams(max_tokens=9, temperature=0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=9, structured_outputs={"regex": "[ab]{4,9}"}),
        SamplingParams(max_tokens=9, repetition_penalty=1.3, seed=7, n=2),
    ]
    prompts = [{"prompt_token_ids": PROMPT[: 9 + 3 * i]} for i in range(len(kinds))]
    llm.generate(prompts, kinds, use_tqdm=False)
    llm.update_weights(str(folder))
    llm.generate(prompts, kinds, use_tqdm=False)
    llm.sleep()
    llm.wake_up()
    llm.generate(prompts[:2], free, use_tqdm=False)
    llm._engine.close()


def checked(path: Path, settings: dict[str, Any], *arguments: str) -> Any:
    given = ["--check", "--cache-dir", settings["cache_dir"], *arguments]
    return CliRunner().invoke(cli, ["replay", str(path), *given])


def test_a_recording_is_checked_row_by_row(
    tmp_path: Path, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rec"
    record(path, folder, settings)
    result = checked(path, settings)
    assert result.exit_code == 0, result.output
    assert "every plan is equal" in result.stdout and ", all equal" in result.stdout
    assert "note:" not in result.stderr and "were not" not in result.stdout

    # a page of the second layer is damaged before a step
    launch, damaged = Executor.launch, []

    def damaging(self: Executor, plan: StepPlan) -> Any:
        if plan.step_id == 6:
            page = plan.decodes[0].pages[0].ids[0]
            state = [*self._arrays.state]
            state[2] = state[2].at[page].set(jnp.float32(30.0))
            self._arrays.state = tuple(state)
            damaged.append(page)
        return launch(self, plan)

    monkeypatch.setattr(Executor, "launch", damaging)
    result = checked(path, settings)
    assert result.exit_code == 3 and len(damaged) == 1
    assert "step 6: request" in result.stdout, result.stdout
    assert f"layers.1.k deviates in page {damaged[0]}, tokens 0 to 7" in result.stdout
