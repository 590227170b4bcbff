"""Traces: a server's spans at a collector in this process, and a collector that does not answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.request import FinishReason, SamplingParams
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.requests.outputs import SequenceTimes
from jaxinfer.server.api.answer import Caller
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.metrics.registry import SequenceProgress
from jaxinfer.server.service.service import Service
from jaxinfer.server.service.traces import Traces, otlp_exporter
from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.server_process import wait_until

FIELDS = {"prompt": "abcd", "max_tokens": 3, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Span:
    """A span as a collector has received it."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name, self.kind = span.name, span.kind
        self.trace, self.parent = span.trace_id.hex(), span.parent_span_id.hex()
        self.seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        self.end = span.end_time_unix_nano / 1e9
        self.status = span.status
        self.attributes = {one.key: _value(one.value) for one in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """The spans of all exports; ``stuck`` makes an export wait until it is cleared."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_exports = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def take(self, request: ExportTraceServiceRequest) -> None:
        self.num_exports += 1
        self.may_answer.wait(30)
        for resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Span(named["service.name"], span) for span in scope.spans]

    def one(self, request_id: str) -> Span:
        """The span of a request, once it has arrived."""
        found: list[Span] = []

        def arrived() -> bool:
            found[:] = [
                one for one in self.spans if one.attributes["gen_ai.request.id"] == request_id
            ]
            return bool(found)

        wait_until(arrived, "the span arrives")
        (span,) = found
        return span


@contextmanager
def http_collector(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def collector() -> Collector:
    return Collector()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Serving]:
    """A server that sends its spans at once."""
    with pytest.MonkeyPatch.context() as patch, http_collector(collector) as endpoint:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        settings: dict[str, Any] = {
            "otlp_traces_endpoint": endpoint,
            "otlp_traces_protocol": "http/protobuf",
        }
        with serving(tiny_engine(), served_model_name=("first", "second"), **settings) as running:
            yield running
            assert running.service.traces is not None
            running.service.traces.close()


def complete(server: Serving, request_id: str, trace: str = "", **fields: Any) -> Any:
    headers = {"X-Request-Id": request_id} | ({"traceparent": trace} if trace else {})
    with server.client(headers=headers) as client:
        response = client.post("/v1/completions", json=FIELDS | fields)
    assert response.status_code == 200, response.text
    return response


def test_a_span_has_the_requests_facts(server: Serving, collector: Collector) -> None:
    start = time.time()
    complete(server, "facts", model="second", seed=7, n=2)
    span = collector.one("facts")
    assert (span.name, span.kind, span.service) == ("llm_request", 2, "jaxinfer")  # 2: SERVER
    assert span.parent == "" and start < span.end < time.time()
    times = {name: span.attributes.pop(name) for name in [*span.attributes] if "latency" in name}
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": "first",
        "gen_ai.request.id": "facts",
        "http.route": "/v1/completions",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.n": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    phases = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    names = (*phases, "time_in_model_inference", "time_to_first_token", "e2e")
    assert times.keys() == {f"gen_ai.latency.{name}" for name in names}
    first, whole = times["gen_ai.latency.time_to_first_token"], times["gen_ai.latency.e2e"]
    assert 0 < first < whole and whole == pytest.approx(span.seconds, abs=1e-6)
    assert all(0 <= times[f"gen_ai.latency.{name}"] < whole for name in phases)


def test_the_clients_trace_goes_on(server: Serving, collector: Collector) -> None:
    complete(server, "child", f"00-{TRACE}-{PARENT}-01")
    span = collector.one("child")
    assert (span.trace, span.parent) == (TRACE, PARENT)


def test_a_trace_that_is_not_sampled_gets_no_span(server: Serving, collector: Collector) -> None:
    complete(server, "unsampled", f"00-{TRACE}-{PARENT}-00")
    complete(server, "broken", "not a trace")
    assert collector.one("broken").parent == ""
    assert "unsampled" not in [one.attributes["gen_ai.request.id"] for one in collector.spans]


def test_requests_do_not_wait_for_the_collector(server: Serving, collector: Collector) -> None:
    collector.may_answer.clear()
    before = collector.num_exports
    try:
        complete(server, "stuck-0")
        wait_until(lambda: collector.num_exports > before, "an export begins")
        for number in range(1, 6):
            complete(server, f"stuck-{number}")
        assert not [one for one in collector.spans if "stuck" in str(one.attributes)]
    finally:
        collector.may_answer.set()
    for number in range(6):
        assert collector.one(f"stuck-{number}").attributes["gen_ai.usage.output_tokens"] == 3


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector's service over gRPC."""

    def __init__(self) -> None:
        self.collector = Collector()

    def Export(self, request: Any, context: object) -> ExportTraceServiceResponse:
        del context
        self.collector.take(request)
        return ExportTraceServiceResponse()


def test_grpc_and_a_failed_request() -> None:
    service = GrpcCollector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    traces = Traces(otlp_exporter(f"http://127.0.0.1:{port}", "grpc"))
    answer = SimpleNamespace(
        received=time.monotonic() - 2,
        first_token=None,
        request_id="failed",
        route="/v1/chat/completions",
        caller=Caller("team"),
        sampling=SamplingParams(),
        sequences=[SequenceProgress()],
        num_prompt_tokens=4,
        num_tokens=0,
        num_cached_tokens=0,
        error=EngineError("the step failed"),
    )
    traces.record(answer, "m")  # type: ignore[arg-type]
    longest = time.monotonic() - answer.received
    traces.close()
    server.stop(None)
    span = service.collector.one("failed")
    assert 1.99 < span.seconds < longest + 0.01
    assert (span.status.code, span.status.message) == (2, "the step failed")  # 2: ERROR
    assert span.attributes["error.type"] == "EngineError"
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["jaxinfer.api_key.name"] == "team"
    assert not [name for name in span.attributes if "time_" in name]


def test_times_are_those_of_the_slowest_sequence() -> None:
    from jaxinfer.server.service.traces import _phases

    times = (SequenceTimes(1, 2, 4, 5), SequenceTimes(1, 1.5, 2, 9))
    ended = [SequenceProgress(finish_reason=FinishReason.STOP, times=one) for one in times]
    assert [*_phases(ended).values()] == [1, 2, 7, 7.5]
    assert not _phases([SequenceProgress()])


def test_the_end_does_not_wait_for_a_stuck_collector() -> None:
    collector = Collector()
    collector.may_answer.clear()
    with http_collector(collector) as endpoint:
        traces = Traces(otlp_exporter(endpoint, "http/protobuf"))
        with traces._tracer.start_as_current_span("last"):
            pass
        start = time.monotonic()
        traces.close(0.2)
        assert 0.1 < time.monotonic() - start < 2
        collector.may_answer.set()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    kind = protocol.partition("/")[0]
    name = f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    config = ServerConfig(otlp_traces_endpoint="http://x:1", otlp_traces_protocol=protocol)
    with pytest.raises(ConfigError, match="otlp_traces_endpoint needs OpenTelemetry, which is not"):
        Service(config, EventLog())
