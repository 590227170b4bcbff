"""The nightly benchmark: every preset of a published workload next to vLLM and, if its interpreter
is named, SGLang; then the table of docs/benchmarks.md again.

    python -m bench.nightly FOLDER --python-vllm vllm/bin/python --trace azure.csv.gz

Each run is a folder in FOLDER, under the name that the published ratios give it. A run that is
there and complete is kept, so that a night that was ended is resumed. Exits with 1 if a run fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.published import PUBLISHED, lines_of, redraw
from jaxinfer.bench.records import COMPLETE

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "qwen3-4b": "Qwen/Qwen3-4B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen2-1.5b": "Qwen/Qwen2-1.5B-Instruct",
        "gpt2": "openai-community/gpt2",
    }
)
WITHOUT_ROUNDS = ("openinfer-offload", "roseinfer-offline")  # cannot be resumed
SUFFIX = 16  # tokens of the warm prompts that are not cached


def runs(trace: Path | None) -> Iterator[tuple[str, str, list[str]]]:
    """Name, model and command of each run; those of a trace only with one."""
    yield "openinfer-qps", "qwen3-4b", ["openinfer-qps"]
    yield "openinfer-offload", "qwen3-4b", ["openinfer-offload"]
    yield "inferengine-pair", "qwen3-4b", ["inferengine-pair"]
    yield "roseinfer-offline", "gpt2", ["roseinfer-offline"]
    for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
        flag = f"--prefix-repetition-prefix-len={length - SUFFIX}"
        yield f"openinfer-warm-ttft-{length}", "qwen3-4b", ["openinfer-warm-ttft", flag]
    for model in ("qwen2-1.5b", "qwen3-8b"):
        for length in (128, 256, 512, 1024):
            flag = f"--random-input-len={length}"
            yield f"zedinfer-{model}-{length}", model, ["zedinfer-prefill-decode", flag]
    for scale in ("0.4", "0.8", "1.6") if trace else ():
        flags = [f"--dataset-path={trace}", f"--time-scale={scale}"]
        yield f"roseinfer-online-{scale}", "gpt2", ["roseinfer-online", *flags]


def is_complete(folder: Path) -> bool:
    """True for the folder of a run that needs no repetition."""
    file = folder / "result.json"
    return file.exists() and json.loads(file.read_text())["state"] == COMPLETE


def command_of(given: argparse.Namespace, name: str, model: str, words: list[str]) -> list[str]:
    """The command line of a run: the preset, next to vLLM and SGLang."""
    path = given.models.get(model, MODELS[model])
    command = [sys.executable, "-m", "jaxinfer", "bench", *words, f"--model={path}"]
    if name != "openinfer-offload":
        backends = ["jaxinfer", "vllm"]
        command += [f"--python-vllm={given.python_vllm}"]
        if given.python_sglang:
            backends.append("sglang")
            command += [f"--python-sglang={given.python_sglang}"]
        command += [f"--backends={','.join(backends)}"]
    if name not in WITHOUT_ROUNDS:
        command += ["--resume"]
    return [*command, f"--output={given.folder / name}"]


def main(arguments: list[str] | None = None) -> int:
    """Run what FOLDER lacks and write the page; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-vllm", default=sys.executable, metavar="PATH")
    parser.add_argument("--python-sglang", metavar="PATH")
    parser.add_argument("--trace", type=Path, help="Azure's, for roseinfer's trace")
    parser.add_argument("--only", default="", help="runs whose names begin so")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument(
        "--models",
        type=lambda text: dict(pair.split("=", 1) for pair in text.split(",")),
        default={},
        metavar="NAME=PATH,...",
        help=f"in place of the hub's: {', '.join(MODELS)}",
    )
    given = parser.parse_args(arguments)
    failed: list[str] = []
    for name, model, words in runs(given.trace):
        if not name.startswith(given.only) or is_complete(given.folder / name):
            continue
        print(f"{name}:", flush=True)
        if name in WITHOUT_ROUNDS:
            shutil.rmtree(given.folder / name, ignore_errors=True)
        if subprocess.run(command_of(given, name, model, words)).returncode:
            failed.append(name)
    redraw(given.page, lines_of(given.folder, json.loads(PUBLISHED.read_text())))
    print(f"{given.page} has the table" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
