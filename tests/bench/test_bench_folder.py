"""A run's folder: figures follow from its records, an edit is found, gates set the exit code."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.bench import draw, numbers, verify
from jaxinfer.bench.folder import SUMS, Folder, finished, read_folder, sums_of
from jaxinfer.bench.gates import gate_of
from jaxinfer.bench.records import COMPLETE, MISSING, PARTIAL, Record, Run, Series
from jaxinfer.bench.results import results_of
from jaxinfer.core.errors import BenchError

MS = 1_000_000


def answers(tpot_ms: float, count: int = 6, output_tokens: int = 5) -> list[Record]:
    """Requests that begin every 10 ms, with 20 ms to the first chunk and a pace."""
    gap = round(tpot_ms * MS)
    return [
        Record(
            start_ns=10 * MS * index,
            gaps_ns=[20 * MS + index, *[gap] * (output_tokens - 1)],
            end_ns=40 * MS + 4 * gap,
            prompt_tokens=7,
            output_tokens=output_tokens,
        )
        for index in range(count)
    ]


def compared(path: Path, paces: dict[str, list[float]], gates: list[str] = []) -> Folder:  # noqa: B006
    """A finished comparison: the pace of each backend in each round."""
    run = Run(command="compare", created="now", settings={"model": "m"}, gates=gates)
    folder = Folder.create(path, run, {"server": "stub"})
    with finished(folder):
        for backend, rounds in paces.items():
            for number, pace in enumerate(rounds):
                series = Series(name=f"{backend}-{number}", backend=backend, round=number)
                folder.add(series, answers(pace))
    return folder


def test_statistics_are_numpys() -> None:
    values = list(np.random.default_rng(0).gamma(2.0, size=101))
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        assert numbers.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert numbers.mean(values) == pytest.approx(np.mean(values))
    assert numbers.deviation(values) == pytest.approx(np.std(values))
    assert (numbers.percentile([], 50), numbers.mean([]), numbers.deviation([])) == (0, 0, 0)


def test_an_interval_covers_its_values_and_needs_three() -> None:
    assert numbers.interval([1.0, 2.0]) is None
    low, high = numbers.interval([0.9, 1.0, 1.1, 1.0, 1.05]) or (0, 0)
    assert 0.9 <= low < 1.0 < high <= 1.1
    assert numbers.interval([2.0] * 4) == (2.0, 2.0)


def test_a_run_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path / "run", {"jaxinfer": [2.0, 2.2, 2.1], "vllm": [4.0, 4.0, 4.0]})
    assert verify.main([str(tmp_path / "run")]) == 0
    assert "figures follow from the records" in capsys.readouterr().out
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| p50_tpot_ms | 0.525 | 95 %: 0.5 to 0.55 | 0.5 | 0.55 | 0.525 |" in report
    assert "Slower than a peer" not in report and "ttft: from sending" in report
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 4 and "http-equiv" not in page and "src=" not in page


def digits_of(path: Path) -> list[tuple[Path, int]]:
    """Some digits of each file that a run's figures and verdicts are in."""
    names = ("records/jaxinfer-0.jsonl", "result.json", "report.md", "report.html", "run.json")
    found = []
    for name in names:
        places = [match.start() for match in re.finditer(rb"[0-9]", (path / name).read_bytes())]
        found += [(path / name, places[len(places) * part // 7]) for part in range(7)]
    return found


def test_one_edited_digit_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    compared(path, {"jaxinfer": [2.0], "vllm": [4.0]}, ["tpot_p50<=1.0*vllm"])
    for file, place in digits_of(path):
        before = file.read_bytes()
        digit = b"%d" % ((int(before[place : place + 1]) + 1) % 10)
        file.write_bytes(before[:place] + digit + before[place + 1 :])
        assert _verify(path) != 0, (file, place)
        file.write_bytes(before)
    assert _verify(path) == 0


def _verify(path: Path) -> int:
    try:
        return verify.main([str(path)])
    except BenchError:
        return 1


@pytest.mark.parametrize("name", ["result.json", "report.md", "records/jaxinfer-0.jsonl"])
def test_an_edit_with_new_hashes_is_found_too(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    compared(path, {"jaxinfer": [2.0], "vllm": [4.0]})
    text = (path / name).read_text()
    edited = (
        text.replace("2000000", "2100000").replace("| 2 |", "| 1 |").replace(": 2.0,", ": 1.0,")
    )
    assert edited != text
    (path / name).write_text(edited)
    (path / SUMS).write_text(sums_of(path))
    assert verify.main([str(path)]) == 1
    assert "the records give" in capsys.readouterr().out


def test_hashes_are_those_of_sha256sum(tmp_path: Path) -> None:
    folder = compared(tmp_path / "run", {"jaxinfer": [2.0]})
    lines = (folder.path / SUMS).read_text().splitlines()
    data = (folder.path / "report.md").read_bytes()
    assert f"{hashlib.sha256(data).hexdigest()}  report.md" in lines


@pytest.mark.parametrize(
    ("gate", "code", "says"),
    [
        ("tpot_p50<=1.0*vllm", 0, "holds: 0.5"),
        ("tpot_p50<=vllm", 0, "holds: 0.5"),
        ("tpot_p50<=0.4*vllm", 1, "fails: 0.5"),
        ("output_throughput>=1*vllm", 0, "holds"),
        ("ttft_p99<0.03s", 0, "holds: 20.0"),
        ("e2e_mean<20ms", 1, "fails: 28.0"),
        ("tpot_p50<=1.0*sglang", 1, "sglang has no ratio of p50_tpot_ms"),
        ("speed>1", 1, "the run has no speed"),
    ],
)
def test_a_gate_sets_the_exit_code(
    tmp_path: Path, gate: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path / "run", {"jaxinfer": [2.0], "vllm": [4.0]})
    assert verify.main([str(tmp_path / "run"), "--gate", gate]) == code
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("text", ["tpot", "tpot<", "<3", "tpot<1ms*vllm", "tpot<2vllm", "tpot<2*"])
def test_a_limit_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is no limit|factor of no engine"):
        gate_of(text)


def test_no_ratio_where_token_counts_differ(tmp_path: Path) -> None:
    run = Run(command="compare", created="now", settings={})
    run.series = [Series(name="a", backend="jaxinfer"), Series(name="b", backend="vllm")]
    records = {"a": answers(2.0), "b": answers(2.0, output_tokens=4)}
    (found,) = results_of(run, records)["ratios"].values()
    assert found["figures"] == {}
    assert found["reason"] == (
        "no ratio: in round 0 the output tokens of 6 of 6 requests differ, the first by 5 and 4"
    )
    records["b"] = answers(2.0, count=5)
    assert "6 requests" in results_of(run, records)["ratios"]["vllm"]["reason"]


def test_a_slower_engine_is_named_first(tmp_path: Path) -> None:
    folder = compared(tmp_path / "run", {"jaxinfer": [5.0], "vllm": [4.0]})
    report = (folder.path / "report.md").read_text()
    assert "p50_tpot_ms: 1.25 of vllm (too few rounds" in report.split("## Figures")[0]


def test_a_run_that_breaks_off_keeps_its_records_and_says_so(tmp_path: Path) -> None:
    run = Run(command="compare", created="now", settings={})
    folder = Folder.create(tmp_path / "run", run)
    with pytest.raises(BenchError, match="lost"), finished(folder):
        folder.add(Series(name="a", backend="jaxinfer"), answers(2.0))
        folder.add(Series(name="b", backend="vllm", state=PARTIAL, reason="it died"), answers(2, 3))
        folder.add(Series(name="c", backend="sglang", state=MISSING, reason="not installed"), [])
        raise BenchError("the machine was lost")
    report = (folder.path / "report.md").read_text()
    assert report.splitlines()[2] == "**This run is partial: the machine was lost.**"
    assert "- b is partial: it died" in report and "- c is missing: not installed" in report
    result = json.loads((folder.path / "result.json").read_text())
    assert result["ratios"]["vllm"]["figures"] == {} and set(result["series"]) == {"a", "b"}
    assert verify.main([str(folder.path)]) == 0


def test_resuming_keeps_complete_series_of_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = Folder.create(path, Run(command="compare", created="now", settings={"n": "1"}))
    folder.add(Series(name="a"), answers(2.0))
    folder.add(Series(name="b", state=PARTIAL, reason="it died"), answers(2.0))
    again = Folder.resume(path, Run(command="compare", created="later", settings={"n": "1"}))
    assert [(one.name, one.state) for one in again.run.series] == [("a", COMPLETE)]
    with pytest.raises(BenchError, match="measured with another n; give the same"):
        Folder.resume(path, Run(command="compare", created="later", settings={"n": "2"}))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="run.json cannot be read .No such file"):
        verify.main([str(tmp_path)])
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / SUMS).write_text("")
    with pytest.raises(BenchError, match="describes no benchmark"):
        verify.main([str(tmp_path)])
    (tmp_path / "run.json").write_text('{"format": 1, "command": "serve"}')
    with pytest.raises(BenchError, match="has format 1 and this jaxinfer reads 2"):
        verify.main([str(tmp_path)])
    with pytest.raises(BenchError, match="has files; name another --output"):
        Folder.create(tmp_path, Run(command="serve", created="now", settings={}))


def test_a_broken_record_is_named_with_its_line(tmp_path: Path) -> None:
    folder = compared(tmp_path / "run", {"jaxinfer": [2.0]})
    file = folder.path / "records" / "jaxinfer-0.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BenchError, match="jaxinfer-0.jsonl has no record in line 6"):
        verify.main([str(folder.path)])


def test_runs_are_drawn_with_a_curve_for_each_engine(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        compared(path, {"jaxinfer": [1.0, 2.0], "vllm": [4.0]})
    read = [(path.name, read_folder(path)) for path in paths]
    curves = draw.curves_of(read, "output_throughput", "p50_tpot_ms")
    assert list(curves) == ["one jaxinfer", "one vllm", "two jaxinfer", "two vllm"]
    assert [round(y, 3) for _, y in curves["one jaxinfer"]] == [2.0, 1.0]  # the faster has more
    flags = ["--x=output_throughput", "--y=tpot_p50", f"--output={tmp_path / 'x.svg'}"]
    assert draw.main([*map(str, paths), *flags]) == 0
    assert (tmp_path / "x.svg").read_text().count("<polyline") == 4
    with pytest.raises(BenchError, match="x.svg cannot be written"):
        draw.main([str(paths[0]), *flags[:2], f"--output={paths[0] / 'run.json' / 'x.svg'}"])
    with pytest.raises(BenchError, match="both rate and tpot_p50"):
        draw.main([str(paths[0]), "--y=tpot_p50"])
