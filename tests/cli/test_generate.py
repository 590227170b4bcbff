"""``jaxinfer generate`` on a tiny model: prompts in, text or JSON out, errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli.generate import generate as GENERATE
from jaxinfer.cli.main import cli
from jaxinfer.cli.options import SAMPLING
from jaxinfer.core.config import DEFAULT_PAGE_SIZE
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.sampling_checks import NEUTRAL
from kit.tokenizers import TINY_BOS_ID

JAXINFER = str(Path(sys.executable).with_name("jaxinfer"))

# ``structured_outputs`` has a flag for each form, ``guided_decoding`` is its older name, and
# ``thinking`` holds token ids, which the server takes from the model's chat template
WITHOUT_OWN_FLAG = {"structured_outputs", "guided_decoding", "thinking", "taps", "steer"}
FORM_FLAGS = {"--json-schema", "--regex", "--choice", "--grammar"}

type Generate = Callable[..., Result]


def records(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_of_several_prompts(generate: Generate) -> None:
    result = generate("--json", "--no-chat", "--max-tokens=5", "--temperature=0", "ab", "c", "ab")
    assert result.exit_code == 0
    first, second, third = records(result)
    assert first["prompt_token_ids"] == list(b"ab")
    assert second["prompt_token_ids"] == list(b"c")
    assert first["token_ids"] == third["token_ids"] != second["token_ids"]
    assert first["finish_reason"] == "length"
    assert first["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "num_cached_tokens": 0,
    }


def test_text_equals_stream_equals_json(generate: Generate) -> None:
    arguments = ("--max-tokens=12", "--seed=3", "hello")
    text = generate("--no-stream", *arguments).stdout
    assert generate("--stream", *arguments).stdout == text
    assert records(generate("--json", *arguments))[0]["text"] + "\n" == text


def test_chat_template_is_used_when_there_is_one(generate: Generate) -> None:
    [chat] = records(generate("--json", "--max-tokens=1", "hi"))
    [system] = records(generate("--json", "--max-tokens=1", "--system", "be kind", "hi"))
    [plain] = records(generate("--json", "--max-tokens=1", "--no-chat", "hi"))
    assert chat["prompt_token_ids"][0] == TINY_BOS_ID
    assert bytes(plain["prompt_token_ids"]) == b"hi"
    assert set(b"be kind") < set(system["prompt_token_ids"])


def test_stdin_is_one_prompt(generate: Generate) -> None:
    result = generate("--json", "--no-chat", "--max-tokens=1", stdin="two\nlines\n")
    [record] = records(result)
    assert bytes(record["prompt_token_ids"]) == b"two\nlines"


def test_logprobs(generate: Generate) -> None:
    [record] = records(generate("--json", "--max-tokens=2", "--temperature=0", "--logprobs=3", "x"))
    first, second = record["logprobs"]
    assert [entry["rank"] for entry in first] == [1, 2, 3]
    assert [first[0]["token_id"], second[0]["token_id"]] == record["token_ids"]


def test_stop_ends_before_the_text(generate: Generate) -> None:
    arguments = ("--json", "--max-tokens=20", "--temperature=0", "x")
    [whole] = records(generate(*arguments))
    stop = whole["text"][3:5]
    [stopped] = records(generate(f"--stop={stop}", *arguments))
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"].partition(stop)[0]


def test_stats(generate: Generate) -> None:
    result = generate("--stats", "--max-tokens=4", "--top-p=0.9", "x")
    lines = {line[:14].strip(): line[15:] for line in result.stderr.splitlines()}
    assert "max_tokens 4 (flag), temperature 0.7 (model)" in lines["sampling"]
    assert "top_p 0.9 (flag), top_k 50 (model), min_p 0.0 (default)" in lines["sampling"]
    assert lines["sampling"].endswith("seed 0 (engine)")
    assert lines["late compiles"] == "0"
    assert lines["first token"].endswith(" s after process start")
    assert lines["generated"].startswith("4 tokens in ")
    assert {"compile", "load", "prompt", "peak RSS"} < set(lines)


def test_memory_and_plan_are_for_stats(generate: Generate) -> None:
    arguments = ("--max-tokens=1", "x")
    plain, stats = generate(*arguments).stderr, generate("--stats", *arguments).stderr
    for words in ("memory: weights", "workspace", "auto on cpu"):
        assert words in stats and words not in plain


def test_stats_report_the_seed(generate: Generate) -> None:
    lines = generate("--stats", "--max-tokens=1", "--seed=7", "x").stderr
    assert "seed 7 (flag)" in lines and "seed None" not in lines


@pytest.mark.parametrize(
    "flag",
    [
        *("--no-overlap", "--no-async-scheduling", "--no-prefill-first"),
        *("--no-enable-prefix-caching", "--max-num-mixed-tokens=1k"),
    ],
)
def test_engine_flags_change_no_token(flag: str, generate: Generate) -> None:
    arguments = ("--json", "--max-tokens=8", "--seed=1", "some", "words")
    with_flag = [record["token_ids"] for record in records(generate(flag, *arguments))]
    assert with_flag == [record["token_ids"] for record in records(generate(*arguments))]


def test_every_sampling_field(generate: Generate) -> None:
    """The same as ``SamplingParams`` gives: here fields that change or forbid tokens."""
    arguments = ("--json", "--no-chat", "--max-tokens=6", "--temperature=0")
    [plain] = records(generate(*arguments, "ab"))
    first = plain["token_ids"][0]

    def other(*flags: str) -> dict[str, Any]:
        result = generate(*arguments, *flags, "ab")
        assert result.exit_code == 0, result.stderr
        return records(result)[0]

    assert other(f'--logit-bias={{"{first}": -100}}')["token_ids"][0] != first
    assert other('--logit-bias={"65": 100}')["token_ids"] == [65] * 6
    biased = ('--logit-bias={"65": 50, "66": 49}', "--frequency-penalty=2")
    assert set(other(*biased)["token_ids"]) == {65, 66}
    assert other(f"--stop-token-ids={first},3")["token_ids"] == [first]
    assert other("--no-detokenize")["text"] == ""
    scored = other("--prompt-logprobs=2")["prompt_logprobs"]
    assert scored[0] is None and ord("b") in [entry["token_id"] for entry in scored[1]]


def test_sampling_flags_are_the_fields_of_sampling_params() -> None:
    supported = {name for name in SamplingParams.__struct_fields__ if name not in NEUTRAL}
    flagged = {one.name for one in SAMPLING.settings}
    assert flagged == supported - WITHOUT_OWN_FLAG, (
        f"{flagged ^ (supported - WITHOUT_OWN_FLAG)} must be in SAMPLING of cli/options.py, or in "
        "WITHOUT_OWN_FLAG here"
    )
    flags = {flag for option in GENERATE.params for flag in option.opts}
    assert flags >= FORM_FLAGS


def test_several_answers_to_a_prompt(generate: Generate) -> None:
    arguments = ("--n=2", "--max-tokens=4", "--seed=1")
    found = records(generate("--json", *arguments, "x", "y"))
    assert [one["index"] for one in found] == [0, 1, 0, 1]
    assert found[0]["token_ids"] != found[1]["token_ids"]
    text = generate(*arguments, "x").stdout
    assert text == f"{found[0]['text']}\n{found[1]['text']}\n"


def test_settings_from_a_file_that_a_server_shares(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 80\nenable-prefix-caching: false\ntemperature: 0\nmax_tokens: 3\n")
    monkeypatch.setenv("JAXINFER_TOP_K", "7")
    lines = generate("--stats", "--config", str(file), "--max-tokens=2", "x").stderr
    assert "max_tokens 2 (flag)" in lines
    assert f"temperature 0.0 (file {file})" in lines
    assert "top_k 7 (environment JAXINFER_TOP_K)" in lines
    file.write_text("prot: 80\n")
    wrong = generate("--config", str(file), "x")
    assert wrong.exit_code == 1 and f"'prot' in {file} is no setting" in wrong.stderr


def test_a_tokenizer_from_elsewhere(model_folder: Path, tmp_path: Path, generate: Generate) -> None:
    """Weights without a tokenizer take another model's."""
    bare = shutil.copytree(model_folder, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    arguments = ("--model", str(bare), "--json", "--no-chat", "--max-tokens=2")
    missing = generate(*arguments, "ab")
    assert missing.exit_code == 1 and "tokenizer= (--tokenizer)" in missing.stderr
    [found] = records(generate(*arguments, f"--tokenizer={model_folder}", "ab"))
    assert bytes(found["prompt_token_ids"]) == b"ab"


@pytest.mark.parametrize("bad", ["", "x" * 500], ids=["empty", "too_long"])
def test_an_invalid_prompt_does_not_affect_the_others(bad: str, generate: Generate) -> None:
    result = generate("--json", "--max-tokens=2", "good", bad, "fine")
    assert result.exit_code == 1
    good, error, fine = records(result)
    assert len(good["token_ids"]) == len(fine["token_ids"]) == 2
    told = "This model's maximum context length is 128 tokens" if bad else "the prompt is empty"
    assert error["error"].startswith(f"prompt 1: {told}")
    assert f"jaxinfer: error: {error['error']}\n" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("--no-chat",)], ids=["chat", "no_chat"])
def test_empty_stdin(arguments: tuple[str, ...], generate: Generate) -> None:
    result = generate(*arguments, stdin="")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "jaxinfer: error: the prompt is empty; give some text\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--temperature=nan"], "temperature"),
        (["--max-tokens=0"], "max_tokens"),
        (["--max-tokens=-1"], "max_tokens must be a number in [1, "),
        (["--temperature=warm"], "--temperature must be a number, got 'warm'"),
        (["--kv-cache-memory-bytes=4X"], "--kv-cache-memory-bytes must be a whole number, such as"),
        (["--frequency-penalty=3"], "frequency_penalty must be a number in [-2, 2], got 3.0"),
        (["--logit-bias=5"], "--logit-bias must be a JSON object"),
        (["--stop-token-ids=1,x"], "--stop-token-ids must be whole numbers, such as 1,2, got"),
        (["--config=/no/such/file"], "the configuration file /no/such/file cannot be read"),
        (["--top-p=1.5"], "top_p"),
        (["--dtype=int3"], "dtype 'int3' is unknown; use one of auto, float32"),
        (["--load-format=pickle"], "load_format 'pickle' is unknown"),
        (["--max-num-seqs=0"], "max_num_seqs must be at least 1"),
        (["--max-model-len=100000"], "max_model_len 100000"),
        (["--model=no-such-model"], "'no-such-model' is neither a known name"),
        (["--model=org/name@v1", "--revision=v2"], "names revision v1, and the setting revision"),
        (["--model=org/name:"], "no name of the hub; write ORG/NAME[@REVISION][:QUANT]"),
        (["--model=./no/such"], "nor an existing path; give a Hugging Face folder"),
        (["--model", "m" * 300], "mmm' (File name too long); correct the path"),
        (["--model=~nobody-of-that-name/m"], "in the home of an unknown user"),
        (["--cache-dir", "c" * 300], "(File name too long); make room"),
        (["--cache-dir=/dev/null/cache"], "/dev/null/cache"),
    ],
)
def test_wrong_settings_are_one_sentence(
    arguments: list[str], error: str, generate: Generate
) -> None:
    result = generate(*arguments, "x")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("jaxinfer: error: ")
    assert result.stderr.count("\n") == 1
    assert error in result.stderr


@pytest.mark.parametrize("arguments", [["--chat"], ["--system", "be kind"]], ids=" ".join)
def test_chat_with_a_model_that_has_no_template(
    arguments: list[str], model_folder: Path, tmp_path: Path, generate: Generate
) -> None:
    shutil.copytree(model_folder, tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer_config.json").unlink()
    result = generate(f"--model={tmp_path / 'plain'}", *arguments, "x")
    assert result.exit_code == 1
    assert "this model has no chat template; leave out --chat and --system" in result.stderr


@pytest.mark.parametrize(
    ("length", "arguments", "enough"),
    [(2, [], 4096), (3500, [], 4096), (3500, ["--max-tokens=500"], None), (5000, [], None)],
    ids=["short", "longest", "long_answer", "long_prompt"],
)
def test_a_single_prompt_gets_the_context_it_may_need(
    length: int, arguments: list[str], enough: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all prompts share one size; others get the engine's own, up to the whole context."""

    def built(model: str | None, **settings: Any) -> None:
        pages = settings.get("num_pages")
        tokens = pages and (pages - 1) * DEFAULT_PAGE_SIZE
        raise ConfigError(f"{tokens} tokens for {settings['max_num_seqs']} sequence")

    monkeypatch.setattr("jaxinfer.engine.api.llm.LLM", built)
    result = CliRunner().invoke(cli, ["generate", *arguments, "x" * length])
    assert result.stderr == f"jaxinfer: error: {enough} tokens for 1 sequence\n"


@pytest.mark.parametrize("platform", ["cuda", "no_such_platform"])
def test_no_device(platform: str, tiny_arguments: list[str]) -> None:
    ran = subprocess.run(
        [JAXINFER, "generate", *tiny_arguments, "x"],
        env={**os.environ, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    *signs_of_life, error = ran.stderr.splitlines()  # the former on a busy machine only
    assert error.startswith(f"jaxinfer: error: JAX finds no device for JAX_PLATFORMS={platform} (")
    assert all(line.startswith("the engine starts: after") for line in signs_of_life)


def test_stdin_that_is_not_text(generate: Generate) -> None:
    result = generate(stdin=b"caf\xe9")
    assert result.exit_code == 1
    assert result.stderr == (
        "jaxinfer: error: stdin is not UTF-8 text (byte 3); convert it first\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-chat", "--system", "be kind", "x"],
        ["--stream", "--json", "x"],
        ["--stream", "x", "y"],
        ["--logprobs=1", "x"],
        ["--prompt-logprobs=1", "x"],
        ["--stream", "--n=2", "x"],
    ],
    ids=" ".join,
)
def test_contradictions_are_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["generate", *arguments])
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_interrupt_while_streaming(tiny_arguments: list[str]) -> None:
    command = [JAXINFER, "generate", *tiny_arguments, "--stream", "--max-tokens=100", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


SLOW_COMPILER = """
import os, time
from jaxinfer.cli.main import main
from jaxinfer.exec.compile.program import Program

def trace(self, name):
    os.write(2, b"compiling\\n")  # whole lines from several threads
    time.sleep(60)

Program.trace = trace
main()
"""


def test_interrupt_while_compiling(tiny_arguments: list[str], tmp_path: Path) -> None:
    arguments = ["generate", *tiny_arguments, f"--cache-dir={tmp_path}", "x"]
    command = [sys.executable, "-c", SLOW_COMPILER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"compiling\n" in process.stderr  # reads until then
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert list(tmp_path.rglob("*.bin")) == []


def test_closed_pipe_is_quiet(tiny_arguments: list[str]) -> None:
    prompts = ["x", "y", "z"]
    command = [JAXINFER, "generate", *tiny_arguments, "--json", "--max-tokens=50", *prompts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode != 0
    assert b"Error" not in errors and b"Traceback" not in errors
