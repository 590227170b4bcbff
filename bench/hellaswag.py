"""HellaSwag's first 200 rows on a running server, by lm-eval, compared with transformers' scores.

Run from the repository root; PATH is an interpreter with `lm-eval[api]` and `transformers`; MORE
are options of lm-eval, such as `--limit 20`:

    .venv/bin/python -m bench.hellaswag --python PATH [--base-url URL] [-- MORE]

Exits with 1 if a score differs by more than one item from transformers' on the same weights,
SmolLM2-135M-Instruct dequantised to float32.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TASK = "hellaswag_200"
TASK_FOLDER = Path("bench/eval")
REFERENCE = Path("tests/data/evals/hellaswag_200_smollm2.json")
TOKENIZER = Path("tests/data/tokenizers/smollm2")
TOLERANCE = 1  # items


def run_lm_eval(
    python: str, base_url: str, model: str, options: Sequence[str], output: Path
) -> None:
    """One lm-eval run through `/v1/completions`; its files go below ``output``."""
    model_args = {
        "model": model,
        "base_url": f"{base_url}/v1/completions",
        "tokenizer": unpack(TOKENIZER, output / "tokenizer"),
        "tokenizer_backend": "huggingface",
    }
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--tasks", TASK]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    command += ["--include_path", str(TASK_FOLDER), "--output_path", str(output), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run([*command, *options], check=True, env={**os.environ, **offline})


def unpack(source: Path, target: Path) -> Path:
    """A copy of the folder that transformers can read, with its compressed files unpacked."""
    target.mkdir()
    for path in source.iterdir():
        data = path.read_bytes()
        packed = path.suffix == ".gz"
        (target / (path.stem if packed else path.name)).write_bytes(
            gzip.decompress(data) if packed else data
        )
    return target


def compare(samples: Sequence[dict[str, Any]], reference: dict[str, Any]) -> dict[str, Any]:
    """Correct items of both sides over the evaluated rows, and the largest difference."""
    rows = {row["ind"]: row for row in reference["rows"]}
    differences: list[float] = []
    ours = {"acc": 0, "acc_norm": 0}
    theirs = {"acc": 0, "acc_norm": 0}
    for sample in samples:
        row = rows[sample["doc"]["ind"]]
        choices: list[str] = sample["doc"]["choices"]
        found = [float(answer[0]) for answer in sample["filtered_resps"]]
        expected: list[float] = row["log_likelihoods"]
        differences += [abs(a - b) for a, b in zip(found, expected, strict=True)]
        for name in ours:
            lengths = [len(choice) if name == "acc_norm" else 1 for choice in choices]
            ours[name] += int(sample[name])
            theirs[name] += _best(expected, lengths) == row["label"]
    return {
        "rows": len(samples),
        "ours": ours,
        "transformers": theirs,
        "largest_difference": max(differences),
    }


def _best(log_likelihoods: Sequence[float], lengths: Sequence[int]) -> int:
    """The likeliest choice per unit of length; the first of equals."""
    scores = [value / length for value, length in zip(log_likelihoods, lengths, strict=True)]
    return scores.index(max(scores))


def read_samples(output: Path) -> list[dict[str, Any]]:
    """lm-eval's record of each row."""
    (path,) = output.rglob(f"samples_{TASK}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(argv: list[str] | None = None) -> None:
    """Evaluate, print, and exit with 1 if the scores differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter with lm-eval[api]")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="a name that the server answers to")
    parser.add_argument("options", nargs="*", help="after --: more options for lm-eval")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as output:
        folder = Path(output)
        run_lm_eval(given.python, given.base_url, given.model, given.options, folder)
        result = compare(read_samples(folder), json.loads(REFERENCE.read_text()))
    print(json.dumps(result))
    for name, correct in result["ours"].items():
        if abs(correct - result["transformers"][name]) > TOLERANCE:
            raise SystemExit(
                f"{name}: {correct} items, transformers {result['transformers'][name]}"
            )


if __name__ == "__main__":
    main()
