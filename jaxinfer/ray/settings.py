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
