"""``bench throughput`` next to an engine in another interpreter: order, ratios, failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import SamplingParams
from jaxinfer.bench import offline, verify
from jaxinfer.core.errors import BenchError

# it answers with tokens of the count asked for, and ends where its argument says so
VLLM = """
import numbers, os, profile, types
assert "jaxinfer" not in numbers.__file__ + profile.__file__, "not the standard library's"
__version__ = "0.0.1"
class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, top_k):
        assert (temperature, ignore_eos, top_k) == (0.7, True, 5)
        self.count = max_tokens
class LLM:
    def __init__(self, model, calls):
        print("pid", os.getpid(), flush=True)
        assert model == "m"
        self.left = calls
    def generate(self, prompts, sampling, use_tqdm):
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no more memory")
        return [
            types.SimpleNamespace(
                prompt_token_ids=one["prompt_token_ids"],
                outputs=[types.SimpleNamespace(token_ids=[0] * params.count)],
            )
            for one, params in zip(prompts, sampling, strict=True)
        ]
"""
SGLANG = """
__version__ = "0.0.2"
class Engine:
    def __init__(self, model_path, calls):
        assert model_path == "m"
    def generate(self, input_ids, sampling_params):
        assert len(input_ids) == len(sampling_params)
        for fields in sampling_params:
            count = fields.pop("max_new_tokens")
            assert fields == {"temperature": 0.7, "top_k": 5, "ignore_eos": True}, fields
        return [
            {"meta_info": {"prompt_tokens": len(one), "completion_tokens": count}}
            for one in input_ids
        ]
"""
FLAGS = ["--random-input-len=5", "--random-output-len=4", "--num-prompts=2", "--num-iters=2"]
FLAGS += ["--temperature=0.7", "--top-k=5", "--ignore-eos", "--backends=jaxinfer,vllm"]


class Ours:
    """Our engine's stand-in."""

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))

    def generate(self, prompts: list[Any], sampling: list[SamplingParams], use_tqdm: bool) -> Any:
        assert sampling[0].temperature == 0.7 and sampling[0].ignore_eos and not use_tqdm
        return [
            SimpleNamespace(
                prompt_token_ids=one["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=[0] * (params.max_tokens or 0))],
            )
            for one, params in zip(prompts, sampling, strict=True)
        ]


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, calls: int = 3) -> int:
    """The exit code of a run beside the stub, which can be called so often."""
    monkeypatch.setattr(offline, "engine_of", lambda _: Ours())
    monkeypatch.setattr(offline, "device_of", lambda _: {"device": "none"})
    (path / "vllm.py").write_text(VLLM)
    (path / "sglang.py").write_text(SGLANG)
    python = path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    own = [f"--python-{name}={python}" for name in offline.PEERS]
    own += [f'--args-{name}={{"calls": {calls}}}' for name in offline.PEERS]
    given = [*FLAGS, *own, f"--output={path / 'run'}", *flags]
    return offline.throughput(given, lambda _: {"model": "m"})


def read(path: Path, name: str = "result") -> dict[str, Any]:
    return json.loads((path / "run" / f"{name}.json").read_text())


def test_both_engines_are_called_in_turns_with_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "--gate=output_throughput>=0*vllm") == 0
    series = read(tmp_path, "run")["series"]
    assert [one["name"] for one in series] == ["call-0", "vllm-0", "vllm-1", "call-1"]
    workloads = [one["workload"] for one in series]
    assert workloads[0] == workloads[1] != workloads[2] == workloads[3]
    ratio = read(tmp_path)["ratios"]["vllm"]
    assert ratio["reason"] == "" and len(ratio["figures"]["output_throughput"]["rounds"]) == 2
    assert read(tmp_path)["gates"][0]["holds"]
    assert read(tmp_path, "environment")["engines"] == {"vllm": "0.0.1"}
    pid = (tmp_path / "run" / "vllm.log").read_text().split()[1]
    assert not Path(f"/proc/{pid}").exists()
    assert verify.main([str(tmp_path / "run")]) == 0


def test_three_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, "--backends=jaxinfer,vllm,sglang") == 0
    names = [one["name"] for one in read(tmp_path, "run")["series"]]
    assert names == ["call-0", "vllm-0", "sglang-0", "vllm-1", "sglang-1", "call-1"]
    assert {one["reason"] for one in read(tmp_path)["ratios"].values()} == {""}
    assert list(read(tmp_path)["ratios"]) == ["vllm", "sglang"]
    versions = {"vllm": "0.0.1", "sglang": "0.0.2"}
    assert read(tmp_path, "environment")["engines"] == versions


@pytest.mark.parametrize("backends", ["vllm", "jaxinfer,llamacpp", ""])
def test_backends_that_throughput_does_not_know_are_refused(
    backends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        offline.throughput([f"--backends={backends}"], lambda _: {})
    assert "is not a list of jaxinfer and any of vllm, sglang" in capsys.readouterr().err


def test_an_engine_that_ends_midway_is_missing_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, calls=2) == 1  # one of them is the warm-up
    states = {one["name"]: one["state"] for one in read(tmp_path, "run")["series"]}
    assert states["vllm-1"] == "missing"
    assert [states[name] for name in ("call-0", "vllm-0", "call-1")] == ["complete"] * 3
    (reason,) = (one["reason"] for one in read(tmp_path, "run")["series"] if one["reason"])
    assert "status 1" in reason and "no more memory" in reason
    assert read(tmp_path)["ratios"]["vllm"]["rounds"] == [0]


def test_an_engine_that_is_not_installed_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, monkeypatch, "--python-vllm=/nowhere/python") == 1
    series = {one["name"]: one for one in read(tmp_path, "run")["series"]}
    assert "not installed: /nowhere/python" in series["vllm-0"]["reason"]
    assert series["call-1"]["state"] == "complete"


def test_an_engine_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="vllm has no model; give --model or --model-vllm"):
        offline.throughput([*FLAGS, f"--output={tmp_path / 'run'}"], lambda _: {})
