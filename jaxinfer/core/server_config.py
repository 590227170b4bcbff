"""Settings of the HTTP server. Names and meanings follow ``vllm serve`` where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_address, ip_network
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.core.checks import as_float, as_int
from jaxinfer.core.errors import ConfigError, RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.sampling_checks import MAX_LOGPROBS

MIB = 1 << 20
LOG_FORMATS = ("text", "json")
OTLP_PROTOCOLS = ("grpc", "http/protobuf")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OUTPUT_LIMIT = "max_new_tokens"  # of override_generation_config: no request generates more
INF = float("inf")
# bounds, both included
WHOLE = MappingProxyType(
    {
        "port": (0, 65535),  # 0: any free port
        "ssl_cert_reqs": (0, 2),
        "max_body_bytes": (1, INF),
        "max_buffered_bytes": (0, INF),
        "max_connections": (1, INF),
        "h11_max_incomplete_event_size": (1024, INF),
        "max_num_queued_reqs": (0, INF),
        "max_num_queued_tokens": (0, INF),
        "max_logprobs": (0, MAX_LOGPROBS),
        "max_log_len": (0, INF),
        "max_tap_bytes": (0, INF),
        "max_answer_bytes": (0, INF),
        "max_stored_responses": (0, INF),
        "max_stored_response_bytes": (0, INF),
        "data_parallel_size": (1, 1024),
    }
)
ONE_OF = MappingProxyType(
    {
        "uvicorn_log_level": LOG_LEVELS,
        "log_format": LOG_FORMATS,
        "otlp_traces_protocol": OTLP_PROTOCOLS,
    }
)
SECONDS = MappingProxyType(  # minima
    {
        "request_timeout": 0.001,
        "shutdown_timeout": 0.0,
        "health_timeout": 0.0,
        "body_timeout": 0.001,
        "max_template_seconds": 0.001,
    }
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, access, limits and options of the server. Sizes are bytes unless stated.

    ``None`` means "no limit" for queues and deadlines. Raises ``ConfigError`` naming the setting.
    """

    # addresses and TLS
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket instead of host and port
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # ssl.CERT_NONE
    # access
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None  # lines of KEY or KEY NAME, read again on SIGHUP
    admin_api_key: tuple[str, ...] = ()  # of the routes that change the engine
    profiler_dir: str | None = None  # where /start_profile, an admin's route, may write
    prefix_caching_by_key: bool = False  # cached prefixes are reused by the key that made them
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header; see ``checked_hosts``
    # proxies whose X-Forwarded-For names the client: addresses and networks, also with commas
    forwarded_allow_ips: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ui: bool = True  # the page at /
    # limits
    max_body_bytes: int = 8 * MIB
    max_buffered_bytes: int = 32 * MIB  # of requests that no handler has read, beyond 16 KiB each
    max_connections: int = 10_000
    h11_max_incomplete_event_size: int = 64 * 1024  # size of a request's head
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_answer_bytes: int = 256 * MIB  # of the JSON of a request's answers, estimated before
    max_tap_bytes: int = 64 * MIB  # of activations in one answer, before base64
    max_stored_responses: int = 1024  # of /v1/responses; 0: none is stored
    max_stored_response_bytes: int = 64 * MIB  # of all together
    request_timeout: float | None = None  # seconds; a request's own timeout is at most this
    shutdown_timeout: float = 30.0  # seconds for open requests after SIGTERM
    body_timeout: float = 60.0  # seconds until a request's body has arrived
    max_template_seconds: float = 2.0  # of CPU time, to make a prompt of one chat
    health_timeout: float = 60.0  # seconds without a finished step, besides those that one takes
    # models, requests and answers
    served_model_name: tuple[str, ...] = ()  # empty: the model's own name
    unlisted_model_name: str | None = None  # no flag: the path that served_model_name is made of
    strict_fields: bool = False
    ignore_hosted_tools: bool = False  # leave out tools that OpenAI's and Anthropic's servers run
    max_logprobs: int = 20
    chat_template: str | None = None  # the template itself
    trust_request_chat_template: bool = False  # requests may bring their own
    default_chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    response_role: str = "assistant"
    tool_call_parser: str | None = None  # None: found from the chat template
    reasoning_parser: str | None = None
    strict_tool_calls: bool = False  # text without the marks of a call is never a call
    override_generation_config: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = True  # the usage has cached tokens
    # logs and processes
    enable_log_requests: bool = False
    max_log_len: int | None = None  # characters of a prompt in the log; None: no text is logged
    otlp_traces_endpoint: str | None = None  # of a collector
    otlp_traces_protocol: str = "grpc"
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "info"
    log_format: str = "text"
    disable_frontend_multiprocessing: bool = False  # run the engine on a thread, not in a process
    data_parallel_size: int = 1  # engines, each in a process and with devices of its own

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                object.__setattr__(self, item.name, _checked(item.name, value, str(item.type)))
        _check_tls(self)
        if not self.host:
            raise ConfigError("host must be an address or a name; leave it out for 127.0.0.1")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ConfigError(f"root_path {self.root_path!r} must begin with / and not end with it")
        for name, known in ONE_OF.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
        for name in ("api_key", "admin_api_key"):
            for key in getattr(self, name):
                if not is_usable_key(key):
                    raise ConfigError(f"{name} must be printable ASCII without spaces around it")
        if set(self.api_key) & set(self.admin_api_key):
            raise ConfigError("admin_api_key must differ from api_key, which all clients have")
        if self.profiler_dir is not None and not self.admin_api_key:
            raise ConfigError("profiler_dir needs admin_api_key, as a profile slows all answers")
        if self.data_parallel_size > 1 and self.disable_frontend_multiprocessing:
            raise ConfigError(
                f"data_parallel_size {self.data_parallel_size} needs a process for each engine; "
                "leave out disable_frontend_multiprocessing"
            )
        if self.prefix_caching_by_key and not self.needs_key:
            raise ConfigError("prefix_caching_by_key needs api_key or api_key_file")
        for proxy in self.trusted_proxies:
            if not is_network(proxy):
                raise ConfigError(
                    f"forwarded_allow_ips must be addresses or networks such as 10.0.0.0/8, got "
                    f"{proxy!r}"
                )
        names = self.served_model_name
        if not all(names) or len({*names}) < len(names):
            raise ConfigError(f"served_model_name must be different names, got {list(names)}")
        endpoint, over_http = self.otlp_traces_endpoint, self.otlp_traces_protocol != "grpc"
        if endpoint and over_http and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint {endpoint!r} must be a URL such as "
                "http://localhost:4318/v1/traces"
            )
        _check_sampling(self.override_generation_config)

    @property
    def needs_key(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def trusted_proxies(self) -> list[str]:
        """``forwarded_allow_ips``, each address or network by itself."""
        return [one.strip() for given in self.forwarded_allow_ips for one in given.split(",")]

    @property
    def is_local(self) -> bool:
        """True if only programs on this machine reach the server."""
        return self.uds is not None or is_loopback(self.host)

    @property
    def checked_hosts(self) -> tuple[str, ...] | None:
        """The names that the Host header may have, besides IP addresses and localhost; None: any.

        A page of any site can give its own name the address 127.0.0.1, and then sends requests to
        this machine as if they were to its own site (DNS rebinding). So the header is checked if
        the server relies on being local.
        """
        if self.allowed_hosts:
            return None if "*" in self.allowed_hosts else self.allowed_hosts
        if self.needs_key or self.uds is not None or not self.is_local:
            return None
        return (self.host,)


def is_loopback(host: str) -> bool:
    """True for localhost and the addresses of the loopback interface."""
    return host.lower() == "localhost" or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """True for IP addresses, as opposed to names."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_network(text: str) -> bool:
    """True for IP addresses and networks."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def is_usable_key(key: str) -> bool:
    """True if an Authorization header can carry the key: printable ASCII without outer spaces."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def _checked(name: str, value: Any, type_name: str) -> Any:
    """The value in canonical form; raises ``ConfigError``."""
    if name in WHOLE:
        (low, high), number = WHOLE[name], as_int(value)
        if number is None or not low <= number <= high:
            span = f"from {low} to {high}" if high < INF else f"of at least {low}"
            raise ConfigError(f"{name} must be a whole number {span}, got {value!r}")
        return number
    if name in SECONDS:
        least, seconds = SECONDS[name], as_float(value)
        if seconds is None or not least <= seconds < INF:
            raise ConfigError(f"{name} must be seconds, at least {least:g}, got {value!r}")
        return seconds
    if type_name.startswith("tuple"):
        texts = cast("tuple[Any, ...]", value)
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in texts):
            shown = "" if name.endswith("api_key") else f", got {value!r}"
            raise ConfigError(f"{name} must be a list of texts{shown}")
        return tuple(texts)
    if type_name.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a mapping of names to values, got {value!r}")
        return MappingProxyType(dict(cast("Mapping[str, Any]", value)))
    if type_name == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    if type_name != "bool" and not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {value!r}")
    return value


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None and (config.ssl_keyfile or config.ssl_ca_certs):
        raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile as well")
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, which sign the clients' certificates")
    if config.allow_credentials and "*" in config.allowed_origins:
        raise ConfigError("allow_credentials needs allowed_origins that are named, not *")


def _check_sampling(overrides: Mapping[str, Any]) -> None:
    known = (*SAMPLING_DEFAULTS, OUTPUT_LIMIT)
    for name in overrides:
        if name not in known:
            raise ConfigError(
                f"override_generation_config has {name!r}; it may have {', '.join(known)}"
            )
    defaults = {name: value for name, value in overrides.items() if name != OUTPUT_LIMIT}
    limit = as_int(overrides.get(OUTPUT_LIMIT, 1))
    if limit is None or limit < 1:
        raise ConfigError(
            f"override_generation_config is unusable: {OUTPUT_LIMIT} must be a whole number of at "
            f"least 1, got {overrides[OUTPUT_LIMIT]!r}"
        )
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(f"override_generation_config is unusable: {error}") from error
