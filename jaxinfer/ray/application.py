"""``build_app``: the application that ``serve.run`` and Ray's configuration files deploy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]

from jaxinfer.cli.settings import mapping
from jaxinfer.core.errors import ConfigError
from jaxinfer.ray.ingress import Ingress
from jaxinfer.ray.replica import Replica
from jaxinfer.ray.settings import configs, deployment_options


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
    options = deployment_options(own, engine_config, server_config)
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
