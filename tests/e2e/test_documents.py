"""Code blocks of README.md and docs/*.md run as written and print what the document shows.

Blocks run in the order of the documents, in one folder that has the repository's files and .venv.
All of them use one server, which has the flags of every ``jaxinfer serve``, but a free port. Blocks
that the tests cannot run say so in their first line, and the options of their commands are parsed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from kit.documents import (
    DOCUMENTS,
    LANGUAGES,
    REASONS,
    ROOT,
    Block,
    blocks_of,
    check_command,
    indented_blocks,
)
from kit.server_process import SERVE, ServerProcess, server_process

BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
RUN = [block for block in BLOCKS if block.language != "text" and block.reason is None]
PORT = re.compile(r"\b8000\b")
NIGHTLY_CHARACTERS, NIGHTLY_COMMANDS = 600, 5


def marked(block: Block) -> Any:
    """Long blocks compile engines of their own, for 20 to 40 s on two cores: they run nightly."""
    commands = len(block.commands) if block.language == "sh" else 0
    long = len(block.text) > NIGHTLY_CHARACTERS or commands > NIGHTLY_COMMANDS
    marks = (pytest.mark.nightly,) if long else ()
    return pytest.param(block, id=block.name, marks=marks)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_names_its_language_and_why_it_is_not_run(document: Path) -> None:
    assert list(indented_blocks(document)) == []
    for block in blocks_of(document):
        assert block.language in LANGUAGES, block
        assert block.reason is None or block.reason in REASONS, block


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_commands_are_accepted(block: Block) -> None:
    if block.language == "python":
        compile(block.text, block.name, "exec")
    if block.language == "toml":
        tomllib.loads(block.text)
    if block.language == "sh":
        assert block.commands
        for words in block.commands:
            check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "jaxinfer generate --no-such-flag x",
        "jaxinfer compile",
        "python -m bench.load --seconds ten",
        "python tests/no_such_file.py",
        "pip install -e '.[no_such_extra]'",
        "no_such_program",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    (words,) = Block("", "sh", command, None).commands
    with pytest.raises((Exception, SystemExit)):
        check_command(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which `make` has installed the package: links to all that the repository has."""
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        if entry.name != ".venv":
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        (folder / ".venv" / entry.name).symlink_to(entry)
    stamp = folder / ".venv" / ".installed"
    stamp.unlink(missing_ok=True)
    stamp.touch()
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with the flags of every block that starts one."""
    commands = [block.serves for block in RUN if block.serves]
    flags: dict[str, str] = {}
    for words in commands:
        flags |= zip(words[1::2], words[2::2], strict=True)
    del flags["--port"]
    model, *others = {words[0] for words in commands}
    assert not others
    arguments = [word for pair in flags.items() for word in pair]
    with server_process(*SERVE, model, *arguments) as server:
        yield server


@pytest.mark.parametrize("block", [marked(block) for block in RUN])
def test_block_runs(
    block: Block,
    folder: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = block.text
    if block.serves or PORT.search(text):
        port = request.getfixturevalue("server").port
        text = PORT.sub(str(port), text)
    if block.serves:
        return
    if block.language == "sh":
        output = run_shell(text, folder)
    else:
        names: dict[str, Any] = {"__name__": "__main__"}
        with jax.numpy_dtype_promotion("standard"):  # as for users
            exec(compile(text, block.name, "exec"), names)
        if "client" in names:  # else its sockets are open until they are garbage
            names["client"].close()
        output = capsys.readouterr().out
    if block.prints:
        assert block.prints in output


def run_shell(text: str, folder: Path) -> str:
    """What bash prints for this text on stdout; every command must succeed."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
