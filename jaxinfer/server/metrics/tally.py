"""All numbers behind ``/metrics`` and ``/stats``, in one record.

Owns: ``Tally``: the engine's last counters, the server's own counters, and the histograms with
their names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from jaxinfer.core.config import Limits
from jaxinfer.engine.news import EngineStats
from jaxinfer.server.metrics.values import (
    HTTP_BOUNDS,
    HTTP_FINE_BOUNDS,
    N_BOUNDS,
    PREEMPTIONS_BOUNDS,
    REQUEST_SECONDS_BOUNDS,
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    TOKEN_GAP_BOUNDS,
    TTFT_BOUNDS,
    HistogramFamily,
    token_count_bounds,
)

MODEL_LABELS = ("model_name", "engine")


class Rejection(StrEnum):
    """The queue limit for which a request was refused with 429."""

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"


@dataclass(slots=True)
class Tally:
    """Counters of steps, requests and responses.

    ``engine``: the engine's counters after its last iteration.
    """

    engine: EngineStats
    limits: Limits
    num_received: int = 0
    num_closed: int = 0  # of the received requests, those that ended in any way
    num_decode_steps: int = 0
    scheduled_tokens: Counter[str] = field(default_factory=Counter[str])  # by step kind
    bucket_tokens: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])  # sequences, by finish reason
    rejected: Counter[str] = field(default_factory=Counter[str])
    responses: Counter[tuple[str, str, str]] = field(  # handler, method, status class
        default_factory=Counter[tuple[str, str, str]]
    )

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding."""
        computed = self.bucket_tokens.total()
        return 1.0 - self.scheduled_tokens.total() / computed if computed else 0.0

    @property
    def live_pages_of_windows(self) -> dict[str, int]:
        """Pages that sequences own, by the window of the layers that fill them; groups of one
        window are added up.
        """
        windows = ["none" if window is None else str(window) for window in self.limits.windows]
        pages = dict.fromkeys(windows, 0)
        # an engine that has not reported yet has no counts
        for window, count in zip(windows, self.engine.num_live_pages_of_groups, strict=False):
            pages[window] += count
        return pages

    @property
    def kv_usage(self) -> float:
        """Share of the pages that sequences own."""
        stats = self.engine
        num_pages = stats.num_live_pages + stats.num_cached_pages + stats.num_fresh_pages
        return stats.num_live_pages / num_pages if num_pages else 0.0


class Histograms:
    """All exported histograms; all but the HTTP ones carry ``MODEL_LABELS``."""

    def __init__(self, limits: Limits) -> None:
        tokens = token_count_bounds(limits.max_model_len)
        seconds = REQUEST_SECONDS_BOUNDS
        self.first_token = _family(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", TTFT_BOUNDS
        )
        self.token_gap = _family(
            "inter_token_latency_seconds", "Time between two tokens.", TOKEN_GAP_BOUNDS
        )
        self.time_per_token = _family(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of each sequence.",
            TOKEN_GAP_BOUNDS,
        )
        self.whole = _family(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", seconds
        )
        self.queue = _family(
            "request_queue_time_seconds", "Arrival of a sequence to its first step.", seconds
        )
        self.inference = _family(
            "request_inference_time_seconds", "First step to the last token.", seconds
        )
        self.prefill = _family(
            "request_prefill_time_seconds", "First step to the first token.", seconds
        )
        self.decode = _family(
            "request_decode_time_seconds", "First token to the last token.", seconds
        )
        self.prompt_tokens = _family("request_prompt_tokens", "Tokens of each prompt.", tokens)
        self.generated_tokens = _family(
            "request_generation_tokens", "Tokens that each sequence generated.", tokens
        )
        self.longest_generated = _family(
            "request_max_num_generation_tokens",
            "Tokens of the longest of a request's sequences.",
            tokens,
        )
        self.n = _family("request_params_n", "The n of each request.", N_BOUNDS)
        self.max_tokens = _family(
            "request_params_max_tokens", "The max_tokens of each request that gave it.", tokens
        )
        self.step_tokens = _family(
            "iteration_tokens_total", "Tokens scheduled in each step.", STEP_TOKENS_BOUNDS
        )
        self.preemptions = _family(
            "request_num_preemptions", "Preemptions of each sequence.", PREEMPTIONS_BOUNDS
        )
        self.computed_prompt = _family(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that each sequence did not find in the prefix cache.",
            tokens,
        )
        self.step_seconds = HistogramFamily(
            "jaxinfer:step_seconds",
            "Time that each step added, by its kind.",
            STEP_SECONDS_BOUNDS,
            (*MODEL_LABELS, "kind"),
        )
        self.http = HistogramFamily(
            "http_request_duration_seconds",
            "Time to the end of each response, by handler.",
            HTTP_BOUNDS,
            ("handler", "method"),
        )
        self.http_fine = HistogramFamily(
            "http_request_duration_highr_seconds",
            "Time to the end of each response.",
            HTTP_FINE_BOUNDS,
        )

    def families(self) -> tuple[HistogramFamily, ...]:
        """All of them, in the order in which they were made."""
        return tuple(vars(self).values())


def _family(name: str, documentation: str, bounds: tuple[float, ...]) -> HistogramFamily:
    return HistogramFamily(f"vllm:{name}", documentation, bounds, MODEL_LABELS)
