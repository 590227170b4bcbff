"""The settings of ``jaxinfer serve``, in the groups of ``--help``, under vLLM's names."""

from __future__ import annotations

from jaxinfer.cli.options import HOSTS, MEMORY, MODEL, SAMPLING
from jaxinfer.cli.settings import (
    Group,
    Setting,
    anything,
    boolean,
    integer,
    mapping,
    number,
    size,
    text,
    texts,
)
from jaxinfer.engine.api.vllm_names import (
    SEVERAL,
    SHORT,
    SWITCHES,
    UNSUPPORTED,
    WITHOUT_EFFECT,
)

API_KEY = Setting(  # of a server and of its clients
    "api_key",
    texts,
    "Keys, one of which requests must bring.",
    environment=("VLLM_API_KEY",),
    secret=True,
)
GROUPS = (
    MODEL,
    Group(
        "The model in the API",
        (
            Setting("served_model_name", texts, "Names in the API; the first is in the answers."),
            Setting("override_generation_config", mapping, "Sampling defaults over those, JSON."),
            Setting("chat_template", text, "A file, or the Jinja template itself."),
            Setting("trust_request_chat_template", boolean, "Run templates that requests bring."),
            Setting("default_chat_template_kwargs", mapping, "Variables for the template, JSON."),
            Setting("response_role", text, "The role in chat answers."),
            Setting("seed", integer, "Draws of requests that bring no seed follow from it."),
        ),
    ),
    MEMORY,
    HOSTS,
    Group(
        "Address",
        (
            Setting("host", text, "Address to listen on; 0.0.0.0 and :: are every interface."),
            Setting("port", integer, "Port to listen on."),
            Setting("uds", text, "A Unix socket instead."),
            Setting("root_path", text, "Path under which a proxy shows the server."),
            Setting("ssl_keyfile", text, "TLS key."),
            Setting("ssl_certfile", text, "TLS certificate chain; makes the server HTTPS."),
            Setting("ssl_ca_certs", text, "Authorities for client certificates."),
            Setting(
                "ssl_cert_reqs", integer, "Client certificates: 0 none, 1 optional, 2 required."
            ),
        ),
    ),
    Group(
        "Access",
        (
            API_KEY,
            Setting(
                "api_key_file",
                text,
                "Keys, one a line, with a name after it if wanted; read again on SIGHUP.",
            ),
            Setting(
                "admin_api_key",
                texts,
                "Keys for /pause, /update_weights, /sleep and the like.",
                secret=True,
            ),
            Setting(
                "profiler_dir",
                text,
                "Folder of the profiles that /start_profile takes; needs an admin key.",
            ),
            Setting("prefix_caching_by_key", boolean, "Reuse prefixes only for the same key."),
            Setting("allowed_hosts", texts, "Names in the Host header; * allows any."),
            Setting("forwarded_allow_ips", texts, "Proxies whose X-Forwarded-For is believed."),
            Setting("allowed_origins", texts, "CORS origins, as a JSON list."),
            Setting("allowed_methods", texts, "CORS methods, as a JSON list."),
            Setting("allowed_headers", texts, "CORS headers, as a JSON list."),
            Setting("allow_credentials", boolean, "CORS with cookies."),
            Setting("ui", boolean, "The page at /, a console for the browser."),
        ),
    ),
    Group(
        "Limits",
        (
            Setting("max_num_queued_reqs", size, "Waiting requests; more get 429."),
            Setting("max_num_queued_tokens", size, "Waiting prompt tokens; more get 429."),
            Setting("request_timeout", number, "Seconds that an answer may take."),
            Setting("shutdown_timeout", number, "Seconds for open requests after SIGTERM."),
            Setting("body_timeout", number, "Seconds until a request's body has arrived."),
            Setting("max_template_seconds", number, "CPU time to make a prompt of a chat."),
            Setting("health_timeout", number, "Seconds without a step until /health is 503."),
            Setting("max_body_bytes", size, "Longest request body."),
            Setting("max_buffered_bytes", size, "Bytes of requests that have not arrived whole."),
            Setting("max_connections", size, "Open connections; more get 503."),
            Setting("h11_max_incomplete_event_size", size, "Longest head of a request, in bytes."),
            Setting("max_logprobs", integer, "Most logprobs that a request may ask for."),
            Setting(
                "max_answer_bytes", size, "Most bytes of a request's answers, estimated before."
            ),
            Setting("max_tap_bytes", size, "Most bytes of activations in an answer."),
            Setting("max_stored_responses", size, "Responses kept for later requests; 0: none."),
            Setting("max_stored_response_bytes", size, "Most bytes of the kept responses."),
            Setting("strict_fields", boolean, "Refuse requests with unknown fields."),
            Setting(
                "ignore_hosted_tools",
                boolean,
                "Leave out tools that OpenAI's and Anthropic's servers run; or refuse them.",
            ),
        ),
    ),
    Group(
        "Answers",
        (
            Setting(
                "tool_call_parser",
                text,
                "The form of tool calls, such as hermes, instead of the chat template's; or none.",
            ),
            Setting(
                "reasoning_parser",
                text,
                "The marks of thoughts, such as deepseek_r1, instead of the template's; or none.",
            ),
            Setting("strict_tool_calls", boolean, "Text without the marks of a call is no call."),
            Setting("return_tokens_as_token_ids", boolean, "Logprobs name tokens token_id:N."),
            Setting("enable_force_include_usage", boolean, "Usage in every stream."),
            Setting("enable_prompt_tokens_details", boolean, "Cached tokens in the usage."),
        ),
    ),
    Group(
        "Process and log",
        (
            Setting("disable_frontend_multiprocessing", boolean, "Engine and HTTP in one process."),
            Setting("data_parallel_size", size, "Engines, each with its own devices.", ("-dp",)),
            Setting("enable_log_requests", boolean, "Log each request, without its text."),
            Setting("max_log_len", size, "Log up to so many characters of its prompts as well."),
            Setting("otlp_traces_endpoint", text, "An OpenTelemetry collector that gets traces."),
            Setting(
                "otlp_traces_protocol",
                text,
                "grpc or http/protobuf.",
                environment=(
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
                    "OTEL_EXPORTER_OTLP_PROTOCOL",
                ),
            ),
            Setting("disable_uvicorn_access_log", boolean, "No access log."),
            Setting("log_format", text, "text for people, or json: one object a line."),
            Setting("uvicorn_log_level", text, "debug, info, warning, error, critical."),
        ),
    ),
    Group(
        "Recording and events",
        (
            Setting("kv_events_config", mapping, "KV events over ZeroMQ, as vLLM's; JSON."),
            Setting("record", text, "A file for `jaxinfer replay`; prompts are in it."),
            Setting("record_size", size, "Most bytes of the recording: 256M; the newest are kept."),
            Setting("record_digests", boolean, "Also 32 bits of each draw's input, for --check."),
            Setting("record_redact", boolean, "Other ids in place of tokens; not for --check."),
        ),
    ),
    Group(
        "Accepted because scripts for vLLM give them",
        (
            Setting("pipeline_parallel_size", integer, "Only 1.", ("-pp",)),
            Setting("convert", text, "auto, none or embed; no effect beside --task."),
            Setting("enable_chunked_prefill", boolean, "Always on."),
            Setting("scheduling_policy", text, "fcfs or priority; no effect."),
            Setting("tokenizer_mode", text, "Only auto."),
            Setting("chat_template_content_format", text, "auto or string; no effect."),
            Setting("trust_remote_code", boolean, "No effect."),
            Setting("enforce_eager", boolean, "No effect."),
            Setting("compilation_config", anything, "No effect.", ("-O", "-cc")),
            Setting("hf_token", text, "No effect; set HF_TOKEN.", secret=True),
            Setting("cpu_offload_gb", number, "No effect."),
            Setting("disable_custom_all_reduce", boolean, "No effect."),
            Setting("disable_log_stats", boolean, "No effect."),
            Setting("collect_detailed_traces", texts, "No effect: spans have every time."),
            Setting("enable_auto_tool_choice", boolean, "No effect: always on."),
            Setting("enable_request_id_headers", boolean, "No effect: always on."),
        ),
    ),
)


def _unused(name: str) -> Setting:
    """A flag of vLLM that has no effect or is refused, in ``engine.api.vllm_names``."""
    read = boolean if name in SWITCHES else texts if name in SEVERAL else anything
    return Setting(name, read, "", (SHORT[name],) if name in SHORT else ())


# Known only so that the log or the refusal gives advice; the help leaves them out.
HIDDEN = (
    Setting("speculative_config", anything, "", ("-sc",)),
    Setting("enable_lora", boolean, ""),
    Setting("lora_modules", texts, ""),
    Setting("max_loras", integer, ""),
    Setting("max_lora_rank", integer, ""),
    Setting("best_of", integer, ""),
    Setting("swap_space", number, ""),
    Setting("num_scheduler_steps", integer, ""),
    Setting("disable_log_requests", boolean, ""),
    Setting("guided_decoding_backend", text, ""),
    *(_unused(name) for group in (*WITHOUT_EFFECT, *UNSUPPORTED) for name in group.each),
)
REMOTE = Group(
    "A running server",
    (
        Setting("url", text, "Answers of this server, http://HOST:PORT, instead of an engine."),
        API_KEY,
    ),
)
SETTINGS = (*(setting for group in GROUPS for setting in group.settings), *HIDDEN)
EVERY = (
    *SETTINGS,
    *SAMPLING.settings,
    *REMOTE.settings,
)  # of all commands: a YAML file may be shared
