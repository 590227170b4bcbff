"""Exports the counters as Prometheus's families, under vLLM's series names.

Owns: the names, types and labels of gauges and counters, and the ``Exporter`` that
prometheus_client calls at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.news import StepKind
from jaxinfer.server.metrics.tally import MODEL_LABELS, Histograms, Rejection, Tally
from jaxinfer.server.metrics.values import HistogramFamily


@dataclass(frozen=True, slots=True)
class _Reading:
    """One gauge or counter: its name and a function that reads its value.

    With a ``label``, ``read`` returns a value for each of the label's values.
    """

    name: str
    documentation: str
    read: Callable[[Tally], float | Mapping[str, float]]
    label: str | None = None


def _zero(_: Tally) -> float:
    """The value of a series whose events cannot happen here."""
    return 0.0


_GAUGES = (
    _Reading("vllm:num_requests_running", "Sequences with a slot.", lambda t: t.engine.num_running),
    _Reading(
        "vllm:num_requests_waiting", "Sequences without a slot.", lambda t: t.engine.num_waiting
    ),
    _Reading(
        "vllm:num_requests_waiting_by_reason",
        "Sequences without a slot, by what they wait for.",
        lambda t: {"capacity": t.engine.num_waiting, "deferred": 0},
        "reason",
    ),
    _Reading(
        "vllm:kv_cache_usage_perc",
        "Share of the KV pages that is owned, 0 to 1.",
        lambda t: t.kv_usage,
    ),
    _Reading(
        "vllm:engine_sleep_state",
        "1 for the state the engine is in; it is always awake.",
        lambda _: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        "sleep_state",
    ),
    _Reading(
        "jaxinfer:requests_active",
        "Requests received and not ended.",
        lambda t: t.num_received - t.num_closed,
    ),
    _Reading(
        "jaxinfer:pages",
        "KV pages: owned, kept for prefix reuse, or without content.",
        lambda t: {
            "live": t.engine.num_live_pages,
            "cached": t.engine.num_cached_pages,
            "fresh": t.engine.num_fresh_pages,
        },
        "state",
    ),
    _Reading(
        "jaxinfer:live_pages",
        "KV pages that sequences own, by the window of the layers that fill them, in tokens.",
        lambda t: t.live_pages_of_windows,
        "window",
    ),
    _Reading(
        "jaxinfer:padding_waste_ratio",
        "Share of the computed tokens that was padding, since the start.",
        lambda t: t.padding_waste,
    ),
    _Reading(
        "jaxinfer:executables",
        "Executables at start: compiled then, or read from the bundle.",
        lambda t: {
            "compiled": t.engine.num_compiled,
            "bundle": t.engine.num_executables - t.engine.num_compiled,
        },
        "source",
    ),
    _Reading(
        "jaxinfer:startup_seconds",
        "Time the start took: weights loaded, executables compiled or read.",
        lambda t: {"load": t.engine.load_seconds, "compile": t.engine.compile_seconds},
        "phase",
    ),
)
_COUNTERS = (
    _Reading(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda t: t.engine.num_prefilled_tokens if t.limits.enable_prefix_caching else 0,
    ),
    _Reading(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda t: t.engine.num_cached_tokens,
    ),
    _Reading("vllm:external_prefix_cache_queries", "There is no external cache: 0.", _zero),
    _Reading("vllm:external_prefix_cache_hits", "There is no external cache: 0.", _zero),
    _Reading("vllm:mm_cache_queries", "There are no multimodal inputs: 0.", _zero),
    _Reading("vllm:mm_cache_hits", "There are no multimodal inputs: 0.", _zero),
    _Reading(
        "vllm:num_preemptions",
        "Sequences that lost their slot.",
        lambda t: t.engine.num_preemptions,
    ),
    _Reading(
        "vllm:prompt_tokens",
        "Prompt tokens of sequences that got their first token, reused ones included.",
        lambda t: t.engine.num_prefilled_tokens,
    ),
    _Reading(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        lambda t: {
            "local_compute": t.engine.num_prefilled_tokens - t.engine.num_cached_tokens,
            "local_cache_hit": t.engine.num_cached_tokens,
            "external_kv_transfer": 0,
        },
        "source",
    ),
    _Reading(
        "vllm:prompt_tokens_cached",
        "Prompt tokens whose KV was reused.",
        lambda t: t.engine.num_cached_tokens,
    ),
    _Reading(
        "vllm:generation_tokens", "Tokens generated.", lambda t: t.engine.num_generated_tokens
    ),
    _Reading(
        "vllm:request_success",
        "Sequences that ended, by why.",
        lambda t: {reason.value: t.finished[reason] for reason in FinishReason},
        "finished_reason",
    ),
    _Reading(
        "vllm:admission_rejections",
        "Requests answered 429, by the limit that was reached.",
        lambda t: {reason.value: t.rejected[reason] for reason in Rejection},
        "reason",
    ),
    _Reading(
        "vllm:corrupted_requests", "Not counted, 0: such a request ends with an error.", _zero
    ),
    _Reading("vllm:spec_decode_num_drafts", "There is no speculation: 0.", _zero),
    _Reading("vllm:spec_decode_num_draft_tokens", "There is no speculation: 0.", _zero),
    _Reading("vllm:spec_decode_num_accepted_tokens", "There is no speculation: 0.", _zero),
    _Reading(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "There is no speculation, so there are no positions.",
        lambda _: {},
        "position",
    ),
    _Reading(
        "jaxinfer:requests_received", "Requests accepted for an answer.", lambda t: t.num_received
    ),
    _Reading(
        "jaxinfer:late_compiles",
        "Executables compiled while serving; each stalls everybody, so this must stay 0.",
        lambda t: t.engine.num_late_compiles,
    ),
    _Reading(
        "jaxinfer:scheduled_tokens",
        "Tokens that steps were asked for.",
        lambda t: {kind.value: t.scheduled_tokens[kind] for kind in StepKind},
        "kind",
    ),
    _Reading(
        "jaxinfer:bucket_tokens",
        "Tokens that steps computed, padding included.",
        lambda t: {kind.value: t.bucket_tokens[kind] for kind in StepKind},
        "kind",
    ),
    _Reading(
        "jaxinfer:decode_steps", "Steps in which a sequence decoded.", lambda t: t.num_decode_steps
    ),
    _Reading(
        "jaxinfer:kv_pressure_events",
        "Times that pages ran out and a sequence was preempted.",
        lambda t: t.engine.num_preemptions,
    ),
)


class Exporter:
    """A collector for prometheus_client that exports the current values of all families."""

    def __init__(
        self,
        tally: Tally,
        histograms: Histograms,
        model: tuple[str, str],
        config: Mapping[str, str],
    ) -> None:
        self._tally = tally
        self._histograms = histograms
        self._model = model  # the values of MODEL_LABELS
        self._config = config  # labels of cache_config_info

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        for reading in _GAUGES:
            yield self._filled(GaugeMetricFamily, reading)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings, as labels.", labels=(*self._config,)
        )
        info.add_metric((*self._config.values(),), 1)
        yield info
        for reading in _COUNTERS:
            yield self._filled(CounterMetricFamily, reading)
        responses = CounterMetricFamily(
            "http_requests",
            "Responses by handler, method and status class.",
            labels=("handler", "method", "status"),
        )
        for labels, count in self._tally.responses.items():
            responses.add_metric(labels, count)
        yield responses
        for family in self._histograms.families():
            yield _histogram(family)

    def _filled(
        self, family_type: type[GaugeMetricFamily | CounterMetricFamily], reading: _Reading
    ) -> Metric:
        label_names = MODEL_LABELS if reading.label is None else (*MODEL_LABELS, reading.label)
        family = family_type(reading.name, reading.documentation, labels=label_names)
        value = reading.read(self._tally)
        if isinstance(value, Mapping):
            for label, part in value.items():
                family.add_metric((*self._model, label), part)
        else:
            family.add_metric(self._model, value)
        return family


def _histogram(family: HistogramFamily) -> HistogramMetricFamily:
    exported = HistogramMetricFamily(family.name, family.documentation, labels=family.label_names)
    for label_values, histogram in family:
        bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        exported.add_metric(label_values, buckets, histogram.total)
    return exported
