"""The tables and the plot of device results, by golden text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import render
from bench.peers_figure import figure
from jaxinfer.bench.plot import lines_plot

PEER = {
    "peer": "vLLM 0.26.0",
    "rows": [
        {"metric": "tpot_ms", "case": "b1", "value": 3.68},
        {"metric": "offline_tok_s", "case": "greedy", "value": 9660},
        {"metric": "start_s", "case": "no_bundle", "value": 77.2},
    ],
    "serve": {"rows": [{"qps": 4, **dict.fromkeys(sum(render.SERVE.values(), ()), 8.0)}]},
}
STEP: dict[str, Any] = {
    "device": "NVIDIA H200",
    "versions": {"jax": "0.11.2"},
    "git": "abc",
    "groups": {},
    "rows": [
        {"metric": "tpot_ms", "case": "b1", "value": 2.3, "floor": 1.91},
        {"metric": "tpot_ms", "case": "b16", "value": 4.0, "floor": None},
        {"metric": "tpot_ms", "case": "b1/16384", "value": 2.9, "floor": 2.4, "predicted": 2.8},
        {"metric": "tpot_ms", "case": "gpt2/b1", "value": 0.4, "floor": 0.06},
        {"metric": "device_busy", "case": "gpt2/b1", "value": 0.625, "floor": None},
        {"metric": "offline_tok_s", "case": "greedy", "value": 11000.0, "floor": 16000.0},
        {"metric": "start_s", "case": "no_bundle", "value": 20.0, "floor": None},
        {"metric": "start_s", "case": "bundle", "value": 2.0, "floor": None},
        {"metric": "start_import_s", "case": "no_bundle", "value": 1.5, "floor": None},
        {"metric": "start_import_s", "case": "bundle", "value": 1.25, "floor": None},
        {"metric": "card_share", "case": "until_ready", "value": 0.913, "asked": 0.92},
        {"metric": "ablation_tpot_ms", "case": "default/b1", "value": 2.3, "floor": None},
        {"metric": "ablation_tpot_ms", "case": "no-overlap/b1", "value": 2.9, "floor": None},
        {"metric": "ablation_tpot_ms", "case": "no-overlap/b64", "value": 5.0, "floor": None},
        {"metric": "ablation_ttft_ms", "case": "default/4096", "value": 58.0, "floor": None},
    ],
}
STEP_TABLES = """\
NVIDIA H200, jax 0.11.2, commit abc

| TPOT, ms | ours | floor | of it | vLLM 0.26.0 | times as fast | must | met |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 2.30 | 1.91 | 83% | 3.68 | 1.60 | 2.50 | yes |
| 16 | 4.00 | - | - | - | - | - | - |

| offline, output tokens/s | ours | floor | of it | vLLM 0.26.0 | times as fast | must | met |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| greedy | 11,000 | 16,000 | 69% | 9,660 | 1.14 | 12,000 | **no** |

| start until ready, s | ours | floor | of it | vLLM 0.26.0 | times as fast | must | met |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| no bundle | 20.0 | - | - | 77.2 | 3.86 | 30.0 | yes |
| bundle | 2.00 | - | - | - | - | 4.00 | yes |

| TPOT at batch/context, ms | measured | predicted | over |
| --- | ---: | ---: | ---: |
| b1/16384 | 2.90 | 2.80 | +3.6% |

| GPT-2 shapes | ours | floor | device busy |
| --- | ---: | ---: | ---: |
| b1: TPOT, ms | 0.400 | 0.0600 | 62% |

| of a start | no bundle | bundle |
| --- | ---: | ---: |
| import s | 1.50 | 1.25 |

| of the card's memory | in use | asked |
| --- | ---: | ---: |
| until ready | 91.3% | 92% |

| ms | TPOT, batch 1 | TPOT, batch 64 | TTFT, 4096 |
| --- | ---: | ---: | ---: |
| default | 2.30 | - | 58.0 |
| no-overlap | 2.90 | 5.00 | - |
"""
SERVE = {
    "rows": [
        {
            "qps": qps,
            "median_ttft_ms": 20.0,
            "p99_ttft_ms": 45.0,
            "median_tpot_ms": 2.5,
            "p99_tpot_ms": 3.0,
            "p99_itl_ms": 4.0,
            "output_throughput": 1234.0,
        }
        for qps in (4.0, "inf")
    ]
}
SERVE_TABLE = """\
| requests a second | 4 | inf |
| --- | ---: | ---: |
| TTFT p50 / p99 ms, jaxinfer | 20.0 / 45.0 | 20.0 / 45.0 |
| TTFT p50 / p99 ms, vLLM 0.26.0 | 8.00 / 8.00 | - |
| TPOT p50 / p99 ms, jaxinfer | 2.50 / 3.00 | 2.50 / 3.00 |
| TPOT p50 / p99 ms, vLLM 0.26.0 | 8.00 / 8.00 | - |
| ITL p99 ms, jaxinfer | 4.00 | 4.00 |
| ITL p99 ms, vLLM 0.26.0 | 8.00 | - |
| output tok/s, jaxinfer | 1,234 | 1,234 |
| output tok/s, vLLM 0.26.0 | 8.00 | - |
"""
KERNELS = {
    "device": "NVIDIA H200",
    "git": "abc",
    "ceilings": {"read": 4.4e12, "rewritten": 3.7e12, "copied": 4.2e12, "product": 8e14},
    "rows": [
        {"op": op, "impl": impl, "case": case, "us": us, "bound": bound, "share": share}
        | {"gb_per_s": 4000.0, "tflop_per_s": 0.5}
        for op, impl, case, us, bound, share in (
            ("paged_prefill", "triton", "t8192", 2000.0, "flops", 0.4),
            ("paged_prefill", "mosaic", "t8192", 1000.0, "flops", 0.8),
            ("publish", "triton", "b1", 3.0, "bytes", 0.125),
        )
    ]
    + [{"op": "publish", "impl": "xla", "case": "b1", "skipped": "it has no host"}],
}
KERNEL_TABLE = """\
NVIDIA H200, commit abc: ceilings 4,400 GB/s, 800 TFLOP/s

| kernel, case | by | us | GB/s | TFLOP/s | of its ceiling | others, us |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| `paged_prefill` t8192 | mosaic | 1,000 | 4,000 | 0.500 | 80% of flops | triton 2,000 |
| `publish` b1 | triton | 3.00 | 4,000 | 0.500 | 12% of bytes | - |
"""
RECORDED = Path("bench/results/peers/vllm_h200.json")


def test_step_tables() -> None:
    assert "\n".join(render.step_tables(STEP, PEER)) == STEP_TABLES


def test_serve_table() -> None:
    assert "\n".join(render.serve_tables(SERVE, PEER)) == SERVE_TABLE


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"step": STEP, "serve": SERVE, "kernels": KERNELS, "peer": PEER}
    paths = {name: tmp_path / f"{name}.json" for name in names}
    for name, report in names.items():
        paths[name].write_text(json.dumps(report))
    plot = tmp_path / "tpot.svg"
    results = [str(paths[name]) for name in ("step", "serve", "kernels")]
    render.main([*results, f"--peer={paths['peer']}", f"--plot={plot}"])
    assert capsys.readouterr().out == f"{STEP_TABLES}\n{SERVE_TABLE}\n{KERNEL_TABLE}\n"
    texts = [element.text for element in ElementTree.parse(plot).iter() if element.text]
    assert {"vLLM 0.26.0", "jaxinfer", "floor", "16"} <= set(texts)
    with pytest.raises(SystemExit, match="is no result of"):
        render.main([str(paths["peer"]), f"--peer={paths['peer']}"])


def test_the_recorded_peer_has_every_case_that_is_compared() -> None:
    peer = json.loads(RECORDED.read_text())
    known = {(row["metric"], row["case"]) for row in peer["rows"]}
    assert set(render.MUST) - known == {("start_s", "bundle")}
    for row in peer["serve"]["rows"]:
        assert row.keys() >= {name for names in render.SERVE.values() for name in names}


def test_a_plot_keeps_its_points_inside() -> None:
    plot = ElementTree.fromstring(lines_plot("t", {"a<b": {1: 0.5, 256: 16.6}, "c": {8: 3.0}}))
    lines = [element.get("points", "") for element in plot.iter() if "polyline" in element.tag]
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]
    assert [len(line) for line in points] == [2, 1]
    (left, low), (right, high) = points[0]
    assert (left, right) == (50, 520), "the first and the last x"
    assert 40 <= high < points[1][0][1] < low <= 320, "upwards is less, and zero is at 320"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0567, "0.0567"), (5.0, "5.00"), (99.96, "100"), (12345.6, "12,346")],
    ids=str,
)
def test_numbers(value: float | None, text: str) -> None:
    assert render.number(value) == text


def test_the_figure_of_the_readme_is_that_of_its_data() -> None:
    report = json.loads(Path("bench/results/peers/h100_qwen3_4b.json").read_text())
    svg = figure(report)
    assert Path("docs/peers.svg").read_text() == svg
    bars = [
        float(one.attrib["width"])
        for one in ElementTree.fromstring(svg)
        if "y" in one.attrib and one.tag.endswith("rect")
    ]
    values = [row["tpot_ms"][rows] for rows in ("1", "8", "64") for row in report["engines"]]
    assert sorted(range(9), key=bars.__getitem__) == sorted(range(9), key=values.__getitem__)
