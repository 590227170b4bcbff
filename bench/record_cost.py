"""Time per token of an engine with and without a recording: ``python -m bench.record_cost``.

Each kind has an engine of its own, one after the other, as weights of two do not fit; ``--repeats``
alternates the kinds, so that a drift of the machine is in both. Prints one JSON object, and writes
it to ``--output``. With ``--check`` the last recordings are replayed on the device afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("record", {}),
    ("record_digests", {"record_digests": True}),
)


def main() -> None:
    """Measure every kind, each in a process of its own."""
    options = arguments().parse_args()
    if options.kind:
        print(json.dumps(measured(options)))
        return
    root = Path(tempfile.mkdtemp(prefix="record-cost-"))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in KINDS}
    for _ in range(options.repeats):
        for name in found:
            folder = root / f"{name}{len(found[name])}"
            folder.mkdir()
            own = ["--kind", name, "--folder", str(folder)]
            command = [sys.executable, "-m", "bench.record_cost", *sys.argv[1:], *own]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            run = json.loads(done.stdout.splitlines()[-1]) | {"check": ""}
            if options.check and name != "none":
                command = [sys.executable, "-m", "jaxinfer", "replay", str(folder / "rec")]
                done = subprocess.run([*command, "--check"], stdout=subprocess.PIPE, text=True)
                run["check"] = done.stdout
            found[name].append(run)
    report: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}}
    for name, runs in found.items():
        report[name] = {
            "ms_per_token": [run["ms_per_token"] for run in runs],
            "median": median(run["ms_per_token"] for run in runs),
            "bytes_per_step": runs[-1]["bytes_per_step"],
            "check": runs[-1]["check"],
        }
        report[name]["relative"] = report[name]["median"] / report["none"]["median"]
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The time per token of one kind, over the steps after the prompts."""
    from jaxinfer import LLM, SamplingParams

    settings = dict(KINDS)[options.kind]
    if options.kind != "none":
        settings = settings | {"record": str(options.folder / "rec")}
    llm = LLM(
        options.model,
        load_format=options.load_format,
        max_model_len=options.prompt + options.tokens + 16,
        max_num_seqs=options.rows,
        skip_tokenizer_init=True,
        **settings,
    )
    prompts = [
        {"prompt_token_ids": [5 + (7 * row + i) % 1000 for i in range(options.prompt)]}
        for row in range(options.rows)
    ]

    def seconds(num_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    seconds(8)
    times = [seconds(options.tokens) - seconds(1) for _ in range(3)]
    llm._engine.close()  # the last calls are in the file
    num_bytes = sum(one.stat().st_size for one in options.folder.iterdir())
    return {
        "ms_per_token": 1e3 * median(times) / (options.tokens - 1),
        "bytes_per_step": num_bytes / (3 * options.tokens),
    }


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--check", action="store_true", help="replay the recordings on the device")
    parser.add_argument("--kind", default="", help=argparse.SUPPRESS)  # of a child process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
