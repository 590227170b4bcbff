"""Exports the counters as Prometheus's families, under vLLM's series names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jaxinfer.core.tiers import TierStats
from jaxinfer.server.metrics.histograms import MODEL_LABELS, HistogramFamily
from jaxinfer.server.metrics.tally import EngineTally, Tally

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level


class _Reading(NamedTuple):
    """The current value of one gauge or counter; with a ``label``, that of each label value.

    ``of_server``: it is not of one engine, and exported with the first one.
    """

    name: str
    documentation: str
    value: float | Mapping[str, float]
    label: str | None = None
    of_server: bool = False


def _gauges(tally: Tally, engine: EngineTally) -> Iterator[_Reading]:
    stats = engine.stats
    yield _Reading("vllm:num_requests_running", "Sequences with a slot.", stats.num_running)
    yield _Reading("vllm:num_requests_waiting", "Sequences without a slot.", stats.num_waiting)
    yield _Reading(
        "vllm:num_requests_waiting_by_reason",
        "Sequences without a slot, by what they wait for.",
        {"capacity": stats.num_waiting, "deferred": 0},
        "reason",
    )
    yield _Reading(
        "vllm:kv_cache_usage_perc", "Share of the KV pages that is owned, 0 to 1.", engine.kv_usage
    )
    yield _Reading(
        "vllm:engine_sleep_state",
        "1 for the state the engine is in.",
        {state: int(stats.sleep_level == level) for level, state in enumerate(SLEEP_STATES)},
        "sleep_state",
    )
    yield _Reading(
        "jaxinfer:requests_active",
        "Requests received and not ended.",
        tally.num_received - tally.num_closed,
        of_server=True,
    )
    yield _Reading(
        "jaxinfer:pages",
        "KV pages: owned, kept for prefix reuse, or without content.",
        engine.pages,
        "state",
    )
    yield _Reading(
        "jaxinfer:live_pages",
        "KV pages that sequences own, by the window of the layers that fill them, in tokens.",
        engine.live_pages_of_windows,
        "window",
    )
    yield _Reading(
        "jaxinfer:padding_waste_ratio",
        "Share of the computed tokens that was padding, since the start.",
        engine.padding_waste,
    )
    yield _Reading(
        "jaxinfer:executables",
        "Executables: compiled for this server, read from the cache or a bundle, or not there yet.",
        engine.executables,
        "source",
    )
    yield _Reading(
        "jaxinfer:startup_seconds",
        "Time the start took: weights loaded, executables compiled or read.",
        engine.startup_seconds,
        "phase",
    )
    yield from _tier_gauges(stats.tiers)


def _tier_gauges(tiers: TierStats) -> Iterator[_Reading]:
    """The present values of tiers."""
    yield _Reading(
        "jaxinfer:tier_bytes",
        "Bytes of pages and states in each tier.",
        {"host": tiers.host_bytes, "disk": tiers.disk_bytes},
        "tier",
    )
    yield _Reading(
        "jaxinfer:tier_size_bytes",
        "Bytes that each tier may have.",
        {"host": tiers.host_size, "disk": tiers.disk_size},
        "tier",
    )
    yield _Reading(
        "jaxinfer:tier_bytes_per_second",
        "Bytes of pages that are restored in a second, measured at the start.",
        tiers.bytes_per_second,
    )
    yield _Reading(
        "jaxinfer:prompt_step_seconds",
        "With tiers: the time of a prompt's step, measured at the start, and of each token.",
        {"step": tiers.step_seconds, "token": tiers.token_seconds},
        "part",
    )


def _tier_counters(tiers: TierStats) -> Iterator[_Reading]:
    """Counters of tiers."""
    yield _Reading(
        "jaxinfer:tier_units",
        "Pages and states: saved in a tier, restored, failed to load, without space.",
        {
            "saved": tiers.num_saved,
            "restored": tiers.num_restored,
            "failed": tiers.num_failed,
            "dropped": tiers.num_dropped,
        },
        "event",
    )
    yield _Reading(
        "vllm:kv_offload_total_bytes",
        "Bytes copied between the device and the tiers.",
        {"GPU_to_CPU": tiers.saved_bytes, "CPU_to_GPU": tiers.restored_bytes},
        "transfer_type",
    )
    yield _Reading(
        "vllm:kv_offload_total_time",
        "Seconds of these copies; of a restore since it was ordered.",
        {"GPU_to_CPU": tiers.save_seconds, "CPU_to_GPU": tiers.restore_seconds},
        "transfer_type",
    )


def _counters(tally: Tally, engine: EngineTally) -> Iterator[_Reading]:
    stats, cached = engine.stats, engine.stats.num_cached_tokens
    prefilled, looked_up = stats.num_prefilled_tokens, stats.num_looked_up_tokens
    yield _Reading(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        looked_up if engine.limits.enable_prefix_caching else 0,
    )
    yield _Reading("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", cached)
    restored, has_tiers = stats.num_restored_tokens, stats.tiers.host_size > 0
    yield _Reading(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in tiers, as the device had no pages of them.",
        max(0, looked_up - (cached - restored)) if has_tiers else 0,
    )
    yield _Reading(
        "vllm:external_prefix_cache_hits", "Prompt tokens restored from tiers.", restored
    )
    yield from _tier_counters(stats.tiers)
    yield _Reading("vllm:mm_cache_queries", "There are no multimodal inputs: 0.", 0)
    yield _Reading("vllm:mm_cache_hits", "There are no multimodal inputs: 0.", 0)
    yield _Reading("vllm:num_preemptions", "Sequences that lost their slot.", stats.num_preemptions)
    yield _Reading(
        "vllm:prompt_tokens",
        "Prompt tokens of sequences that got their first token, reused ones included.",
        prefilled,
    )
    yield _Reading(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        {
            "local_compute": prefilled - cached,
            "local_cache_hit": max(0, cached - restored),
            "external_kv_transfer": min(cached, restored),
        },
        "source",
    )
    yield _Reading("vllm:prompt_tokens_cached", "Prompt tokens whose KV was reused.", cached)
    yield _Reading("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens)
    yield _Reading(
        "vllm:request_success",
        "Sequences that ended, by why.",
        tally.finished,
        "finished_reason",
        of_server=True,
    )
    yield _Reading(
        "vllm:admission_rejections",
        "Requests answered 429, by the limit that was reached.",
        tally.rejected,
        "reason",
        of_server=True,
    )
    yield _Reading(
        "vllm:corrupted_requests", "Not counted, 0: such a request ends with an error.", 0
    )
    yield _Reading("vllm:spec_decode_num_drafts", "There is no speculation: 0.", 0)
    yield _Reading("vllm:spec_decode_num_draft_tokens", "There is no speculation: 0.", 0)
    yield _Reading("vllm:spec_decode_num_accepted_tokens", "There is no speculation: 0.", 0)
    yield _Reading(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "There is no speculation, so there are no positions.",
        {},
        "position",
    )
    yield _Reading(
        "jaxinfer:requests_received",
        "Requests accepted for an answer.",
        tally.num_received,
        of_server=True,
    )
    yield _Reading(
        "jaxinfer:late_compiles",
        "Executables compiled while serving; each stalls everybody, so this must stay 0.",
        stats.num_late_compiles,
    )
    yield _Reading(
        "jaxinfer:scheduled_tokens",
        "Tokens that steps were asked for.",
        engine.scheduled_tokens,
        "kind",
    )
    yield _Reading(
        "jaxinfer:bucket_tokens",
        "Tokens that steps computed, padding included.",
        engine.bucket_tokens,
        "kind",
    )
    yield _Reading(
        "jaxinfer:decode_steps", "Steps in which a sequence decoded.", engine.num_decode_steps
    )
    yield _Reading(
        "jaxinfer:kv_pressure_events",
        "Times that pages ran out and a sequence was preempted.",
        stats.num_preemptions,
    )
    keys = tally.keys.items()
    yield _Reading(
        "jaxinfer:key_requests",
        "Ended requests with a named API key.",
        {name: usage.requests for name, usage in keys},
        "key",
        of_server=True,
    )
    yield _Reading(
        "jaxinfer:key_prompt_tokens",
        "Prompt tokens of those requests.",
        {name: usage.prompt_tokens for name, usage in keys},
        "key",
        of_server=True,
    )
    yield _Reading(
        "jaxinfer:key_generation_tokens",
        "Tokens generated for those requests.",
        {name: usage.generated_tokens for name, usage in keys},
        "key",
        of_server=True,
    )


@dataclass(eq=False)
class Exporter:
    """A collector for prometheus_client that exports the current values of all families."""

    tally: Tally
    histograms: Sequence[HistogramFamily]
    models: Sequence[tuple[str, str]]  # the values of MODEL_LABELS, of each engine
    config: Mapping[str, str]  # labels of cache_config_info

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        yield from self._families(GaugeMetricFamily, _gauges)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings, as labels.", labels=(*self.config,)
        )
        info.add_metric((*self.config.values(),), 1)
        yield info
        yield from self._families(CounterMetricFamily, _counters)
        responses = CounterMetricFamily(
            "http_requests",
            "Responses by handler, method and status class.",
            labels=("handler", "method", "status"),
        )
        for labels, count in self.tally.responses.items():
            responses.add_metric(labels, count)
        yield responses
        yield from map(_histogram, self.histograms)

    def _families(
        self,
        family_type: type[GaugeMetricFamily | CounterMetricFamily],
        readings_of: Callable[[Tally, EngineTally], Iterator[_Reading]],
    ) -> Iterator[Metric]:
        """Each family, with the values of every engine."""
        tally = self.tally
        each = (readings_of(tally, engine) for engine in tally.engines)
        for readings in zip(*each, strict=True):
            name, documentation, _, label, of_server = readings[0]
            label_names = MODEL_LABELS if label is None else (*MODEL_LABELS, label)
            family = family_type(name, documentation, labels=label_names)
            count = 1 if of_server else len(readings)
            for model, reading in zip(self.models[:count], readings[:count], strict=True):
                if isinstance(reading.value, Mapping):
                    for value, part in reading.value.items():
                        family.add_metric((*model, value), part)
                else:
                    family.add_metric(model, reading.value)
            yield family


def _histogram(family: HistogramFamily) -> HistogramMetricFamily:
    exported = HistogramMetricFamily(family.name, family.documentation, labels=family.label_names)
    bounds = (*map(floatToGoString, family.bounds), "+Inf")
    for label_values, histogram in family.children.items():
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        exported.add_metric(label_values, buckets, histogram.total)
    return exported
