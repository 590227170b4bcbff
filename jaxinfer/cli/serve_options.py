"""The settings of ``jaxinfer serve``, in the groups of ``--help``, under vLLM's names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import click

from jaxinfer.cli.options import MODEL_FORMS
from jaxinfer.cli.settings import (
    Reader,
    Setting,
    anything,
    boolean,
    integer,
    mapping,
    number,
    size,
    size_or_auto,
    text,
    texts,
)


class Group(NamedTuple):
    """Settings under one heading of the help."""

    title: str
    settings: tuple[Setting, ...]


GROUPS = (
    Group(
        "Model",
        (
            Setting("model", text, f"{MODEL_FORMS}.", ("-m",)),
            Setting("served_model_name", texts, "Names in the API; the first is in the answers."),
            Setting("tokenizer", text, "A tokenizer from elsewhere."),
            Setting("skip_tokenizer_init", boolean, "Token ids only, no text."),
            Setting("load_format", text, "auto, safetensors, gguf, or dummy: random weights."),
            Setting("dtype", text, "Weights and KV cache: auto, bfloat16, float16, float32."),
            Setting("cpu_weights", text, "Quantised weights on a CPU: auto, quantised, float32."),
            Setting("quantization", text, "Quantise while loading: int4, int8, fp8.", ("-q",)),
            Setting("generation_config", text, "auto: the model's sampling defaults; vllm: none."),
            Setting("override_generation_config", mapping, "Sampling defaults over those, JSON."),
            Setting("chat_template", text, "A file, or the Jinja template itself."),
            Setting("trust_request_chat_template", boolean, "Run templates that requests bring."),
            Setting("default_chat_template_kwargs", mapping, "Variables for the template, JSON."),
            Setting("response_role", text, "The role in chat answers."),
            Setting("seed", integer, "Seed of requests that bring none."),
        ),
    ),
    Group(
        "Memory and batching",
        (
            Setting("max_model_len", size_or_auto, "Longest sequence in tokens: 4096, 32k, auto."),
            Setting("max_num_seqs", size, "Sequences that run side by side."),
            Setting("max_num_batched_tokens", size, "Prompt tokens computed in one step."),
            Setting("max_num_mixed_tokens", size, "Prompt tokens in a step with decode rows."),
            Setting("gpu_memory_utilization", number, "Share of a GPU's memory to use, up to 1."),
            Setting("kv_cache_memory_bytes", size, "Memory for the KV cache: 4G, 500M, bytes."),
            Setting("num_gpu_blocks_override", size, "Pages of the KV cache.", ("--num-pages",)),
            Setting("block_size", size, "Tokens of one page.", ("--page-size",)),
            Setting("enable_prefix_caching", boolean, "Reuse the KV cache of equal prefixes."),
            Setting("prefill_first", boolean, "Prompts before running answers: for batches."),
            Setting("async_scheduling", boolean, "Plan a step while one runs.", ("--overlap",)),
            Setting("decode_bucket_start", size, "Decode buckets of 1, N, 2N, 4N ... rows."),
            Setting("prefill_bucket_start", size, "The smallest chunk, in tokens."),
            Setting("prefill_bucket_factor", size, "Ratio of a chunk size to the next."),
            Setting("mixed_bucket_start", size, "Fewest decode rows with a chunk."),
            Setting("kernels", text, "Implementations of kernels: OP=IMPL,..."),
            Setting("bundle", text, "Executables and sizes from `jaxinfer compile`."),
            Setting("cache_dir", text, "Where downloads, conversions and executables go."),
        ),
    ),
    Group(
        "Address",
        (
            Setting("host", text, "Address to listen on; every IPv4 one unless given."),
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
            Setting(
                "api_key",
                texts,
                "Keys, one of which requests must bring.",
                environment=("VLLM_API_KEY",),
                secret=True,
            ),
            Setting(
                "admin_api_key",
                texts,
                "Keys for /pause, /resume, /update_weights and /reset_prefix_cache.",
                secret=True,
            ),
            Setting("allowed_origins", texts, "CORS origins, as a JSON list; none unless given."),
            Setting("allowed_methods", texts, "CORS methods, as a JSON list."),
            Setting("allowed_headers", texts, "CORS headers, as a JSON list."),
            Setting("allow_credentials", boolean, "CORS with cookies."),
        ),
    ),
    Group(
        "Limits",
        (
            Setting("max_num_queued_reqs", size, "Waiting requests; more get 429."),
            Setting("max_num_queued_tokens", size, "Waiting prompt tokens; more get 429."),
            Setting("request_timeout", number, "Seconds that an answer may take."),
            Setting("shutdown_timeout", number, "Seconds for open requests after SIGTERM."),
            Setting("max_body_bytes", size, "Longest request body."),
            Setting("h11_max_incomplete_event_size", size, "Longest head of a request, in bytes."),
            Setting("max_logprobs", integer, "Most logprobs that a request may ask for."),
            Setting("strict_fields", boolean, "Refuse requests with unknown fields."),
        ),
    ),
    Group(
        "Answers",
        (
            Setting("return_tokens_as_token_ids", boolean, "Logprobs name tokens token_id:N."),
            Setting("enable_force_include_usage", boolean, "Usage in every stream."),
        ),
    ),
    Group(
        "Process and log",
        (
            Setting("disable_frontend_multiprocessing", boolean, "Engine and HTTP in one process."),
            Setting("enable_log_requests", boolean, "Log each request, without its text."),
            Setting("disable_uvicorn_access_log", boolean, "No access log."),
            Setting("uvicorn_log_level", text, "debug, info, warning, error, critical."),
        ),
    ),
    Group(
        "Accepted because scripts for vLLM give them",
        (
            Setting("tensor_parallel_size", integer, "Only 1.", ("-tp",)),
            Setting("pipeline_parallel_size", integer, "Only 1.", ("-pp",)),
            Setting("data_parallel_size", integer, "Only 1.", ("-dp",)),
            Setting("kv_cache_dtype", text, "Only auto: as the model."),
            Setting("enable_chunked_prefill", boolean, "Always on."),
            Setting("scheduling_policy", text, "fcfs or priority; no effect."),
            Setting("tokenizer_mode", text, "Only auto."),
            Setting("chat_template_content_format", text, "auto or string; no effect."),
            Setting("trust_remote_code", boolean, "No effect."),
            Setting("enforce_eager", boolean, "No effect."),
            Setting("compilation_config", anything, "No effect.", ("-O",)),
            Setting("download_dir", text, "No effect; see --cache-dir."),
            Setting("hf_token", text, "No effect.", secret=True),
            Setting("cpu_offload_gb", number, "No effect."),
            Setting("disable_custom_all_reduce", boolean, "No effect."),
            Setting("disable_log_stats", boolean, "No effect."),
            Setting("enable_prompt_tokens_details", boolean, "No effect: always on."),
            Setting("enable_request_id_headers", boolean, "No effect: always on."),
        ),
    ),
)
# Known only so that the refusal gives advice; the help leaves them out.
REFUSED = (
    Setting("revision", text, ""),
    Setting("speculative_config", anything, ""),
    Setting("enable_lora", boolean, ""),
    Setting("lora_modules", texts, ""),
    Setting("max_loras", integer, ""),
    Setting("max_lora_rank", integer, ""),
    Setting("enable_auto_tool_choice", boolean, ""),
    Setting("tool_call_parser", text, ""),
    Setting("reasoning_parser", text, ""),
    Setting("otlp_traces_endpoint", text, ""),
    Setting("best_of", integer, ""),
    Setting("swap_space", number, ""),
    Setting("num_scheduler_steps", integer, ""),
    Setting("disable_log_requests", boolean, ""),
    Setting("guided_decoding_backend", text, ""),
)
SETTINGS = (*(setting for group in GROUPS for setting in group.settings), *REFUSED)
METAVARS: Mapping[Reader, str] = MappingProxyType(
    {integer: "N", size: "N", size_or_auto: "N", number: "X", mapping: "JSON", texts: "TEXT ..."}
)


class ServeCommand(click.Command):
    """A command with flags spelled as vLLM's parser takes them, and its help in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``--max_model_len`` as well as ``--max-model-len``; several values after one flag."""
        several = {flag for one in SETTINGS if one.read is texts for flag in one.flags}
        return super().parse_args(ctx, _repeated(_dashed(args), several))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options under the headings of ``GROUPS``."""
        records = {
            parameter.name: record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            and (record := parameter.get_help_record(ctx)) is not None
        }
        for group in GROUPS:
            with formatter.section(group.title):
                formatter.write_dl([records.pop(one.name) for one in group.settings], col_max=28)
        with formatter.section("More"):
            formatter.write_dl(list(records.values()))


def serve_options() -> list[click.Option]:
    """A click option for each setting. Values stay text, which the readers of ``settings`` read."""
    return [_option(setting) for setting in SETTINGS]


def _option(setting: Setting) -> click.Option:
    if setting.read is boolean:
        spelled = [f"{flag}/--no-{flag[2:]}" for flag in setting.flags]
        return click.Option(
            [setting.name, *spelled], default=None, help=setting.help, hidden=setting in REFUSED
        )
    return click.Option(
        [setting.name, *setting.flags],
        multiple=setting.read is texts,
        metavar=METAVARS.get(setting.read, "TEXT"),
        help=setting.help,
        hidden=setting in REFUSED,
    )


def _dashed(arguments: Sequence[str]) -> list[str]:
    """Flags with dashes in place of underscores; values are unchanged."""
    dashed: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_flag = flag.startswith("--")
        dashed.append(flag.replace("_", "-") + equals + value if is_flag else argument)
    return dashed


def _repeated(arguments: Sequence[str], several: Container[str]) -> list[str]:
    """``--flag a b`` as ``--flag a --flag b``, for flags that take several values."""
    repeated: list[str] = []
    flag, has_value = "", False
    for argument in arguments:
        if argument.startswith("-"):
            flag, has_value = (argument if argument in several else ""), False
        elif flag:
            if has_value:
                repeated.append(flag)
            has_value = True
        repeated.append(argument)
    return repeated
