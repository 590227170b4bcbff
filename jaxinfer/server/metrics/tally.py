"""All numbers behind ``/metrics`` and ``/stats``, in one record.

Owns: ``Tally``: the engine's last counters, the server's own counters, and the histograms with
their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jaxinfer.core.config import Limits
from jaxinfer.core.request import FinishReason
from jaxinfer.engine.news import EngineStats, StepKind
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
    Histogram,
    HistogramFamily,
    token_count_bounds,
)

MODEL_LABELS = ("model_name", "engine")


class Rejection(StrEnum):
    """The queue limit for which a request was refused with 429."""

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"


def _zeros(names: Iterable[str]) -> dict[str, int]:
    return field(default_factory=lambda: dict.fromkeys(map(str, names), 0))


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
    scheduled_tokens: dict[str, int] = _zeros(StepKind)
    bucket_tokens: dict[str, int] = _zeros(StepKind)
    finished: dict[str, int] = _zeros(FinishReason)  # sequences
    rejected: dict[str, int] = _zeros(Rejection)
    responses: Counter[tuple[str, str, str]] = field(  # handler, method, status class
        default_factory=Counter[tuple[str, str, str]]
    )

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding."""
        computed = sum(self.bucket_tokens.values())
        return 1.0 - sum(self.scheduled_tokens.values()) / computed if computed else 0.0

    @property
    def pages(self) -> dict[str, int]:
        """KV pages by their state."""
        stats = self.engine
        counts = (stats.num_live_pages, stats.num_cached_pages, stats.num_fresh_pages)
        return dict(zip(("live", "cached", "fresh"), counts, strict=True))

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
        num_pages = sum(self.pages.values())
        return self.engine.num_live_pages / num_pages if num_pages else 0.0

    @property
    def executables(self) -> dict[str, int]:
        """Executables at start, by their source."""
        num_compiled = self.engine.num_compiled
        return {"compiled": num_compiled, "bundle": self.engine.num_executables - num_compiled}

    @property
    def startup_seconds(self) -> dict[str, float]:
        """Time of the phases of the start."""
        return {"load": self.engine.load_seconds, "compile": self.engine.compile_seconds}


class Histograms:
    """All exported histograms; all but the HTTP ones carry ``MODEL_LABELS``."""

    def __init__(self, model: tuple[str, str], limits: Limits) -> None:
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
        self.step_tokens = of_model(
            "iteration_tokens_total", "Tokens scheduled in each step.", STEP_TOKENS_BOUNDS
        )
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
        self.step_seconds = {kind: steps.child(*model, kind.value) for kind in StepKind}
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
