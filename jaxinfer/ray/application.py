"""``build_app``: the application that ``serve.run`` and Ray's configuration files deploy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]

from jaxinfer.cli.settings import mapping
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.process import STOP_SECONDS
from jaxinfer.ray.ingress import Ingress
from jaxinfer.ray.replica import Replica
from jaxinfer.ray.settings import configs
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


def build_app(args: Mapping[str, Any]) -> Any:
    """An application of Ray Serve with all routes of ``jaxinfer serve``.

    ``args`` has the settings of ``jaxinfer serve`` under their names, and two mappings:
    ``deployment`` with Ray's options of the model's deployment (``num_replicas``,
    ``autoscaling_config``, ``ray_actor_options``, ...) and ``ingress`` with those of the deployment
    in front of it. Each replica takes ``tensor_parallel_size`` GPUs unless ``ray_actor_options``
    has ``num_gpus`` (0: it runs on the CPU). Raises ``ConfigError`` naming the invalid setting.
    """
    settings = dict(args)
    own, front = (_options(name, settings.pop(name, {})) for name in ("deployment", "ingress"))
    engine_config, server_config = configs(settings)
    options = _replica_options(own, engine_config, server_config)
    model = serve.deployment(Replica).options(**options).bind(settings)
    ingress = serve.deployment(serve.ingress()(Ingress))
    shared = {
        name: options[name] for name in ("max_ongoing_requests", "graceful_shutdown_timeout_s")
    }
    shared["max_ongoing_requests"] *= 16  # of all replicas
    # it waits and copies: a CPU of its own would be missing where replicas take them all
    front = {"ray_actor_options": {"num_cpus": 0}, **shared, **front}
    return ingress.options(**front).bind(model, server_config.max_body_bytes)


def _options(name: str, given: Any) -> dict[str, Any]:
    try:
        return mapping(given)
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, got {given!r}") from None


def _replica_options(
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
        "request_router_config": RequestRouterConfig(
            request_router_class=PREFIX_ROUTER,
            request_router_kwargs={
                "imbalanced_threshold": IMBALANCE,
                "do_eviction": True,
                "eviction_threshold_chars": TREE_CHARACTERS,
                "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
            },
        ),
        **given,
        "ray_actor_options": actor,
    }
    if isinstance(scaling := options.get("autoscaling_config"), Mapping):
        half = {"target_ongoing_requests": max(sequences // 2, 1)}
        options["autoscaling_config"] = {**half, **scaling}
    return options
