"""An engine uses one device where JAX sees several, also with a cache made where it saw one, and
one device with a cache made where it saw several.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jaxinfer.models.registry import build_model
from kit import several_devices
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.server_process import SERVE, server_process
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what an engine on the only device has made of it."""
    folder = tmp_path_factory.mktemp("devices")
    config, model = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE), folder / "model"
    model.mkdir()
    write_hf_folder(model, config, random_hf_tensors(build_model(config, "float32")))
    (model / "tokenizer.json").write_text(tiny_tokenizer_json())
    several_devices.make(folder)
    return folder


@pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_engines_bundles_caches_and_research_use_one_device(folder: Path, number: int) -> None:
    command = [sys.executable, "-m", "kit.several_devices", str(folder), str(number)]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("checked\n"), done.stderr
    several_devices.check_one(folder, number)


def test_a_server_uses_one_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    sizes = ("--max-num-seqs=2", "--max-model-len=64", "--max-num-batched-tokens=32")
    command = (*SERVE, str(folder / "model"), "--dtype=float32", *sizes)
    with server_process(*command, f"--cache-dir={folder / 'cache'}") as server:
        body = {"prompt": [5, 9, 3], "max_tokens": 4, "ignore_eos": True}
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 4
