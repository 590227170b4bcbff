"""Histograms with a low cost per value: their names, labels and bounds.

One thread writes and reads them. prometheus_client's own histogram locks twice per value, takes
one value at a time and cannot be read back, which ``/stats`` needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jaxinfer.core.limits import Limits
from jaxinfer.engine.requests.news import StepKind

MODEL_LABELS = ("model_name", "engine")

# vLLM's bounds, so that its dashboards and alerts find every boundary that they name
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),  # finer than vLLM's, which start at 0.01
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
# those of prometheus-fastapi-instrumentator, whose series vLLM's server exports
HTTP_BOUNDS = (0.1, 0.5, 1.0)
HTTP_FINE_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    *(2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
# series of our own
STEP_SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


def token_count_bounds(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``largest``: vLLM's bounds for tokens of a request."""
    powers = (10**exponent for exponent in range(len(str(largest))))
    return tuple(
        bound for power in powers for step in (1, 2, 5) if (bound := step * power) <= largest
    )


class Histogram:
    """Counts of values by bucket; a value belongs to the first bound that is not below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is above all bounds
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` values that are all ``value``."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def quantile(self, share: float) -> float | None:
        """The value that a ``share`` of all values does not exceed; None before the first value.

        Linear within a bucket, and the last bound for values above it, as in Prometheus's
        ``histogram_quantile``.
        """
        cumulative = list(accumulate(self.counts))
        if not cumulative[-1]:
            return None
        rank = share * cumulative[-1]
        bucket = bisect_left(cumulative, rank)
        if bucket == len(self.bounds):
            return float(self.bounds[-1])
        low = self.bounds[bucket - 1] if bucket else 0.0
        below = cumulative[bucket] - self.counts[bucket]
        within = (rank - below) / self.counts[bucket] if self.counts[bucket] else 0.0
        return low + (self.bounds[bucket] - low) * within

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


def summed(histograms: Sequence[Histogram]) -> Histogram:
    """A histogram of the values of several that have the same bounds."""
    total = Histogram(histograms[0].bounds)
    total.counts = [sum(counts) for counts in zip(*(one.counts for one in histograms), strict=True)]
    total.total = sum(one.total for one in histograms)
    return total


@dataclass(frozen=True)
class HistogramFamily:
    """Histograms of one series, one for each set of label values."""

    name: str
    documentation: str
    bounds: tuple[float, ...]
    label_names: tuple[str, ...] = ()
    children: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def child(self, *label_values: str) -> Histogram:
        """The histogram of these label values; it is exported from now on."""
        return self.children.setdefault(label_values, Histogram(self.bounds))


class Histograms:
    """All exported histograms; all but the HTTP ones carry ``MODEL_LABELS``.

    Those of steps are of each engine, those of requests have the labels of the first one.
    """

    def __init__(self, models: Sequence[tuple[str, str]], limits: Limits) -> None:
        model = models[0]
        self.families: list[HistogramFamily] = []
        tokens = token_count_bounds(limits.max_model_len)
        seconds = REQUEST_SECONDS_BOUNDS

        def family(*description: Any) -> HistogramFamily:
            self.families.append(HistogramFamily(*description))
            return self.families[-1]

        def of_model(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return family(f"vllm:{name}", documentation, bounds, MODEL_LABELS).child(*model)

        self.first_token = of_model(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", TTFT_BOUNDS
        )
        self.token_gap = of_model(
            "inter_token_latency_seconds", "Time between two tokens.", TOKEN_GAP_BOUNDS
        )
        self.time_per_token = of_model(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of each sequence.",
            TOKEN_GAP_BOUNDS,
        )
        self.whole = of_model(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", seconds
        )
        self.queue = of_model(
            "request_queue_time_seconds", "Arrival of a sequence to its first step.", seconds
        )
        self.inference = of_model(
            "request_inference_time_seconds", "First step to the last token.", seconds
        )
        self.prefill = of_model(
            "request_prefill_time_seconds", "First step to the first token.", seconds
        )
        self.decode = of_model(
            "request_decode_time_seconds", "First token to the last token.", seconds
        )
        self.prompt_tokens = of_model("request_prompt_tokens", "Tokens of each prompt.", tokens)
        self.generated_tokens = of_model(
            "request_generation_tokens", "Tokens that each sequence generated.", tokens
        )
        self.longest_generated = of_model(
            "request_max_num_generation_tokens",
            "Tokens of the longest of a request's sequences.",
            tokens,
        )
        self.n = of_model("request_params_n", "The n of each request.", N_BOUNDS)
        self.max_tokens = of_model(
            "request_params_max_tokens", "The max_tokens of each request that gave it.", tokens
        )
        scheduled = family(
            "vllm:iteration_tokens_total",
            "Tokens scheduled in each step.",
            STEP_TOKENS_BOUNDS,
            MODEL_LABELS,
        )
        self.step_tokens = [scheduled.child(*each) for each in models]
        self.preemptions = of_model(
            "request_num_preemptions", "Preemptions of each sequence.", PREEMPTIONS_BOUNDS
        )
        self.computed_prompt = of_model(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that each sequence did not find in the prefix cache.",
            tokens,
        )
        steps = family(
            "jaxinfer:step_seconds",
            "Time that each step added, by its kind.",
            STEP_SECONDS_BOUNDS,
            (*MODEL_LABELS, "kind"),
        )
        self.step_seconds = [
            {kind: steps.child(*each, kind.value) for kind in StepKind} for each in models
        ]
        self.http = family(
            "http_request_duration_seconds",
            "Time to the end of each response, by handler.",
            HTTP_BOUNDS,
            ("handler", "method"),
        )
        self.http_fine = family(
            "http_request_duration_highr_seconds",
            "Time to the end of each response.",
            HTTP_FINE_BOUNDS,
        ).child()
