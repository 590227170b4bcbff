"""``Metrics``: the server's counts, shown by ``/metrics`` for Prometheus and ``/stats`` for people.

All methods are called in the event loop and are cheap: a step costs microseconds, however many
sequences it has, because the engine counts for itself. Nothing is global: two servers in one
process count separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.news import EngineStats, News, StepKind
from jaxinfer.engine.requests.outputs import SequenceTimes
from jaxinfer.server.metrics.export import Exporter
from jaxinfer.server.metrics.histograms import Histogram, Histograms, summed
from jaxinfer.server.metrics.tally import EngineTally, KeyUsage, Rates, Rejection, Tally

_METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"))
_FIRST = "0"  # vLLM numbers the engines behind a server; what is not of one of them is of the first
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(slots=True)
class SequenceProgress:
    """The state of one of a request's n sequences.

    ``times`` is None until it ends, and if it ended before its first token.
    """

    last_token: float | None = None  # when it arrived, in seconds of ``time.monotonic``
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    times: SequenceTimes | None = None


class Metrics:
    """Counts of one server. ``start``: the engine's counters when it was built; of several engines,
    those of each.
    """

    def __init__(
        self,
        model_name: str,
        limits: Limits,
        config: EngineConfig | None = None,
        *,
        start: EngineStats | Sequence[EngineStats] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        starts = (start,) if isinstance(start, EngineStats) else start or (EngineStats(),)
        self._tally = Tally([EngineTally(stats, limits) for stats in starts])
        self._rates = Rates()
        self._rates.mark(clock(), self._counters())
        models = [(model_name, str(rank)) for rank in range(len(starts))]
        self._histograms = Histograms(models, limits)
        self._registry = CollectorRegistry()
        self._registry.register(
            Exporter(self._tally, self._histograms.families, models, _cache_config(limits, config))
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def observe(self, news: News) -> None:
        """Add the counters of one iteration of the engine's loop."""
        engine = self._tally.engines[news.rank]
        engine.stats = news.stats
        for step in news.steps:
            kind = step.kind
            engine.scheduled_tokens[kind] += step.num_tokens
            engine.bucket_tokens[kind] += step.num_bucket_tokens
            engine.num_decode_steps += kind is not StepKind.PREFILL
            self._histograms.step_tokens[news.rank].observe(step.num_tokens)
            self._histograms.step_seconds[news.rank][kind].observe(step.seconds)
        self._rates.mark(self._clock(), self._counters())

    def request_received(self) -> None:
        """A request was accepted; ``request_finished`` follows in every case."""
        self._tally.num_received += 1

    def request_rejected(self, reason: Rejection) -> None:
        """A request was refused with 429."""
        self._tally.rejected[reason] += 1

    def first_tokens(self, seconds: float) -> None:
        """A sequence's first token arrived, ``seconds`` after the request."""
        self._histograms.first_token.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """``count`` more tokens of a sequence arrived, ``seconds`` after the last ones."""
        self._histograms.token_gap.observe(seconds / count, count)

    def request_finished(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        seconds: float,
        sequences: Sequence[SequenceProgress],
    ) -> None:
        """An accepted request has ended in any way, ``seconds`` after its arrival at the server.

        ``max_tokens`` is None if the request did not set it.
        """
        histograms = self._histograms
        self._tally.num_closed += 1
        histograms.whole.observe(seconds)
        histograms.n.observe(len(sequences))
        if max_tokens is not None:
            histograms.max_tokens.observe(max_tokens)
        histograms.longest_generated.observe(max(one.num_tokens for one in sequences))
        for sequence in sequences:
            self._sequence_finished(sequence, num_prompt_tokens)

    def key_used(self, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """An accepted request with a named API key has ended."""
        usage = self._tally.keys.setdefault(name, KeyUsage())
        usage.requests += 1
        usage.prompt_tokens += num_prompt_tokens
        usage.generated_tokens += num_tokens

    def http_response(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """A response has ended. ``path`` is the route's template, None for an unknown route."""
        handler = path or "none"
        known_method = method if method in _METHODS else "other"  # clients must not create series
        self._tally.responses[handler, known_method, f"{status // 100}xx"] += 1
        self._histograms.http.child(handler, known_method).observe(seconds)
        self._histograms.http_fine.observe(seconds)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body of ``/metrics``; OpenMetrics if ``accept`` names it."""
        if "application/openmetrics-text" not in accept:
            return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
        # not by choose_encoder: unless UTF-8 is requested, it writes vllm:x as vllm_x in the
        # samples
        body = openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8)
        return openmetrics.CONTENT_TYPE_LATEST, body

    def snapshot(self) -> dict[str, Any]:
        """The same numbers as JSON for people. Quantiles are estimates within a bucket."""
        tally, engine, now = self._tally, self._tally.all_engines, self._clock()
        stats = engine.stats
        histograms = self._histograms
        generated, prefilled, received = self._rates.read(now, self._counters())
        return {
            "requests": {
                "received": tally.num_received,
                "active": tally.num_received - tally.num_closed,
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "preemptions": stats.num_preemptions,
                "finished": tally.finished,
                "rejected": tally.rejected,
            },
            "pages": {
                **engine.pages,
                "live_by_window": engine.live_pages_of_windows,
                "usage": engine.kv_usage,
            },
            "tokens": {
                "prompt": stats.num_prefilled_tokens,
                "cached": stats.num_cached_tokens,
                "generated": stats.num_generated_tokens,
            },
            "per_second": {
                "generated_tokens": generated,
                "prompt_tokens": prefilled,
                "requests": received,
            },
            "seconds": {
                "time_to_first_token": _summary(histograms.first_token),
                "inter_token": _summary(histograms.token_gap),
                "end_to_end": _summary(histograms.whole),
                "queue": _summary(histograms.queue),
            },
            "steps": {
                kind.value: {
                    **_summary(summed([each[kind] for each in histograms.step_seconds])),
                    "scheduled_tokens": engine.scheduled_tokens[kind],
                    "bucket_tokens": engine.bucket_tokens[kind],
                }
                for kind in StepKind
            },
            "padding_waste": engine.padding_waste,
            "late_compiles": stats.num_late_compiles,
            "executables": engine.executables,
            "startup_seconds": engine.startup_seconds,
            "replicas": len(tally.engines),
        }

    def _sequence_finished(self, sequence: SequenceProgress, num_prompt_tokens: int) -> None:
        histograms, times = self._histograms, sequence.times
        assert sequence.finish_reason is not None, "the request has ended"
        self._tally.finished[sequence.finish_reason] += 1
        histograms.prompt_tokens.observe(num_prompt_tokens)
        histograms.generated_tokens.observe(sequence.num_tokens)
        if times is None:
            return
        decode = times.finished - times.first_token
        histograms.queue.observe(times.started - times.arrived)
        histograms.prefill.observe(times.first_token - times.started)
        histograms.decode.observe(decode)
        histograms.inference.observe(times.finished - times.started)
        if sequence.num_tokens > 1:
            histograms.time_per_token.observe(decode / (sequence.num_tokens - 1))
        histograms.preemptions.observe(times.num_preemptions)
        histograms.computed_prompt.observe(num_prompt_tokens - sequence.num_cached_tokens)

    def _counters(self) -> tuple[float, ...]:
        """The counters whose rates are shown."""
        stats = self._tally.all_engines.stats
        return stats.num_generated_tokens, stats.num_prefilled_tokens, self._tally.num_received


def _summary(histogram: Histogram) -> dict[str, float | None]:
    count = histogram.count
    quantiles = {name: histogram.quantile(share) for name, share in _QUANTILES}
    return {"count": count, "mean": histogram.total / count if count else None, **quantiles}


def _cache_config(limits: Limits, config: EngineConfig | None) -> dict[str, str]:
    """Labels of ``cache_config_info``, under vLLM's names; as in vLLM, an unset value is "None"."""
    labels: dict[str, object] = {
        "engine": _FIRST,
        "block_size": limits.page_size,
        "num_gpu_blocks": sum(limits.num_pages),
        "enable_prefix_caching": limits.enable_prefix_caching,
    }
    if config is not None:
        share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        labels["gpu_memory_utilization"] = share
        labels["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
        labels["cache_dtype"] = config.kv_cache_dtype
    return {name: str(value) for name, value in labels.items()}
