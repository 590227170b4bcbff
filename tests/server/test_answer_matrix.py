"""Answers in the three APIs, for each chat template, form of thoughts and form of the answer."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kit.answer_matrix import run
from kit.scripted import TEMPLATES

pytest.importorskip("llguidance")

SHARE = 0.03  # of the 448 cases of each template
# It has the templates that llama.cpp is tested with, which are the models' own.
PUBLISHED = "llama-cpp-python==0.3.36"
FOLDER = "vendor/llama.cpp/models/templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.mark.parametrize("name", NAMES)
def test_a_sample(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    counts, wrong = run(source, SHARE, seed=NAMES.index(name))
    assert not wrong and counts["right"], "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_all(name: str) -> None:
    _, wrong = run((TEMPLATES / f"{name}.jinja").read_text("utf-8"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_marks_of_several_tokens(name: str) -> None:
    """Few marks are tokens of SmolLM2, and others join them with the text around them."""
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    _, wrong = run(source, 0.2, seed=NAMES.index(name), vocabulary="smollm2")
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_published_templates(tmp_path: Path) -> None:
    options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(tmp_path))
    command = (sys.executable, "-m", "pip", "download", "--quiet", *options, PUBLISHED)
    subprocess.run(command, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    failures: list[str] = []
    with tarfile.open(archive) as opened:
        found = [one for one in opened.getmembers() if f"/{FOLDER}/" in one.name]
        for member in found:
            if member.name.endswith(".jinja"):
                content = opened.extractfile(member)
                assert content is not None
                _, wrong = run(content.read().decode())
                failures += [f"{Path(member.name).name}: {line}" for line in wrong]
    assert found and not failures, "\n".join(failures)
