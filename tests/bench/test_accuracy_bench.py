"""The whole accuracy bench on a tiny model; wrong tokens and wrong logprobs change its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.accuracy import __main__ as accuracy
from bench.accuracy.scorer import Answer, Scorer, Scores
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tokenizers import tiny_tokenizer_spec

TINY = accuracy.Workload(prompts=3, shortest=3, longest=40, tokens=8, chunk=16)
# few executables, since compiling takes most of the time
SIZES = ("max_num_seqs=1", "prefill_bucket_start=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_llama_config(num_hidden_layers=1)
    tensors = random_hf_tensors(build_model(config, "float32"))
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "tiny", config, tensors)


def run(folder: Path, dtype: str, *more: str) -> dict[str, Any]:
    output = folder.parent / f"{dtype}.json"
    settings = [*SIZES, f"dtype={dtype}", f"cache_dir={folder.parent / 'cache'}"]
    flags = [f"--model={folder}", f"--output={output}", *(f"--engine={each}" for each in settings)]
    accuracy.main([*flags, *more], TINY)
    return json.loads(output.read_text())


def figures(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["metric"], row["case"]): row for row in report["rows"]}


def test_float32_agrees_with_itself_in_every_variant(folder: Path) -> None:
    report = run(folder, "float32", "--variants=no-overlap,bundle")
    assert report["model"] == "tiny" and {"device", "versions", "git"} <= report.keys()
    rows = figures(report)
    for case in ("plain", "logprobs", "no-overlap", "bundle"):
        assert rows["regret_max", case]["value"] < 1e-4
        assert rows["regret_max", case]["floor"] == 0
        assert rows["regret_zero_share", case]["value"] == 1
        if case != "plain":
            assert rows["equal_sequences", case]["value"] == 3
    assert 0 < rows["logprob_difference_max", "logprobs"]["value"] < 1e-4
    compiled = report["groups"]["accuracy"]["compiled"]
    assert compiled["default"] > 0 == compiled["bundle"] == compiled["no-overlap"]


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return resolve_source(str(folder), cache_dir=folder.parent, progress=NoProgress())


def scorer_of(source: ModelSource, folder: Path, dtype: str) -> Scorer:
    params = load_params(
        build_model(source.hf_config, dtype),
        source,
        placement=default_placement(),
        cache_dir=folder.parent,
        seed=0,
        progress=NoProgress(),
    )
    return Scorer(source, dtype, params, 16)


@pytest.fixture(scope="module")
def scorer(source: ModelSource, folder: Path) -> Scorer:
    return scorer_of(source, folder, "float32")


def test_a_wrong_token_shows(scorer: Scorer) -> None:
    prompt = (5, 6, 7)
    candidates = [Answer(prompt, (token, 9), (0.0, 0.0)) for token in range(96)]
    scores = [scorer(answer) for answer in candidates]
    order = np.argsort([-score.chosen[0] for score in scores])
    best, worst = candidates[order[0]], candidates[order[-1]]
    assert sum(np.exp(score.chosen[0]) for score in scores) == pytest.approx(1, abs=1e-5)
    assert scorer(best).best[0] == scorer(best).chosen[0] == pytest.approx(scores[0].best[0])
    gap = scorer(best).chosen[0] - scorer(worst).chosen[0]
    rows = figures({"rows": accuracy.regret_rows("x", [worst], scorer)})
    assert rows["regret_max", "x"]["value"] >= gap > 0.1
    assert rows["regret_max", "x"]["floor"] == 0
    errors = np.abs(scorer(worst).chosen)  # of logprobs that were 0
    assert rows["logprob_difference_max", "x"]["value"] == pytest.approx(errors.max(), abs=1e-6)
    row = accuracy.equality_row("x", [best, worst], [best, best], scorer)
    assert (row["value"], row["of"]) == (1, 2)
    assert row["margin"] == pytest.approx(gap, abs=1e-5)


def test_scores_are_of_the_answer_alone(scorer: Scorer) -> None:
    whole = scorer(Answer((5,), (6, 7, 8), None))
    later = scorer(Answer((5, 6), (7, 8), None))
    assert [len(part) for part in Scores(*whole)] == [3] * 4
    np.testing.assert_allclose(later.chosen, whole.chosen[1:], atol=1e-6)


def test_the_floor_is_the_effect_of_rounding(source: ModelSource, folder: Path) -> None:
    scores = scorer_of(source, folder, "bfloat16")(Answer((5, 6), (7, 8, 9), None))
    assert 1e-5 < np.abs(scores.floor_chosen - scores.chosen).max() < 0.1


def test_prompts_are_random_ids_or_pieces_of_a_text(source: ModelSource, tmp_path: Path) -> None:
    ids = accuracy.make_prompts(source, None, TINY, seed=1)
    assert [len(prompt) for prompt in ids] == TINY.prompt_lengths() == [3, 10, 40]
    assert all(0 <= token < 96 for prompt in ids for token in prompt)
    assert ids == accuracy.make_prompts(source, None, TINY, seed=1)
    text = tmp_path / "text"
    text.write_text("".join(f"{i} " for i in range(100)))
    spec = tiny_tokenizer_spec()
    speaking = replace(source, tokenizer_spec=lambda: spec)
    pieces = accuracy.make_prompts(speaking, text, TINY, seed=1)
    assert [len(prompt) for prompt in pieces] == TINY.prompt_lengths()
    assert load_tokenizer(spec).decode(pieces[-1]) in text.read_text()
    text.write_text("short")
    with pytest.raises(SystemExit, match="a prompt needs 40"):
        accuracy.make_prompts(speaking, text, TINY, seed=1)


def test_every_sequence_fits_in_the_pages() -> None:
    work = accuracy.Workload()
    assert len(work.lengths()) == 16 and sum(work.answer_lengths()) == 16 * 64
    settings = work.engine_settings(16)
    assert settings["num_pages"] > sum(-(-length // 16) for length in work.lengths())
    assert settings["max_model_len"] >= 600 + 32
