"""The evaluation's own arithmetic; lm-eval itself runs in `bench.hellaswag`, not here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from bench.hellaswag import REFERENCE, compare, unpack

ROWS = Path(__file__).parents[1] / "data" / "evals" / "hellaswag_200.jsonl.gz"


def test_the_reference_belongs_to_the_rows() -> None:
    with gzip.open(ROWS, "rt") as file:
        rows = [json.loads(line) for line in file]
    reference = json.loads(REFERENCE.read_text())
    assert [row["ind"] for row in rows] == [row["ind"] for row in reference["rows"]]
    assert [int(row["label"]) for row in rows] == [row["label"] for row in reference["rows"]]
    right = [
        row["log_likelihoods"].index(max(row["log_likelihoods"])) == row["label"]
        for row in reference["rows"]
    ]
    assert (len(rows), sum(right)) == (200, reference["correct"])


def test_scores_of_both_sides_are_of_the_evaluated_rows() -> None:
    reference = {
        "rows": [
            # likeliest: 0; per character: 1
            {"ind": 1, "label": 1, "log_likelihoods": [-3.0, -4.0]},
            {"ind": 2, "label": 0, "log_likelihoods": [-1.0, -2.0]},
        ]
    }
    sample = {
        "doc": {"ind": 1, "choices": ["ab", "abcd"]},
        "filtered_resps": [["-3.5", "False"], ["-4.0", "False"]],
        "acc": 0.0,
        "acc_norm": 1.0,
    }
    assert compare([sample], reference) == {
        "rows": 1,
        "ours": {"acc": 0, "acc_norm": 1},
        "transformers": {"acc": 0, "acc_norm": 1},
        "largest_difference": 0.5,
    }


def test_a_packed_folder_is_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.json.gz").write_bytes(gzip.compress(b"{}"))
    (source / "b.json").write_text("[]")
    target = unpack(source, tmp_path / "target")
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "a.json": "{}",
        "b.json": "[]",
    }
