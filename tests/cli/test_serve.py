"""``jaxinfer serve`` up to the start: every flag of vLLM's, the shown settings, the refusals."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli import serve as module
from jaxinfer.cli.main import cli
from jaxinfer.core.config import DEFAULT_MODEL, EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.core.version import VERSION
from kit.engines import tiny_limits

JAXINFER = str(Path(sys.executable).with_name("jaxinfer"))

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 (info|warning|error) \w")

type Running = tuple[subprocess.Popen[str], str]  # the process and its URL


class Started:
    """The settings of the last ``jaxinfer serve`` that would have started."""

    engine: EngineConfig
    server: ServerConfig

    def __call__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self.engine, self.server = engine, server

    def run(self, *arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(cli, ["serve", *arguments], env=environment)

    @property
    def values(self) -> dict[str, Any]:
        server = {field.name: getattr(self.server, field.name) for field in FIELDS}
        return {**dataclasses.asdict(self.engine), **server}


FIELDS = dataclasses.fields(ServerConfig)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Without the settings of the environment in which the tests run."""
    for name in [name for name in os.environ if name.startswith("JAXINFER_")]:
        monkeypatch.delenv(name)
    started = Started()
    monkeypatch.setattr(module, "_serve", started)
    return started


# the rows of vLLM's table in its users' spelling: flags -> settings
SET: dict[str, dict[str, Any]] = {
    "some/model": {"model": "some/model"},
    "--model some/model": {"model": "some/model"},
    "--host 1.2.3.4 --port 80": {"host": "1.2.3.4", "port": 80},
    "--served-model-name a b --port 81": {"served_model_name": ("a", "b"), "port": 81},
    "--served-model-name a --served-model-name b": {"served_model_name": ("a", "b")},
    "--api-key one two": {"api_key": ("one", "two")},
    "--tokenizer there": {"tokenizer": "there"},
    "--dtype half": {"dtype": "float16"},
    "--max-model-len 32k": {"max_model_len": 32000},
    "--max_model_len=32K": {"max_model_len": 32768},
    "--max-model-len auto": {"max_model_len": None},
    "--gpu-memory-utilization 0.5": {"gpu_memory_utilization": 0.5},
    "--kv-cache-memory-bytes 4G": {"kv_cache_memory_bytes": 4 << 30},
    "--block-size 32": {"page_size": 32},
    "--bundle there": {"bundle": "there"},
    "--max-num-seqs 64": {"max_num_seqs": 64},
    "--max-num-batched-tokens 2k": {"max_num_batched_tokens": 2000},
    "--max-num-mixed-tokens 1K": {"max_num_mixed_tokens": 1024},
    "--num-snapshots 12": {"num_snapshots": 12},
    "-tp 1": {"tensor_parallel_size": 1},
    "--tensor-parallel-size 2 --enable-expert-parallel": {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "--max-num-queued-reqs 5 --max-num-queued-tokens 1k": {
        "max_num_queued_reqs": 5,
        "max_num_queued_tokens": 1000,
    },
    "--kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "--kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "bfloat16"},
    "--no-enable-prefix-caching": {"enable_prefix_caching": False},
    "--no-async-scheduling": {"overlap": False},
    "--no-overlap": {"overlap": False},
    "--prefill-first": {"prefill_first": True},
    "--load-format dummy": {"load_format": "dummy"},
    "--seed 7": {"seed": 7},
    "--chat-template {{messages}}": {"chat_template": "{{messages}}"},
    '--default-chat-template-kwargs {"a":1}': {"default_chat_template_kwargs": {"a": 1}},
    "--generation-config vllm": {"generation_config": "vllm"},
    '--override-generation-config {"top_k":5,"max_new_tokens":9}': {
        "override_generation_config": {"top_k": 5, "max_new_tokens": 9}
    },
    "--max-logprobs 5": {"max_logprobs": 5},
    "--enable-log-requests --max-log-len 1k": {"enable_log_requests": True, "max_log_len": 1000},
    "--api-key-file there": {"api_key_file": "there"},
    "--otlp-traces-endpoint http://x:1": {"otlp_traces_endpoint": "http://x:1"},
    "--uvicorn-log-level debug": {"uvicorn_log_level": "debug"},
    "--disable-uvicorn-access-log": {"disable_uvicorn_access_log": True},
    '--allowed-origins ["https://a.b"]': {"allowed_origins": ("https://a.b",)},
    "--root-path /llm": {"root_path": "/llm"},
    "--no-ui": {"ui": False},
    "--uds there.sock": {"uds": "there.sock"},
    "--request-timeout 1.5 --shutdown-timeout 0": {"request_timeout": 1.5, "shutdown_timeout": 0.0},
    "--ignore-hosted-tools": {"ignore_hosted_tools": True},
    "--strict-fields --max-body-bytes 1M": {"strict_fields": True, "max_body_bytes": 1 << 20},
    "--return-tokens-as-token-ids": {"return_tokens_as_token_ids": True},
    "--enable-force-include-usage": {"enable_force_include_usage": True},
    "--disable-frontend-multiprocessing": {"disable_frontend_multiprocessing": True},
    "--ssl-certfile c --ssl-keyfile k": {"ssl_certfile": "c", "ssl_keyfile": "k"},
}


@pytest.mark.parametrize("line", SET)
def test_flags_set(started: Started, line: str) -> None:
    result = started.run(*line.split())
    assert result.exit_code == 0, result.output
    assert {name: started.values[name] for name in SET[line]} == SET[line]


NEUTRAL = """-pp 1|-dp 1|--kv-cache-dtype auto
|--enable-chunked-prefill|--scheduling-policy priority|--tokenizer-mode auto
|--chat-template-content-format auto|--no-enable-lora"""


@pytest.mark.parametrize("line", NEUTRAL.replace("\n", "").split("|"))
def test_flags_with_their_only_value(started: Started, line: str) -> None:
    assert started.run(*line.split()).exit_code == 0
    assert started.engine == EngineConfig()
    assert started.server == ServerConfig(served_model_name=(DEFAULT_MODEL,))


def test_settings_of_hub_models(started: Started) -> None:
    assert started.run("org/name", "--revision", "v1", "--download-dir", "d").exit_code == 0
    assert started.engine == EngineConfig(model="org/name", revision="v1", download_dir="d")


NOTICED = {
    "--trust-remote-code": "a model folder's code is never run",
    "--enforce-eager": "every step is compiled",
    "-O2": "every step is compiled",
    "--compilation-config 3": "every step is compiled",
    "--hf-token hidden": "set HF_TOKEN, or run `hf auth login`",
    "--disable-log-stats": "nothing is logged",
    "--collect-detailed-traces all": "spans have the times of every phase",
}


@pytest.mark.parametrize("line", NOTICED)
def test_flags_without_effect_are_noticed(started: Started, line: str) -> None:
    result = started.run(*line.split())
    assert result.exit_code == 0
    assert f" has no effect: {NOTICED[line]}" in result.stderr
    assert "hidden" not in result.stderr


REFUSED = {
    "-tp 0": "tensor_parallel_size must be at least 1, got 0",
    "-pp 2": "pipeline_parallel_size=2 is not supported: use tensor_parallel_size for several",
    "--quantization int3": "quantization 'int3' is unknown; use one of fp8, int8, int4",
    "--kv-cache-dtype fp8_e5m2": "'fp8_e5m2' is unknown; use one of auto, bfloat16, fp8",
    "--no-enable-chunked-prefill": "prefill is always chunked",
    "--speculative-config {}": "speculative decoding is not supported",
    "--enable-lora": "LoRA is not supported",
    "--lora-modules a=b c=d": "LoRA is not supported",
    "--max-loras 4": "LoRA is not supported",
    "--max-lora-rank 64": "LoRA is not supported",
    "--best-of 2": "ask for n completions",
    "--swap-space 4": "preempted sequences are computed again",
    "--num-scheduler-steps 8": "planning overlaps with computing anyway",
    "--disable-log-requests": "only enable_log_requests logs them",
    "--guided-decoding-backend xgrammar": "llguidance is the only backend",
    "--max-model-len many": "--max-model-len must be a whole number",
    "--port 70000": "port must be a whole number from 0 to 65535, got 70000",
    "--max-logprobs 50": "max_logprobs must be a whole number from 0 to 20",
    "--root-path llm": "root_path 'llm' must begin with /",
    "--ssl-keyfile k": "need ssl_certfile",
    "--ssl-cert-reqs 2": "needs ssl_ca_certs",
    "--allowed-origins * --allow-credentials": "origins that are named",
    "--uvicorn-log-level loud": "uvicorn_log_level 'loud' is unknown",
    "--shutdown-timeout -1": "shutdown_timeout must be seconds, at least 0",
    "--request-timeout nan": "request_timeout must be seconds",
    '--override-generation-config {"top_k":"x"}': "override_generation_config is unusable: top_k",
    '--override-generation-config {"tmp":1}': "override_generation_config has 'tmp'",
    "--chat-template {%if": "chat_template is unusable: The chat template is not valid Jinja",
    "--chat-template /no/such/file": "the chat template /no/such/file cannot be read",
    "--config /no/such/file": "the configuration file /no/such/file cannot be read",
    "--dtype int3": "dtype 'int3' is unknown",
    "--log-format xml": "log_format 'xml' is unknown; use one of text, json",
    "--otlp-traces-protocol udp": "otlp_traces_protocol 'udp' is unknown; use one of grpc",
    "--otlp-traces-endpoint x:1 --otlp-traces-protocol http/protobuf": "must be a URL such as",
    '--override-generation-config {"max_new_tokens":0}': "max_new_tokens must be a whole number",
    "--served-model-name a b a": "served_model_name must be different names, got ['a', 'b', 'a']",
    "--served-model-name=": "served_model_name must be different names, got ['']",
    "--host=": "host must be an address or a name; leave it out for 127.0.0.1",
    "--max-log-len -1": "max_log_len must be a whole number of at least 0",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_with_advice(started: Started, line: str) -> None:
    result = started.run(*line.split())
    assert result.exit_code == 1
    assert REFUSED[line] in result.stderr
    assert result.stderr.count("\n") == 1  # one line, no traceback
    assert not hasattr(started, "engine")


@pytest.mark.parametrize("key", ["", "caf\u00e9", " key", "a\nb"])
def test_unusable_keys_are_refused_and_not_shown(started: Started, key: str) -> None:
    result = started.run(JAXINFER_API_KEY=key)
    assert result.exit_code == 1
    assert result.stderr.startswith("jaxinfer: error: api_key must be printable ASCII")


def test_the_model_twice(started: Started) -> None:
    assert started.run("a", "--model", "b").exit_code == 2


def test_effective_settings_and_their_sources(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nmax-num-seqs: 8\napi_key: [hidden-1, hidden-2]\nseed:\n")
    result = started.run("--config", str(file), "--port", "1234", JAXINFER_MAX_MODEL_LEN="2k")
    lines = [line.split(" ", 2) for line in result.stderr.splitlines()]
    assert {level for _, level, _ in lines} == {"info"}
    assert [text for _, _, text in lines] == [
        f"jaxinfer {VERSION} serves m (file {file})",
        "from flags: port 1234",
        "from the environment: max_model_len 2000 (JAXINFER_MAX_MODEL_LEN)",
        f"from file {file}: max_num_seqs 8, api_key 2 given",
    ]
    assert "hidden" not in result.output
    assert started.server.api_key == ("hidden-1", "hidden-2")


def test_defaults_are_for_a_debug_log(started: Started) -> None:
    assert "port" not in started.run("m").stderr
    lines = started.run("m", "--uvicorn-log-level=debug").stderr.splitlines()
    texts = [line.split(" ", 2)[2] for line in lines if " debug " in line]
    assert {
        "seed random at each start (default)",
        "dtype auto: float32 on a CPU, bfloat16 on a GPU (default)",
        "host 127.0.0.1, this machine alone; 0.0.0.0: every IPv4 address (default)",
        "chat_template the model's (default)",
    } <= {*texts}


def test_a_start_is_logged_as_json_on_request(started: Started) -> None:
    result = started.run("m", "--port=1", "--log-format=json", "--enforce-eager", JAXINFER_PROT="1")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [line["event"] for line in lines] == [
        *("start", "settings", "no_effect", "unknown_variables"),
    ]
    assert lines[1]["source"] == "flag" and lines[1]["settings"]["port"] == "1"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_late_error_has_the_format_of_the_log(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("port 1 is in use; stop it")

    monkeypatch.setattr(module, "_serve", fail)
    result = CliRunner().invoke(cli, ["serve", "m", f"--log-format={form}"])
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    said = "jaxinfer: error: port 1 is in use; stop it"
    if form == "text":
        assert last.endswith(f" error {said}")
    else:
        line = json.loads(last)
        assert (line["level"], line["event"], line["message"]) == ("error", "failed", said)


def test_the_file_named_by_the_environment(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\n")
    assert started.run(JAXINFER_CONFIG=str(file), JAXINFER_PROT="1").exit_code == 0
    assert started.server.port == 1


def test_no_name_in_a_file_is_the_models(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nserved_model_name: []\n")
    started.run("--config", str(file))
    assert started.server.served_model_name == ("m",)


@pytest.mark.parametrize(
    ("settings", "pooling", "has_page"),
    [({}, "", True), ({"ui": False}, "", False), ({"uds": "x"}, "", False), ({}, "last", False)],
)
def test_the_ready_line_names_the_page(
    settings: dict[str, Any], pooling: str, has_page: bool
) -> None:
    """Unless there is none, or the model generates no text."""
    found = module.offered(ServerConfig(**settings), tiny_limits(pooling=pooling))
    assert found == "a page for chats is there; " * has_page + "OpenAI's API at /v1"


def test_a_path_is_served_by_the_name_of_its_file(started: Started, tmp_path: Path) -> None:
    """Requests may also have the path, as with vLLM."""
    path = tmp_path / "coder.gguf"
    path.touch()
    started.run(str(path))
    assert started.server.served_model_name == ("coder",)
    assert started.server.unlisted_model_name == str(path)
    started.run(str(path), "--served-model-name", "other")
    assert started.server.served_model_name == ("other",)
    assert started.server.unlisted_model_name is None


YAML = {
    "list": ("- port\n", "holds no settings"),
    "broken": ("port: [\n", "is no YAML"),
    "tag": ("port: !!python/object/apply:os.system [ls]\n", "is no YAML"),
    "date": ("port: 2001-02-30\n", "is no YAML"),
    "nested": ("port: " + "[" * 5000, "is no YAML"),
    "bytes": (b"\xff\xfe\x00", "cannot be read"),
    "config in config": ("config: a.yaml\n", "'config' in"),
}


@pytest.mark.parametrize(("text", "message"), YAML.values(), ids=YAML)
def test_broken_files(started: Started, tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = started.run("--config", str(file))
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_protocol_of_traces_is_opentelemetrys_own_variable(started: Started) -> None:
    started.run(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
    assert started.server.otlp_traces_protocol == "http/protobuf"


def test_a_template_from_a_file(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    options = ("--chat-template", str(file))
    started.run(*options)
    assert started.server.chat_template == "{{ messages }}"
    file.write_text("{% for %}")
    assert f"chat_template is unusable (file {file}): " in started.run(*options).stderr


def test_the_server_process_needs_no_jax_and_no_opentelemetry() -> None:
    """Import everything that ``_serve`` imports before the engine's own process starts."""
    script = (
        "import sys, jaxinfer.cli.serve, jaxinfer.server.routes.app, jaxinfer.server.http.run, "
        "jaxinfer.engine.link.process; print({'jax', 'flax', 'opentelemetry'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


# an engine process that only records the modules imported at its start
SPAWNING = """
import sys
from jaxinfer.cli.main import main
from jaxinfer.engine.link import spawn

class Noting(spawn.Spawned):
    def __exit__(self, *error):
        super().__exit__(*error)
        print(self.process.returncode)

def noting(environment=None):
    heavy = "jax numpy starlette uvicorn tokenizers jinja2 prometheus_client asyncio".split()
    print(*(name for name in heavy if name in sys.modules), flush=True)
    made = start((sys.executable, "-c", "import time; time.sleep(60)"), environment)
    return Noting(made.process, made.end)

start, spawn.spawn = spawn.spawn, noting
main()
"""


def test_the_engine_is_started_before_the_server_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", SPAWNING, "serve", "--host=127.0.0.1", f"--port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and f"port {port} is in use" in done.stderr
    imported, ended = done.stdout.splitlines()
    assert imported == ""
    assert int(ended) == -signal.SIGKILL  # a failed start leaves no process


def test_memory_of_reading_the_tokenizer_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Process:
        def __init__(self, config: EngineConfig, spawned: None, *, log: None) -> None: ...

        def ready(self) -> "Process":
            done.append("the tokenizer is read")
            return self

    monkeypatch.setattr("jaxinfer.engine.link.process.EngineProcess", Process)
    for name in ("release_free_heap", "release_library_pages"):
        release = partial(done.append, name)
        monkeypatch.setattr(f"jaxinfer.core.host_memory.{name}", release)
    module._engine_process(None, EngineConfig())  # type: ignore[arg-type] # pyright: ignore
    assert done == [
        "the tokenizer is read",
        "release_free_heap",
        "release_library_pages",
    ]


@pytest.fixture
def server(
    tiny_arguments: list[str], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on the tiny model, in a process of its own, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [JAXINFER, "serve", *tiny_arguments, f"--port={port}", "--host=127.0.0.1"]
    environment = {**os.environ, "JAXINFER_API_KEY": "hidden", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def test_a_server_from_start_to_end(server: Running) -> None:
    process, url = server
    codes: list[int] = []
    for _ in range(600):
        try:
            codes.append(httpx.get(f"{url}/ready", timeout=30).status_code)
        except httpx.ConnectError:
            codes.append(0)
        if codes[-1] == 200:
            break
        time.sleep(0.1)
    assert codes[-1] == 200
    assert 503 in codes  # it listens before the model is loaded
    request = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=request, timeout=30).status_code == 401
    headers = {"Authorization": "Bearer hidden"}
    answer = httpx.post(f"{url}/v1/completions", json=request, headers=headers, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f" info ready on {url} in " in told
    assert " (a page for chats is there; OpenAI's API at /v1; model " in told
    assert "hidden" not in told
    lines = told.splitlines()
    assert all(LINE.match(line) for line in lines), told
    start = lines[: next(at for at, line in enumerate(lines) if " executables" in line)]
    assert len(start) < 15
    assert re.search(r"auto on cpu \(.*\): dtype float32, .*\(from configs/engine/cpu.toml\)", told)
    assert re.search(r"max_model_len 128 \(given\); KV cache .*: \d+ pages of 16 tokens", told)
    assert "memory: weights" not in told and "workspace" not in told
    assert lines[-1].endswith(" info ended")
