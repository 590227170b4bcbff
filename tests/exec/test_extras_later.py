"""A start from nothing leaves the steps for extras to later, in a bundle of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import NoProgress
from jaxinfer.exec import compile as exec_compile
from jaxinfer.exec.compile import Executables, build_executables, cached_bundle
from jaxinfer.exec.program import Program
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model

LIMITS = tiny_limits(max_num_seqs=1, max_num_batched_tokens=16)
PROGRAM = Program(tiny_model("llama")[0], LIMITS, platform="gpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled, in order."""
    names: list[str] = []
    compile_all = exec_compile.compile_all

    def noted(program: Program, some: Sequence[str], *rest: Any) -> Any:
        names.extend(some)
        return compile_all(program, some, *rest)

    monkeypatch.setattr(exec_compile, "compile_all", noted)
    return names


def built(root: Path, **arguments: Any) -> Executables:
    folder = cached_bundle(PROGRAM, root)
    return build_executables(PROGRAM, folder=folder, progress=NoProgress(), **arguments)


def test_compiled_when_all_else_is_there_and_found_by_the_next(
    tmp_path: Path, compiled: list[str]
) -> None:
    first = built(tmp_path)
    at_start, later = PROGRAM.names_at_start(), PROGRAM.names_later()
    assert {*at_start, *later} == set(PROGRAM.names()) and at_start and later
    assert compiled == [*at_start] and first.compiled == len(at_start)
    assert first.later is not None and not first.later.done
    (folder,) = tmp_path.iterdir()
    for name in at_start:
        assert first.by_name[name]
    first.later.begin()
    assert first.by_name[later[-1]]  # who asks for one waits
    assert compiled == [*at_start, *later]
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{folder.name}-later"}

    again = built(tmp_path)
    assert [again.by_name[name] is not None for name in PROGRAM.names()]
    assert compiled == [*at_start, *later] and again.compiled == 0


def test_a_workspace_that_does_not_fit_is_told_of_both(tmp_path: Path) -> None:
    asked: list[int] = []

    def check(workspace_bytes: int) -> None:
        asked.append(workspace_bytes)
        if len(asked) > 1:
            raise CacheError("too much")

    executables = built(tmp_path, check_workspace=check)
    assert asked == [executables.workspace_bytes] and executables.later is not None
    with pytest.raises(CacheError, match="too much"):
        executables.by_name[PROGRAM.names_later()[0]]
    assert executables.later.done and asked[1] > asked[0]


def test_what_cannot_be_compiled_later_is_an_error_of_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executables = built(tmp_path)

    def fails(*_: Any) -> Any:
        raise CacheError("no room on the disk")

    monkeypatch.setattr(exec_compile, "compile_all", fails)
    assert executables.by_name[PROGRAM.names_at_start()[0]]
    with pytest.raises(CacheError, match="no room on the disk"):
        executables.by_name[PROGRAM.names_later()[0]]
    assert len([*tmp_path.iterdir()]) == 1


ENDING = """
from pathlib import Path
from exec.test_extras_later import built
executables = built(Path(sys.argv[1]))
executables.later.begin()
"""


def test_a_process_that_ends_meanwhile_leaves_nothing_half_written(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(tests)!r}){ENDING}"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    whole = [path.name.removesuffix("-later") for path in tmp_path.iterdir()]
    assert set(whole) == {exec_compile.program_fingerprint(PROGRAM).digest()}
