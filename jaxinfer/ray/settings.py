"""The settings of ``build_app``: those of ``jaxinfer serve``, and options of Ray's deployments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.cli.serve import check_settings
from jaxinfer.cli.serve_options import SETTINGS
from jaxinfer.cli.settings import File, resolve_settings
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.process import STOP_SECONDS
from jaxinfer.server.http.run import FLUSH_SECONDS

# As ray.serve.llm.request_router has it, whose package imports vLLM.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
SEQUENCES_CPU, SEQUENCES_GPU = 32, 512  # defaults of max_num_seqs; see configs/engine
# A replica with a prefix is not chosen if it has so many more open requests than the least loaded.
IMBALANCE = 16
TREE_CHARACTERS = 16_000_000  # of prompts that the router remembers; the oldest are forgotten
HEALTH_SECONDS = 5.0  # between two checks; Ray replaces a replica that fails three
NAME = "the arguments of build_app"
# settings that have no meaning here, and what to use
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("host", "port", "uds"), "Ray's proxy listens; set http_options of Ray"),
        **dict.fromkeys(
            ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
            "Ray's proxy listens; set http_options of Ray",
        ),
        "data_parallel_size": "set num_replicas or autoscaling_config",
        "admin_api_key": "a change of an engine would reach one replica only",
    }
)


def configs(settings: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """The configurations of each replica; raises ``ConfigError`` naming the invalid setting."""
    read = resolve_settings(SETTINGS, {}, {}, File(NAME, settings))
    for name, advice in INSTEAD.items():
        if name in read:
            raise ConfigError(f"{name} is no setting of a replica on Ray; {advice}")
    engine_config, server_config = check_settings(read)
    # Others reach Ray's proxy under any name, so the server cannot rely on being local.
    changed: dict[str, Any] = {"host": "0.0.0.0"}
    if "max_stored_responses" not in read:  # a later request may reach another replica
        changed["max_stored_responses"] = 0
    return engine_config, replace(server_config, **changed)


def deployment_options(
    given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig
) -> dict[str, Any]:
    """Ray's options of the model's deployment, the given ones over these defaults."""
    devices = engine.tensor_parallel_size or 1
    actor = {"num_gpus": devices, **given.get("ray_actor_options", {})}
    sequences = engine.max_num_seqs or (SEQUENCES_GPU if actor["num_gpus"] else SEQUENCES_CPU)
    options: dict[str, Any] = {
        "max_ongoing_requests": 2 * sequences,  # so that one that ends is replaced at once
        # for open requests, their last events and the engine's last step
        "graceful_shutdown_timeout_s": server.shutdown_timeout + FLUSH_SECONDS + STOP_SECONDS,
        "health_check_period_s": HEALTH_SECONDS,
        "request_router_config": {
            "request_router_class": PREFIX_ROUTER,
            "request_router_kwargs": {
                "imbalanced_threshold": IMBALANCE,
                "do_eviction": True,
                "eviction_threshold_chars": TREE_CHARACTERS,
                "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
            },
        },
        **given,
        "ray_actor_options": actor,
    }
    if isinstance(scaling := options.get("autoscaling_config"), Mapping):
        half = {"target_ongoing_requests": max(sequences // 2, 1)}
        options["autoscaling_config"] = {**half, **scaling}
    return options
