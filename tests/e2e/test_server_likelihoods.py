"""Log-likelihoods of HellaSwag's choices from the server, compared with transformers'.

Both use the same weights. It is `bench.hellaswag` without lm-eval, and compares each choice's
likelihood, not the score.
"""

from __future__ import annotations

import gzip
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.bench.server_process import ServerProcess
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tokenizers import real_spec

DATA = Path(__file__).parents[1] / "data" / "evals"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("--cpu-weights=float32") as server:
        yield server.url


def clean(text: str) -> str:
    """HellaSwag's usual preprocessing: remove WikiHow's marks in brackets."""
    unmarked = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return unmarked.replace("  ", " ")


def likelihoods(url: str, context: list[int], prompts: list[list[int]]) -> list[float]:
    """Sum over each prompt's tokens after the context, without the generated token."""
    fields = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        choices: list[dict[str, Any]] = json.load(response)["choices"]
    sums: list[float] = []
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(prompt) + 1 and logprobs[0] is None
        sums.append(sum(logprobs[len(context) : -1]))
    return sums


@pytest.mark.nightly
def test_log_likelihoods_equal_transformers(url: str) -> None:
    tokenizer = load_tokenizer(real_spec("smollm2"))
    reference = json.loads((DATA / "hellaswag_200_smollm2.json").read_text())["rows"]
    with gzip.open(DATA / "hellaswag_200.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    for row, wanted in zip(rows, reference, strict=True):
        beginning = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
        text = clean(f"{row['activity_label']}: {beginning}")
        context = tokenizer.encode(text)
        prompts = [tokenizer.encode(f"{text} {clean(ending)}") for ending in row["endings"]]
        got = likelihoods(url, context, prompts)
        assert got == pytest.approx(wanted["log_likelihoods"], abs=1e-3), row["ind"]
