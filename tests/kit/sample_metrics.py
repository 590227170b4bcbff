"""Metrics of a server with activity of every kind, and their export.

Owns: the events, ``busy_metrics``, and reading series.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason
from jaxinfer.core.step import PageGroup
from jaxinfer.engine.requests.news import EngineStats, News, StepKind, StepRecord
from jaxinfer.engine.requests.outputs import SequenceTimes
from jaxinfer.server.metrics.registry import Metrics, SequenceProgress
from jaxinfer.server.metrics.tally import Rejection

LIMITS = Limits(
    num_pages=(101,),
    page_size=16,
    max_num_seqs=8,
    max_model_len=4096,
    max_num_batched_tokens=512,
    buckets=(),
    groups=(PageGroup(), *[PageGroup(512)] * 2),
)
MODEL = {"model_name": "smol", "engine": "0"}
STATS = EngineStats(
    num_requests=3,
    num_prefilled_tokens=100,
    num_looked_up_tokens=90,
    num_cached_tokens=32,
    num_generated_tokens=40,
    num_preemptions=2,
    num_late_compiles=1,
    num_compiled=4,
    num_executables=10,
    load_seconds=1.5,
    compile_seconds=0.5,
    num_running=2,
    num_waiting=5,
    num_live_pages=25,
    num_live_pages_of_groups=(12, 7, 6),
    num_cached_pages=15,
    num_fresh_pages=60,
)
STEPS = (
    StepRecord(StepKind.PREFILL, num_tokens=48, num_bucket_tokens=64, seconds=0.02),
    StepRecord(StepKind.DECODE, num_tokens=3, num_bucket_tokens=4, seconds=0.004),
    StepRecord(StepKind.MIXED, num_tokens=30, num_bucket_tokens=32, seconds=0.01),
)
TIMES = SequenceTimes(
    arrived=10.0, started=10.5, first_token=11.5, finished=15.5, num_preemptions=1
)
FINISHED = (
    SequenceProgress(
        num_tokens=11, num_cached_tokens=32, finish_reason=FinishReason.STOP, times=TIMES
    ),
    SequenceProgress(finish_reason=FinishReason.ABORT),
)


def make_metrics(**options: Any) -> Metrics:
    """Metrics of a server that has just started."""
    return Metrics("smol", LIMITS, EngineConfig(), **options)


def busy_metrics() -> Metrics:
    """Metrics after every kind of event."""
    metrics = make_metrics()
    metrics.request_received()
    metrics.observe(News((), (), STEPS, STATS))
    metrics.first_tokens(1.5)
    metrics.inter_token(0.012, 3)
    metrics.request_finished(50, 64, 5.75, FINISHED)
    metrics.key_used("team", 50, 11)
    metrics.request_rejected(Rejection.TOKENS)
    metrics.http_response("/v1/completions", "POST", 200, 0.3)
    metrics.http_response(None, "BREW", 404, 0.001)
    return metrics


def families_of(metrics: Metrics) -> dict[str, Metric]:
    """Each exported family, by its name."""
    _, body = metrics.render()
    return {family.name: family for family in parse_text(body.decode())}


def samples_of(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample's value, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families_of(metrics).values()
        for sample in family.samples
    }
