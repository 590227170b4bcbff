"""A table of each family's costs: lines of its file, the options it needed, seconds of its tests.

    pytest -q tests --junitxml=report.xml        # what ``make test`` runs, on idle cores
    python -m bench.family_costs report.xml [costs.json]

prints it in Markdown, from the repository root, and writes its numbers to a file. Options are the
fields of specs that differ from their defaults in a golden file of the family. A test is a family's
if its parameters name its architecture, a golden file of it, or begin with its name; those that
name none are not counted.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from bench.models_page import GOLDEN
from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.models.registry import (
    build_model,
    decoder_config,
    family_for,
    known_architectures,
    text_config,
    wrapping_architectures,
)

HEAD = ("family", "lines", "options", "seconds of tests")
# Facts of a config rather than options.
_FACTS = frozenset({"norm_dtype", "own_layout", "num_streams"})


class Costs(NamedTuple):
    """The cost of one family."""

    lines: int
    options: tuple[str, ...]
    seconds: float


def costs(report: Path) -> dict[str, Costs]:
    """Those of each family, in the order of the registry."""
    wrappers = wrapping_architectures()
    architectures = [name for name in known_architectures() if name not in wrappers]
    families = {name: family_for({"architectures": [name]}) for name in architectures}
    names = {name: family.name for name, family in families.items()}
    options: dict[str, set[str]] = {}
    for case, config in _golden():
        model = build_model(config, "float32")
        names[case] = model.family.name
        options.setdefault(model.family.name, set()).update(options_of(model.config))
    seconds: Counter[str] = Counter()
    for parameters, took in _tests(report):
        seconds[family_of(parameters, names)] += took
    found: dict[str, Costs] = {}
    for family in families.values():
        source = importlib.import_module(f"jaxinfer.models.{family.name}").__file__
        assert source is not None
        lines = len(Path(source).read_text("utf-8").splitlines())
        own = tuple(sorted(options.get(family.name, ())))
        found[family.name] = Costs(lines, own, seconds[family.name])
    return found


def options_of(spec: Any) -> Iterator[str]:
    """The names of fields that differ from their defaults, within a spec and its parts."""
    if isinstance(spec, tuple):
        for one in dict.fromkeys(spec):
            yield from options_of(one)
    if not is_dataclass(spec):
        return
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name in _FACTS or value == field.default:
            continue
        if field.default is not MISSING:
            yield field.name
        yield from options_of(value)


def family_of(parameters: str, names: dict[str, str]) -> str:
    """The family of a test with these parameters; "" if none is named."""
    parts = parameters.split("-")
    for part in parts:
        if part in names:
            return names[part]
    families = sorted({*names.values()}, key=len, reverse=True)
    return next((one for one in families for part in parts if part.startswith(one)), "")


def _golden() -> Iterator[tuple[str, Any]]:
    """The golden files with a config, and the configs of their text decoders."""
    for path in sorted(GOLDEN.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            config = (file.metadata() or {}).get("config")
        if config is not None and "architectures" in (read := json.loads(config)):
            yield path.stem, decoder_config(text_config(read))


def _tests(report: Path) -> Iterator[tuple[str, float]]:
    """The parameters of each test of a JUnit report, and its seconds."""
    for case in ElementTree.parse(report).iter("testcase"):  # a file of one's own
        parameters = re.search(r"\[(.*)\]$", case.get("name", ""))
        if parameters is not None:
            yield parameters[1], float(case.get("time", 0))


def table(found: dict[str, Costs]) -> str:
    """The table in Markdown, with a line for all families together."""
    lines = [f"| {' | '.join(HEAD)} |", f"| {' | '.join(['---'] * len(HEAD))} |"]
    for name, own in found.items():
        options = ", ".join(own.options) or "-"
        lines.append(f"| `{name}` | {own.lines} | {options} | {own.seconds:.1f} |")
    total = sum(own.seconds for own in found.values())
    lines.append(f"| all {len(found)} | {sum(c.lines for c in found.values())} | | {total:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, and write the file if one is named."""
    found = costs(Path(sys.argv[1]))
    sys.stdout.write(table(found))
    for path in map(Path, sys.argv[2:]):
        families = {name: own._asdict() for name, own in found.items()}
        write_report(path, {**host_circumstances(), "families": families})


if __name__ == "__main__":
    main()
