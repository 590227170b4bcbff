"""The Grafana board: only exported series, only those of the chosen servers, panels that fit."""

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from kit.sample_metrics import busy_metrics, samples_of


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(files("jaxinfer.configs").joinpath("grafana", "jaxinfer.json").read_text())


class TestBoard:
    @staticmethod
    def expressions(board: dict[str, Any]) -> list[str]:
        targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
        return [entry["expr"] for entry in (*targets, *board["annotations"]["list"])]

    def test_every_metric_is_exported(self, board: dict[str, Any]) -> None:
        exported = {name for name, _ in samples_of(busy_metrics())}
        named: set[str] = set()
        for expression in self.expressions(board):
            without_labels = re.sub(r"\{[^}]*\}|\b(by|without) \([^)]*\)", "", expression)
            named |= set(re.findall(r"(?:\w+:\w+|(?:http|process)_\w+)", without_labels))
        variables = [item.get("definition", "") for item in board["templating"]["list"]]
        named |= set(re.findall(r"label_values\(([\w:]+)", " ".join(variables)))
        assert len(named) > 25
        assert named <= exported

    def test_only_the_chosen_servers_are_shown(self, board: dict[str, Any]) -> None:
        for expression in self.expressions(board):
            series = len(re.findall(r"(?:vllm|jaxinfer):\w+", expression))
            assert series == expression.count('model_name=~"$model_name"'), expression
            others = len(re.findall(r"(?:http|process)_\w+", expression))
            assert others == expression.count('job=~"$job"'), expression  # they have no model label

    def test_panels(self, board: dict[str, Any]) -> None:
        assert [item["name"] for item in board["templating"]["list"]] == [
            "datasource",
            "model_name",
            "job",
        ]
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
