"""``jaxinfer bench verify``: computes the figures and verdicts of a run again from its records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.bench.arguments import Parser, add_output
from jaxinfer.bench.folder import PAGE, REPORT, RESULT, SUMS, read_file, read_folder, sums_of
from jaxinfer.bench.page import page_text
from jaxinfer.bench.records import COMPLETE
from jaxinfer.bench.report import report_text
from jaxinfer.bench.results import results_of
from jaxinfer.core.errors import BenchError


def differences(path: Path) -> Iterator[str]:
    """A sentence for each file, figure or line that is not what the records give.

    Raises ``BenchError`` if the folder cannot be read at all.
    """
    read = read_folder(path)
    listed, found = _sums(_text(path / SUMS)), _sums(sums_of(path))
    for name in sorted(listed.keys() | found.keys()):
        if listed.get(name) != found.get(name):
            what = "missing" if name not in found else "new" if name not in listed else "changed"
            yield f"{name} is {what} since the run"
    result = results_of(read.run, read.records, read.profiled)
    try:
        stated = json.loads(_text(path / RESULT))
    except ValueError as error:
        raise BenchError(f"{path / RESULT} is not JSON ({error}); run it again") from error
    yield from unequal(stated, json.loads(json.dumps(result)), RESULT)
    report = report_text(read.run, read.environment, result)
    page = page_text(read.run, read.environment, result, read.records)
    for name, text in ((REPORT, report), (PAGE, page)):
        lines = _text(path / name).splitlines()
        for number, (there, here) in enumerate(zip(lines, text.splitlines(), strict=False), 1):
            if there != here:
                yield f"{name} says in line {number}: {there[:80]}; the records give: {here[:80]}"
        if len(lines) != len(text.splitlines()):
            yield f"{name} has {len(lines)} lines and the records give {len(text.splitlines())}"


def _sums(text: str) -> dict[str, str]:
    """The hash of each file that a list has."""
    return {line[66:]: line[:64] for line in text.splitlines()}


def unequal(stated: Any, computed: Any, place: str) -> Iterator[str]:
    """Every leaf of two JSON values that differs."""
    if isinstance(stated, dict) and isinstance(computed, dict):
        for name in sorted(stated.keys() | computed.keys()):
            yield from unequal(stated.get(name), computed.get(name), f"{place}: {name}")
    elif isinstance(stated, list) and isinstance(computed, list) and len(stated) == len(computed):
        for index, pair in enumerate(zip(stated, computed, strict=True)):
            yield from unequal(*pair, f"{place}: {index}")
    elif stated != computed:
        yield f"{place} is {stated} and the records give {computed}"


def count_of(value: Any) -> int:
    """The number of leaves of a JSON value."""
    if isinstance(value, dict):
        return sum(map(count_of, value.values()))
    return sum(map(count_of, value)) if isinstance(value, list) else 1


def _text(path: Path) -> str:
    return read_file(path).decode(errors="replace")


def main(arguments: list[str]) -> int:
    """Print what differs and the verdicts; the exit code."""
    parser = Parser("verify", (__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_output(parser)
    given = parser.parse_args(arguments)
    found = list(differences(given.folder))
    for sentence in found:
        print(sentence)
    read = read_folder(given.folder)
    read.run.gates = [*read.run.gates, *given.gate]
    result = results_of(read.run, read.records, read.profiled)
    failed = [one for one in result.get("gates", ()) if not one["holds"]]
    for one in result.get("gates", ()):
        why = f" ({one['reason']})" if one["reason"] else ""
        print(f"{one['gate']}: {'holds' if one['holds'] else 'fails'}: {one['value']}{why}")
    if not found:
        count = count_of([result["series"], result.get("profile", {})])
        print(f"{given.folder}: {count} figures follow from the records")
    if read.run.state != COMPLETE:
        absent = [f"{one.name} is {one.state}" for one in read.run.series if one.state != COMPLETE]
        reasons = ", ".join([read.run.reason, *absent] if read.run.reason else absent)
        print(f"{given.folder}: the run is {read.run.state}: {reasons}")
    return int(bool(found or failed))
