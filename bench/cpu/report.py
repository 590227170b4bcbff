"""The CPU benchmark's samples as JSON rows, and those rows as two tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.throughput import Measured, agreement
from jaxinfer.bench.numbers import paired_ratio, spread

OURS = "jaxinfer"

type Row = dict[str, Any]  # metric, case, peer, unit, value; samples, best, spread of measured ones


def throughput_rows(results: Mapping[tuple[str, int], Measured]) -> list[Row]:
    """Speeds of every engine, and of ours compared with each peer."""
    rows: list[Row] = []
    for (name, batch), measured in results.items():
        about = {"case": f"batch {batch}", "peer": name, "load_average": measured.load}
        speeds, tpot = measured.tokens_per_second(), measured.ms_per_token()
        first = [1e3 * seconds for seconds in measured.first]
        rows += [
            _measured("output_tokens_per_s", speeds, "tokens/s", about),
            _measured("tpot", tpot, "ms", about),
            _measured("one_token", first, "ms", about),
        ]
        if name != OURS:
            ours = results[OURS, batch]
            speed = paired_ratio(ours.tokens_per_second(), speeds)
            decode = paired_ratio(tpot, ours.ms_per_token())
            same = agreement(ours, measured)
            rows += [
                _derived("speed_of_ours_to_peer", speed, "ratio", about),
                _derived("decode_speed_of_ours_to_peer", decode, "ratio", about),
                _derived("sequences_with_equal_tokens", same, "sequences", about),
            ]
    return rows


def overhead_rows(
    samples: Mapping[tuple[str, int], list[float]], splits: Mapping[int, Mapping[str, float]]
) -> list[Row]:
    """Steps of the engine and of the bare loop, and the engine's host time by part."""
    rows = [
        _measured("ms_per_step", ms, "ms", {"case": f"batch {batch}", "peer": name})
        for (name, batch), ms in samples.items()
    ]
    for batch, split in splits.items():
        about = {"case": f"batch {batch}", "peer": OURS}
        share = paired_ratio(samples["engine", batch], samples["bare", batch]) - 1
        rows.append(_derived("engine_overhead", share, "share of the bare step", about))
        rows += [_derived(f"host_{part}", ms, "ms", about) for part, ms in split.items()]
    return rows


def throughput_table(
    rows: Iterable[Row],
    names: Sequence[str],
    batches: Sequence[int],
    unavailable: Mapping[str, str],
) -> list[str]:
    """Lines of text, ours first, then the peers; one line for a peer that could not run."""
    values = _by_key(rows)
    heads = ("batch", "tokens/s", "best", "spread", "TPOT ms", "1 token ms")
    heads = (*heads, "ours/it", "decode", "equal")
    lines = [_line("", heads)]
    for name in (OURS, *names):
        if name in unavailable:
            lines.append(f"{name:14}{unavailable[name]}")
            continue
        for batch in batches:
            at = {metric: r for (metric, c, p), r in values.items() if (c, p) == (batch, name)}
            speed = at["output_tokens_per_s"]
            cells = [
                str(batch),
                f"{speed['value']:.1f}",
                f"{speed['best']:.1f}",
                f"{speed['spread']:.1%}",
                f"{at['tpot']['value']:.2f}",
                f"{at['one_token']['value']:.1f}",
            ]
            if name != OURS:
                cells += [
                    f"{at['speed_of_ours_to_peer']['value']:.2f}",
                    f"{at['decode_speed_of_ours_to_peer']['value']:.2f}",
                    f"{at['sequences_with_equal_tokens']['value']}/{batch}",
                ]
            lines.append(_line(name, cells))
    return lines


def overhead_table(rows: Iterable[Row], batches: Sequence[int]) -> list[str]:
    """Lines of text: milliseconds per step, bare and with the engine, and the host's parts."""
    values = _by_key(rows)
    parts = [m for m, batch, _ in values if batch == batches[0] and m.startswith("host_")]
    names = [part.removeprefix("host_") for part in parts]
    lines = [_line("ms per step", ("batch", "bare", "engine", "over", *names))]
    for batch in batches:
        bare, engine = (values["ms_per_step", batch, n]["value"] for n in ("bare", "engine"))
        over = values["engine_overhead", batch, OURS]["value"]
        split = (f"{values[part, batch, OURS]['value']:.3f}" for part in parts)
        lines.append(_line("", (str(batch), f"{bare:.2f}", f"{engine:.2f}", f"{over:.1%}", *split)))
    return lines


def _measured(metric: str, samples: Sequence[float], unit: str, about: Mapping[str, Any]) -> Row:
    """A row with one sample per repeat; ``best`` is the sample that other jobs disturbed least."""
    best = max(samples) if unit.endswith("/s") else min(samples)
    return {
        "metric": metric,
        **about,
        "unit": unit,
        "value": round(median(samples), 4),
        "best": round(best, 4),
        "spread": round(spread(samples), 4),
        "samples": [round(sample, 4) for sample in samples],
    }


def _derived(metric: str, value: float, unit: str, about: Mapping[str, Any]) -> Row:
    return {"metric": metric, **about, "unit": unit, "value": round(value, 4)}


def _by_key(rows: Iterable[Row]) -> dict[tuple[str, int, str], Row]:
    """Rows by metric, batch and peer."""
    return {(r["metric"], int(r["case"].split()[1]), r["peer"]): r for r in rows}


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:14}" + "".join(f"{cell:>11}" for cell in cells)
