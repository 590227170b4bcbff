"""``jaxinfer run-batch`` on a tiny model: files in and out, and nothing half-written."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli import run_batch as module
from jaxinfer.cli.main import cli
from jaxinfer.core.errors import EngineError

REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": [5, 6], "max_tokens": 3},
}
NAMES = {"requests.jsonl", "answers.jsonl"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a batch of a good and a bad line."""
    lines = [json.dumps(REQUEST), "no request"]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return run_files(folder / "requests.jsonl", folder / "answers.jsonl", *arguments)


def run_files(requests: Path, answers: Path, *arguments: str) -> Result:
    files = ["-i", str(requests), "-o", str(answers)]
    return CliRunner().invoke(cli, ["run-batch", *files, *arguments])


def test_answers_of_a_batch(folder: Path, tiny_arguments: list[str]) -> None:
    result = run(folder, *tiny_arguments, "--disable-frontend-multiprocessing")
    assert result.exit_code == 1, result.output  # one of the lines has failed
    assert "2 requests, 1 of them failed" in result.stderr
    first, second = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    assert first["custom_id"] == "a" and first["error"] is None
    assert first["response"]["body"]["usage"]["completion_tokens"] == 3
    assert second["response"] is None and second["error"]["line"] == 2
    assert {path.name for path in folder.iterdir()} == NAMES


@pytest.mark.parametrize("error", [EngineError("lost"), KeyboardInterrupt()])
def test_output_appears_whole_or_not_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        assert len([*folder.iterdir()]) == 3  # a partial file
        raise error

    (folder / "answers.jsonl").write_text("before")
    monkeypatch.setattr(module, "_run", fail)
    assert run(folder).exit_code == (1 if isinstance(error, EngineError) else 130)
    assert (folder / "answers.jsonl").read_text() == "before"
    assert {path.name for path in folder.iterdir()} == NAMES


def test_input_that_is_missing_is_named(folder: Path) -> None:
    result = run_files(folder / "none.jsonl", folder / "answers.jsonl")
    assert result.exit_code == 1 and "choose another --input-file" in result.stderr
    assert not (folder / "answers.jsonl").exists()


def test_output_is_checked_before_the_model_is_loaded(folder: Path) -> None:
    (folder / "answers.jsonl").mkdir()
    assert run(folder).exit_code == 2
    result = run_files(folder / "requests.jsonl", folder / "none" / "answers.jsonl")
    assert result.exit_code == 1 and "choose another --output-file" in result.stderr
