"""Metrics: the series, their types and labels; the numbers; the documentation of both."""

import json
import re
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxinfer.core.limits import Limits
from jaxinfer.engine.requests.news import EngineStats, News
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.server.metrics.registry import Metrics
from kit.sample_metrics import (
    MODEL,
    STATS,
    STEPS,
    busy_metrics,
    families_of,
    make_metrics,
    samples_of,
)

# vLLM 0.30's list; kv_block_* (sampled there, and by a flag) and lora_requests_info (exported there
# only with LoRA) are left out, as docs/metrics.md says
VLLM_SERIES = {
    "gauge": (
        "num_requests_running num_requests_waiting num_requests_waiting_by_reason "
        "kv_cache_usage_perc engine_sleep_state cache_config_info"
    ),
    "counter": (
        "prefix_cache_queries prefix_cache_hits external_prefix_cache_queries "
        "external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions prompt_tokens "
        "prompt_tokens_by_source prompt_tokens_cached generation_tokens request_success "
        "admission_rejections corrupted_requests spec_decode_num_drafts "
        "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
        "spec_decode_num_accepted_tokens_per_pos"
    ),
    "histogram": (
        "time_to_first_token_seconds inter_token_latency_seconds "
        "request_time_per_output_token_seconds e2e_request_latency_seconds "
        "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_prompt_tokens request_generation_tokens "
        "request_max_num_generation_tokens request_params_n request_params_max_tokens "
        "iteration_tokens_total request_num_preemptions request_prefill_kv_computed_tokens"
    ),
}
EXTRA_LABELS = {
    "num_requests_waiting_by_reason": {"reason"},
    "engine_sleep_state": {"sleep_state"},
    "prompt_tokens_by_source": {"source"},
    "request_success": {"finished_reason"},
    "admission_rejections": {"reason"},
}


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def value_of(metrics: Metrics, series: str, **labels: str) -> float:
    """A sample's value; series of the engine have the model's labels too."""
    if ":" in series:
        labels |= MODEL
    return samples_of(metrics)[series, frozenset(labels.items())]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in VLLM_SERIES.items() for name in names.split()],
)
def test_series_of_vllm(kind: str, name: str) -> None:
    family = families_of(make_metrics())[f"vllm:{name}"]
    assert family.type == kind
    if name == "spec_decode_num_accepted_tokens_per_pos":
        assert not family.samples  # without speculation there are no positions
        return
    suffixes = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_sum", "_count"}}
    assert {sample.name for sample in family.samples} == {
        f"vllm:{name}{suffix}" for suffix in suffixes[kind]
    }
    if name == "cache_config_info":  # as in vLLM, it has the engine's label and no model's
        return
    for sample in family.samples:
        assert MODEL.items() <= sample.labels.items()
        extra = set(sample.labels) - set(MODEL) - {"le"}
        assert extra == EXTRA_LABELS.get(name, set())


@pytest.mark.parametrize("name", ["kv_block_lifetime_seconds", "lora_requests_info"])
def test_left_out(name: str) -> None:
    assert f"vllm:{name}" not in families_of(busy_metrics())


def test_new_metrics_count_nothing() -> None:
    for family in families_of(make_metrics()).values():
        if family.type == "counter" and family.name.startswith(("vllm:", "jaxinfer:", "http_")):
            assert all(sample.value == 0 for sample in family.samples), family.name


@pytest.mark.parametrize(
    ("series", "labels", "value"),
    [
        ("vllm:num_requests_running", {}, 2),
        ("vllm:num_requests_waiting", {}, 5),
        ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}, 5),
        ("vllm:kv_cache_usage_perc", {}, 0.25),
        ("vllm:engine_sleep_state", {"sleep_state": "awake"}, 1),
        ("vllm:engine_sleep_state", {"sleep_state": "discard_all"}, 0),
        ("vllm:prefix_cache_queries_total", {}, 90),
        ("vllm:prefix_cache_hits_total", {}, 32),
        ("vllm:prompt_tokens_total", {}, 100),
        ("vllm:prompt_tokens_cached_total", {}, 32),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 68),
        ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 32),
        ("vllm:generation_tokens_total", {}, 40),
        ("vllm:num_preemptions_total", {}, 2),
        ("vllm:request_success_total", {"finished_reason": "stop"}, 1),
        ("vllm:request_success_total", {"finished_reason": "abort"}, 1),
        ("vllm:request_success_total", {"finished_reason": "error"}, 0),
        ("vllm:admission_rejections_total", {"reason": "max_num_queued_tokens"}, 1),
        ("vllm:admission_rejections_total", {"reason": "max_num_queued_reqs"}, 0),
        ("vllm:time_to_first_token_seconds_sum", {}, 1.5),
        ("vllm:inter_token_latency_seconds_count", {}, 3),
        ("vllm:inter_token_latency_seconds_bucket", {"le": "0.004"}, 3),
        ("vllm:inter_token_latency_seconds_bucket", {"le": "0.003"}, 0),
        ("vllm:request_time_per_output_token_seconds_sum", {}, 0.4),
        ("vllm:e2e_request_latency_seconds_sum", {}, 5.75),
        ("vllm:request_queue_time_seconds_sum", {}, 0.5),
        ("vllm:request_prefill_time_seconds_sum", {}, 1.0),
        ("vllm:request_decode_time_seconds_sum", {}, 4.0),
        ("vllm:request_inference_time_seconds_sum", {}, 5.0),
        ("vllm:request_prompt_tokens_sum", {}, 100),
        ("vllm:request_generation_tokens_sum", {}, 11),
        ("vllm:request_max_num_generation_tokens_sum", {}, 11),
        ("vllm:request_params_n_sum", {}, 2),
        ("vllm:request_params_max_tokens_sum", {}, 64),
        ("vllm:request_num_preemptions_sum", {}, 1),
        ("vllm:request_prefill_kv_computed_tokens_sum", {}, 18),
        ("vllm:iteration_tokens_total_sum", {}, 81),
        ("vllm:iteration_tokens_total_bucket", {"le": "8.0"}, 1),
        ("jaxinfer:requests_received_total", {}, 1),
        ("jaxinfer:requests_active", {}, 0),
        ("jaxinfer:late_compiles_total", {}, 1),
        ("jaxinfer:kv_pressure_events_total", {}, 2),
        ("jaxinfer:decode_steps_total", {}, 2),
        ("jaxinfer:scheduled_tokens_total", {"kind": "prefill"}, 48),
        ("jaxinfer:bucket_tokens_total", {"kind": "prefill"}, 64),
        ("jaxinfer:padding_waste_ratio", {}, 0.19),
        ("jaxinfer:pages", {"state": "live"}, 25),
        ("jaxinfer:pages", {"state": "cached"}, 15),
        ("jaxinfer:pages", {"state": "fresh"}, 60),
        ("jaxinfer:live_pages", {"window": "none"}, 12),
        ("jaxinfer:live_pages", {"window": "512"}, 13),
        ("jaxinfer:step_seconds_sum", {"kind": "mixed"}, 0.01),
        ("jaxinfer:executables", {"source": "bundle"}, 6),
        ("jaxinfer:executables", {"source": "compiled"}, 4),
        ("jaxinfer:startup_seconds", {"phase": "load"}, 1.5),
        ("http_requests_total", {"handler": "none", "method": "other", "status": "4xx"}, 1),
        (
            "http_request_duration_seconds_sum",
            {"handler": "/v1/completions", "method": "POST"},
            0.3,
        ),
        ("http_request_duration_highr_seconds_count", {}, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_value(series: str, labels: dict[str, str], value: float) -> None:
    assert value_of(busy_metrics(), series, **labels) == pytest.approx(value)


def test_cache_config() -> None:
    info = families_of(make_metrics())["vllm:cache_config_info"].samples[0]
    assert info.value == 1
    assert info.labels == {
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "101",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.92",
        "kv_cache_memory_bytes": "None",
        "cache_dtype": "auto",
    }


def test_nothing_is_looked_up_without_a_prefix_cache() -> None:
    limits = Limits((100,), 16, 8, 4096, 512, (), enable_prefix_caching=False)
    metrics = Metrics("smol", limits, start=STATS)
    assert value_of(metrics, "vllm:prefix_cache_queries_total") == 0
    assert value_of(metrics, "vllm:prompt_tokens_total") == 100


def test_a_rebuilt_engine_counts_from_its_own_start() -> None:
    metrics = busy_metrics()
    metrics.observe(News((), (), (), EngineStats(num_generated_tokens=1)))
    assert value_of(metrics, "vllm:generation_tokens_total") == 1


def test_two_servers_of_a_process_count_separately() -> None:
    assert value_of(busy_metrics(), "jaxinfer:requests_received_total") == 1
    assert value_of(make_metrics(), "jaxinfer:requests_received_total") == 0


def test_unknown_methods_share_a_series() -> None:
    metrics = make_metrics()
    for number in range(100):
        metrics.http_response(None, f"M{number}", 405, 0.0)
    assert len(families_of(metrics)["http_requests"].samples) == 1


@pytest.mark.parametrize("name", ["process_resident_memory_bytes", "python_info"])
def test_process_series(name: str) -> None:
    assert families_of(make_metrics())[name].samples


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
        ("text/html, application/openmetrics-text;q=0.5", "application/openmetrics-text"),
    ],
)
def test_formats(accept: str, content_type: str) -> None:
    got, body = busy_metrics().render(accept)
    assert got.startswith(content_type)
    parse = parse_openmetrics if "openmetrics" in got else parse_text
    names = {sample.name for family in parse(body.decode()) for sample in family.samples}
    assert {"vllm:prompt_tokens_total", "jaxinfer:step_seconds_bucket"} <= names


def test_snapshot() -> None:
    clock = Clock()
    metrics = make_metrics(clock=clock)
    clock.now += 4
    metrics.observe(News((), (), STEPS, STATS))
    metrics.request_received()
    metrics.inter_token(0.012, 3)
    clock.now += 1
    shown = metrics.snapshot()
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["requests"]["running"] == 2
    assert shown["requests"]["active"] == 1
    assert shown["pages"] == {
        "live": 25,
        "cached": 15,
        "fresh": 60,
        "live_by_window": {"none": 12, "512": 13},
        "usage": 0.25,
    }
    assert shown["per_second"]["generated_tokens"] == 40 / 5
    assert shown["seconds"]["inter_token"]["mean"] == pytest.approx(0.004)
    assert 0.003 <= shown["seconds"]["inter_token"]["p50"] <= 0.004
    assert shown["seconds"]["time_to_first_token"]["p99"] is None
    assert shown["steps"]["decode"]["bucket_tokens"] == 4
    assert shown["late_compiles"] == 1
    assert shown["padding_waste"] == pytest.approx(0.19)


def test_a_step_is_cheap() -> None:
    """Measured 1 µs; the bound is for a busy machine."""
    metrics = make_metrics()
    deltas = tuple(Delta(str(index), 0, "a", (1,)) for index in range(64))
    news = News(deltas, (), STEPS[1:2], STATS)
    seconds = min(timeit.repeat(lambda: metrics.observe(news), number=500, repeat=5)) / 500
    assert seconds < 50e-6


def test_import_needs_no_jax() -> None:
    script = "import sys, jaxinfer.server.metrics.registry; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "jax" not in modules


def test_the_documentation_names_every_series() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `([\w:]+)(?:\{[\w,]+\})?` \| (\w+) \|", text, re.MULTILINE))
    exported = {
        name: family.type
        for name, family in families_of(busy_metrics()).items()
        if not name.startswith(("process_", "python_"))
    }
    assert documented == exported
