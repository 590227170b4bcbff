"""Settings of the HTTP server. Names and meanings follow ``vllm serve`` where it has them.

Owns: names, defaults and bounds. Must not know: where a value came from (flags, environment, file),
sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in, and what it allows. Sizes are bytes unless said.

    ``None`` means "no limit" for queues and deadlines. Raises ``ConfigError`` naming the setting.
    """

    # where
    host: str | None = None  # None: every interface
    port: int = 8000
    uds: str | None = None  # a Unix socket instead of host and port
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # ssl.CERT_NONE
    # whom
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    # how much
    max_body_bytes: int = 8 * MIB
    h11_max_incomplete_event_size: int = 64 * 1024  # of a request's head
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    request_timeout: float | None = None  # seconds, also the longest that a request may ask for
    shutdown_timeout: float = 30.0  # seconds for open requests after SIGTERM
    # what
    served_model_name: tuple[str, ...] = ()  # empty: the model's own name
    strict_fields: bool = False
    max_logprobs: int = 20
    chat_template: str | None = None  # a file, or the template itself
    default_chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    response_role: str = "assistant"
    override_generation_config: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = False
    # telling
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "info"
    disable_frontend_multiprocessing: bool = False  # the engine on a thread of the server's process
