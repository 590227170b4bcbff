"""The command group: exit codes, the format of errors, and imports."""

import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import jaxinfer
from jaxinfer.cli.command import SettingsCommand
from jaxinfer.cli.main import Commands, cli
from jaxinfer.cli.settings import Setting
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.api.vllm_args import RENAMED


def group_that(raises: BaseException) -> click.Group:
    group = Commands("group")

    @group.command("run")
    def run() -> None:
        raise raises

    return group


def test_error_is_one_line_and_exit_1() -> None:
    result = CliRunner().invoke(group_that(ConfigError("dtype 'int3' is unknown")), ["run"])
    assert result.exit_code == 1
    assert result.stderr == "jaxinfer: error: dtype 'int3' is unknown\n"
    assert result.stdout == ""


def test_interrupt_is_exit_130_without_traceback() -> None:
    result = CliRunner().invoke(group_that(KeyboardInterrupt()), ["run"])
    assert result.exit_code == 130
    assert result.output == ""


def test_bug_is_not_hidden() -> None:
    result = CliRunner().invoke(group_that(AssertionError("a bug")), ["run"])
    assert isinstance(result.exception, AssertionError)


@pytest.mark.parametrize("arguments", [["no-such-command"], ["generate", "--no-such-option"]])
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("run", "; did you mean 'generate', 'chat' or 'serve'?"),
        ("ask", "; did you mean 'generate' or 'chat'?"),
        ("show", "; did you mean 'inspect'?"),
        ("Serv", "; did you mean 'serve'?"),
        ("zzz", "."),
    ],
)
def test_an_unknown_command_gets_advice(word: str, advice: str) -> None:
    result = CliRunner().invoke(cli, [word])
    assert result.stderr.endswith(f"Error: No such command '{word}'{advice}\n")


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"jaxinfer {jaxinfer.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, f"jaxinfer {jaxinfer.__version__}\n"),
        (["--help"], 0, "Usage: python -m jaxinfer [OPTIONS] COMMAND"),
        (["generate", "--help"], 0, "Usage: python -m jaxinfer generate [OPTIONS]"),
        (["no-such-command"], 2, "Usage: python -m jaxinfer [OPTIONS] COMMAND"),
        (["inspect", "no-such-model"], 1, "jaxinfer: error: model 'no-such-model' is neither"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_the_package_runs_as_the_command(arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "jaxinfer", *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == code
    assert words in run.stdout + run.stderr


SAYS = """
import click
from jaxinfer.cli.main import cli, main

@cli.command()
def say():
    click.echo("caf\u00e9 \u65e5\u672c")

main()
"""
LATIN_1 = {**os.environ, "PYTHONIOENCODING": "latin-1"}


def test_a_pipe_gets_utf8_in_any_locale() -> None:
    said = subprocess.check_output([sys.executable, "-c", SAYS, "say"], env=LATIN_1)
    assert said.decode() == "café 日本\n"


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("<&-", "out\n", "err"),
        (">&-", "", "err"),
        ("2>&-", "out!\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_streams_may_be_closed(closed: str, out: str, err: str, tmp_path: Path) -> None:
    """The command reads and writes nothing there, and no file gets their number."""
    program = f"""
import sys
import click
from jaxinfer.cli.main import cli, main

@cli.command()
def say():
    with open({str(tmp_path / "file")!r}, "w") as file:
        click.echo("out" + sys.stdin.read())
        sys.stderr.write("err")
        assert file.fileno() > 2

main()
"""
    command = f"{shlex.join([sys.executable, '-c', program, 'say'])} {closed}"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, input="!")
    assert (run.returncode, run.stdout, run.stderr) == (0, out, err)
    assert (tmp_path / "file").read_text() == ""


def test_a_terminal_gets_the_characters_it_can_show() -> None:
    reader, terminal = os.openpty()
    command = [sys.executable, "-c", SAYS, "say"]
    subprocess.run(command, stdout=terminal, env=LATIN_1, check=True)
    assert os.read(reader, 100).decode("latin-1") == "café ??\r\n"
    os.close(reader)
    os.close(terminal)


@pytest.mark.parametrize("command", cli.commands)
def test_help_of(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: cli {command} ")


PLANS = ("chat", "generate", "serve", "compile", "inspect")


def settings_of(command: str) -> dict[str, Setting]:
    found = cli.commands[command]
    assert isinstance(found, SettingsCommand)
    return {setting.name: setting for setting in found.settings}


def test_commands_have_one_spelling_of_a_setting() -> None:
    """``seed`` alone is two things: of the server's engine, and of generate's prompts."""
    for first, second in itertools.combinations(PLANS, 2):
        ours, theirs = settings_of(first), settings_of(second)
        for name in ours.keys() & theirs.keys() - {"seed"}:
            assert ours[name] is theirs[name]
    shared = {*settings_of("compile")} - {"model"}
    assert shared < {*settings_of("serve")}
    for command in ("generate", "chat"):  # which make text
        assert shared - {"pooling"} < {*settings_of(command)}
    assert {*settings_of("inspect")} == {*settings_of("compile")}
    engine = {RENAMED.get(name, name) for name in settings_of("serve")}
    assert {field.name for field in dataclasses.fields(EngineConfig)} <= engine


@pytest.mark.parametrize("command", PLANS)
def test_the_help_shows_each_default(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"], terminal_width=1000).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  --")}
    for flag in ("--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--load-format"):
        assert "[default: " in lines[flag], lines[flag]
    most = "1]" if command == "chat" else "32 on a CPU, 512 on a GPU]"
    assert most in lines["--max-num-seqs"]
    assert "[default: auto: float32 on a CPU, bfloat16 on a GPU]" in lines["--dtype"]
    assert "[default: auto]" in lines["--load-format"]
    ends = {
        "serve": ("--port", "8000]"),
        "generate": ("--max-tokens", "256]"),
        "chat": ("--max-tokens", "the rest of the context]"),
    }
    if command in ends:
        flag, end = ends[command]
        assert lines[flag].endswith(end)


def test_commands_import_nothing_heavy() -> None:
    script = "import sys, jaxinfer.cli.main; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    heavy = {
        "jax",
        "numpy",
        "flax",
        "rich",
        "tokenizers",
        "msgspec",
        "starlette",
        "uvicorn",
        "yaml",
    }
    assert not heavy & set(modules)
