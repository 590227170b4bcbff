"""The command group: exit codes, the shape of errors, and start-up time."""

import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import jaxinfer
from jaxinfer.cli.main import Commands, cli
from jaxinfer.core.errors import ConfigError

JAXINFER = str(Path(sys.executable).with_name("jaxinfer"))


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


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"jaxinfer {jaxinfer.__version__}\n"


@pytest.mark.parametrize("command", cli.commands)
def test_help_of(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: cli {command} ")


def test_help_is_instant() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([JAXINFER, "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.15


def test_commands_import_nothing_heavy() -> None:
    script = "import sys, jaxinfer.cli.main; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not {"jax", "numpy", "flax", "rich", "tokenizers", "msgspec"} & set(modules)
