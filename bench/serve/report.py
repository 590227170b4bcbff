"""Figures of a served run, defined as vLLM's `bench serve` defines them, and their table.

TTFT: from sending a request to its first chunk. E2EL: to its last chunk. TPOT: (E2EL - TTFT) /
(output tokens - 1), of requests with more than one. ITL: each gap between two chunks of a request.
Throughput counts the requests that succeeded, over the time from the first request sent to the last
one answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.serve.client import Answer

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Every sample of each metric, in seconds, over the answers that succeeded."""
    return {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [tpot(answer) for answer in answers if answer.output_tokens > 1],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "e2el": [answer.latency for answer in answers],
    }


def tpot(answer: Answer) -> float:
    """Seconds per output token after the first; 0 for an answer of one token."""
    return (answer.latency - answer.ttft) / max(1, answer.output_tokens - 1)


def summarize(
    answers: Sequence[Answer],
    seconds: float,
    *,
    percentiles: Sequence[float] = (99,),
    metrics: Sequence[str] = tuple(TITLES),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The result's fields under vLLM's names; times in ms, ``goodput`` limits in ms."""
    done = [answer for answer in answers if not answer.error]
    num_output = sum(answer.output_tokens for answer in done)
    num_input = sum(answer.prompt_tokens for answer in done)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": peak_concurrency(done),
    }
    if goodput:
        good = sum(_is_good(answer, goodput) for answer in done)
        result["request_goodput"] = good / seconds
    for name, values in samples(done).items():
        if name not in metrics:
            continue
        ms = 1e3 * np.asarray(values or [0.0])
        result[f"mean_{name}_ms"] = float(ms.mean())
        result[f"median_{name}_ms"] = float(np.median(ms))
        result[f"std_{name}_ms"] = float(ms.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(ms, percentile))
    return result


def _is_good(answer: Answer, limits_ms: Mapping[str, float]) -> bool:
    figures = {"ttft": answer.ttft, "tpot": tpot(answer), "e2el": answer.latency}
    return all(1e3 * figures[name] <= limit for name, limit in limits_ms.items())


def peak_concurrency(answers: Sequence[Answer]) -> int:
    """The most requests that were open at once."""
    starts = [(answer.start, 1) for answer in answers]
    ends = [(answer.times[-1], -1) for answer in answers]
    return int(np.cumsum([0, *(change for _, change in sorted(starts + ends))]).max())


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Every request's own record, as lists in the order of the requests."""
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "start_times": [answer.start for answer in answers],
        "ttfts": [answer.ttft if answer.times else 0.0 for answer in answers],
        "itls": [answer.gaps for answer in answers],
        "generated_texts": ["".join(answer.text) for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def table(result: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """The result as a text table."""
    lines = [f"{' Serving Benchmark Result ':=^60}"]
    counts = {
        "Successful requests": "completed",
        "Failed requests": "failed",
        "Benchmark duration (s)": "duration",
        "Total input tokens": "total_input_tokens",
        "Total generated tokens": "total_output_tokens",
        "Request throughput (req/s)": "request_throughput",
        "Request goodput (req/s)": "request_goodput",
        "Output token throughput (tok/s)": "output_throughput",
        "Total token throughput (tok/s)": "total_token_throughput",
        "Peak concurrent requests": "max_concurrent_requests",
        "Client CPU per chunk (us)": "client_cpu_us_per_chunk",
    }
    lines += [_line(label, result[key]) for label, key in counts.items() if key in result]
    for name, title in TITLES.items():
        if f"mean_{name}_ms" not in result:
            continue
        lines.append(f"{f' {title} ':-^60}")
        for statistic in ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles)):
            label = f"{statistic.capitalize()} {name.upper()} (ms)"
            lines.append(_line(label, result[f"{statistic}_{name}_ms"]))
    return "\n".join([*lines, "=" * 60])


def _line(label: str, value: float) -> str:
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {number:>19}"
