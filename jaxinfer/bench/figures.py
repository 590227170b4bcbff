"""The figures of a run, computed from its records alone, and their table.

The definitions are those of vLLM's ``bench serve``; ``DEFINITIONS`` has them in words, for reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxinfer.bench.numbers import deviation, mean, percentile
from jaxinfer.bench.records import Record

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "Time to First Token",
        "tpot": "Time per Output Token (excl. 1st token)",
        "itl": "Inter-token Latency",
        "e2el": "End-to-end Latency",
    }
)
# vLLM's names of two more, which are reported if --percentile-metrics has them
QUEUE_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "client_queue_time": "Client Queue Time",
        "e2el_including_client_queue": "End-to-end Latency incl. Client Queue",
    }
)
METRICS: Mapping[str, str] = MappingProxyType({**TITLES, **QUEUE_TITLES})
DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "from sending a request to its first chunk, but one that only names a chat's role",
        "tpot": "(e2el - ttft) / (output tokens - 1), of requests with more than one token",
        "itl": (
            "each gap between two chunks of a request that hold tokens; a chunk may hold several "
            "tokens"
        ),
        "e2el": "from sending a request to its last chunk",
        "client_queue_time": (
            "from the time at which a request was due to sending it, under --max-concurrency"
        ),
        "e2el_including_client_queue": "the sum of e2el and client_queue_time",
        "throughput": (
            "of the requests that succeeded, over the time from the first request sent to the last "
            "response read"
        ),
    }
)
COUNTS: Mapping[str, str] = MappingProxyType(  # labels of the table
    {
        "Successful requests": "completed",
        "Failed requests": "failed",
        "Benchmark duration (s)": "duration",
        "Total input tokens": "total_input_tokens",
        "Total generated tokens": "total_output_tokens",
        "Requests without counts": "uncounted",
        "Input tokens found in a cache": "cached_input_tokens",
        "Input tokens, client's count": "client_input_tokens",
        "Generated tokens, client's count": "client_output_tokens",
        "Output tokens per chunk": "tokens_per_chunk",
        "Request throughput (req/s)": "request_throughput",
        "Request goodput (req/s)": "request_goodput",
        "Output token throughput (tok/s)": "output_throughput",
        "Total token throughput (tok/s)": "total_token_throughput",
        "Peak concurrent requests": "max_concurrent_requests",
    }
)
NS_PER_MS = 1e6
NS_PER_S = 1e9


def samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """Every sample of each metric, in ms, over records of requests that succeeded."""
    return {
        "ttft": [record.gaps_ns[0] / NS_PER_MS for record in records],
        "tpot": [tpot_ms(record) for record in records if record.output_tokens > 1],
        "itl": [gap / NS_PER_MS for record in records for gap in record.gaps_ns[1:]],
        "e2el": [record.latency_ns / NS_PER_MS for record in records],
        "client_queue_time": [record.queued_ns / NS_PER_MS for record in records],
        "e2el_including_client_queue": [
            (record.latency_ns + record.queued_ns) / NS_PER_MS for record in records
        ],
    }


def tpot_ms(record: Record) -> float:
    """Milliseconds per output token after the first; 0 for an answer of one token."""
    after_first = record.latency_ns - record.gaps_ns[0]
    return after_first / max(1, record.output_tokens - 1) / NS_PER_MS


def summarize(
    records: Sequence[Record],
    *,
    percentiles: Sequence[float] = (99,),
    metrics: Sequence[str] = tuple(TITLES),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The result's fields under vLLM's names; times in ms, ``goodput`` limits in ms.

    Records without requests have medians of their values. A metric without a sample has no
    figures, or a limit on it would hold: TPOT if no answer has two tokens, all if none succeeded.
    """
    if records and records[0].values:
        return _medians(records)
    done = [record for record in records if is_answered(record)]
    seconds = duration(records)
    result: dict[str, float] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        **_token_counts(done),
        "request_throughput": _rate(len(done), seconds),
        "max_concurrent_requests": peak_concurrency(done),
    }
    if "total_output_tokens" in result:
        num_input, num_output = result["total_input_tokens"], result["total_output_tokens"]
        result["output_throughput"] = _rate(num_output, seconds)
        result["total_token_throughput"] = _rate(num_input + num_output, seconds)
        if any(len(record.gaps_ns) > 1 for record in done):  # others are not streamed
            result["tokens_per_chunk"] = num_output / sum(len(record.gaps_ns) for record in done)
    if goodput:
        result["request_goodput"] = _rate(sum(_is_good(one, goodput) for one in done), seconds)
    for name, values in samples(done).items():
        if name not in metrics or not values:
            continue
        result[f"mean_{name}_ms"] = mean(values)
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = deviation(values)
        for percent in percentiles:
            result[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
    if any(record.turn for record in done):
        first = samples([record for record in done if not record.turn])["ttft"]
        later = samples([record for record in done if record.turn])["ttft"]
        if first:
            result["median_ttft_first_turn_ms"] = percentile(first, 50)
        result["median_ttft_later_turns_ms"] = percentile(later, 50)
    return result


def _token_counts(done: Sequence[Record]) -> dict[str, float]:
    """Tokens as the server counts, and the client where it can.

    If one request has no counts, sums over the others would be too low, and there are none.
    """
    found: dict[str, float] = {}
    if uncounted := sum(not record.is_counted for record in done):
        found["uncounted"] = uncounted
    else:
        found["total_input_tokens"] = sum(record.prompt_tokens for record in done)
        found["total_output_tokens"] = sum(record.output_tokens for record in done)
    columns = {
        "cached_input_tokens": [record.cached_tokens for record in done],
        "client_input_tokens": [record.sent_tokens for record in done],
        "client_output_tokens": [record.listed_tokens for record in done],
    }
    for name, column in columns.items():
        known = [value for value in column if value is not None]
        if known and len(known) == len(done):
            found[name] = sum(known)
    return found


def is_answered(record: Record) -> bool:
    """True for a request that succeeded; one without any chunk has no times, and failed."""
    return not record.error and bool(record.gaps_ns)


def _medians(records: Sequence[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record.values)
    columns = {
        name: [record.values[name] for record in records if name in record.values] for name in names
    }
    return {name: percentile(values, 50) for name, values in columns.items()}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def duration(records: Sequence[Record]) -> float:
    """Seconds from the first request sent to the last response read; 0 of no records."""
    if not records:
        return 0.0
    end = max(record.start_ns + record.end_ns for record in records)
    return (end - min(record.start_ns for record in records)) / NS_PER_S


def _is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    figures = {
        "ttft": record.gaps_ns[0] / NS_PER_MS,
        "tpot": tpot_ms(record),
        "e2el": record.latency_ns / NS_PER_MS,
    }
    return all(figures[name] <= limit for name, limit in limits_ms.items())


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests that were open at once."""
    starts = [(record.start_ns, 1) for record in records]
    ends = [(record.start_ns + record.latency_ns, -1) for record in records]
    most = count = 0
    for _, change in sorted(starts + ends):
        count += change
        most = max(most, count)
    return most


def details(records: Sequence[Record]) -> dict[str, Any]:
    """Every request's own record under vLLM's names, as lists in the order of the requests; s."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start_ns / NS_PER_S for record in records],
        "ttfts": [sum(record.gaps_ns[:1]) / NS_PER_S for record in records],
        "itls": [[gap / NS_PER_S for gap in record.gaps_ns[1:]] for record in records],
        "generated_texts": [record.text or "" for record in records],
        "errors": [record.error for record in records],
    }


def table(result: Mapping[str, float], percentiles: Sequence[float]) -> str:
    """The result as a text table."""
    lines = [f"{' Benchmark Result ':=^60}"]
    lines += [_line(label, result[key]) for label, key in COUNTS.items() if key in result]
    for name, title in METRICS.items():
        if f"mean_{name}_ms" not in result:
            continue
        lines.append(f"{f' {title} ':-^60}")
        for statistic in ("mean", "median", *(f"p{percent:g}" for percent in percentiles)):
            label = f"{statistic.capitalize()} {name.upper().replace('_', ' ')} (ms)"
            lines.append(_line(label, result[f"{statistic}_{name}_ms"]))
    return "\n".join([*lines, "=" * 60])


def _line(label: str, value: float) -> str:
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {number:>19}"
