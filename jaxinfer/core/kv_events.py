"""``KVEventsConfig``: where an engine announces the pages that it keeps. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.json_text import parse_json

PUBLISHERS = ("null", "zmq")
BOUND = ("*", "::")  # parts of an endpoint that is bound; to others the publisher connects
SCHEMES = ("tcp://", "ipc://", "inproc://")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of vLLM's class of this name, and ``data_parallel_rank``.

    ``endpoint``: of the publisher; with a rank its port is that much higher. ``replay_endpoint``:
    where subscribers ask for batches that they have missed; the last ``buffer_steps`` are kept.
    ``hwm``: batches that wait for a slow subscriber before some are dropped. ``max_queue_size``:
    those that wait to be sent.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # of ``PUBLISHERS``; None: "zmq" if events are enabled
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    @property
    def publishes(self) -> bool:
        """True if events are sent."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


def kv_events_config(text: str) -> KVEventsConfig:
    """The settings of a JSON text; raises ``ConfigError`` naming the wrong field."""
    try:
        config = msgspec.convert(parse_json(text), KVEventsConfig)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"kv_events_config is wrong ({error}); its fields are "
            f"{', '.join(KVEventsConfig.__struct_fields__)}"
        ) from error
    if config.publisher not in (None, *PUBLISHERS):
        raise ConfigError(
            f"kv_events_config has the publisher {config.publisher!r}; use "
            f"{' or '.join(PUBLISHERS)}"
        )
    for name in ("endpoint", "replay_endpoint"):
        if (value := getattr(config, name)) is not None:
            _check_endpoint(name, value)
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"kv_events_config has {name} below 1; use 1 or more")
    return config


def as_text(value: Any) -> str:
    """The settings as JSON text, of such a text or a mapping; raises ``ConfigError``."""
    if isinstance(value, Mapping):
        known = dict(cast("Mapping[str, Any]", value))
        try:
            value = msgspec.json.encode(known).decode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"kv_events_config must be a JSON object ({error})") from error
    if not isinstance(value, str):
        raise ConfigError(f"kv_events_config must be a JSON object, got {value!r}")
    kv_events_config(value)
    return value


def with_rank(text: str, rank: int) -> str:
    """The settings of the engine of a rank among several behind one server."""
    config = msgspec.structs.replace(kv_events_config(text), data_parallel_rank=rank)
    return msgspec.json.encode(config).decode()


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: its port is ``rank`` higher; a name gets a suffix, as in vLLM."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _check_endpoint(name: str, value: str) -> None:
    port = value.rpartition(":")[2]
    if not value.startswith(SCHEMES) or (value.startswith("tcp://") and not port.isdigit()):
        raise ConfigError(
            f"kv_events_config has the {name} {value!r}; give tcp://ADDRESS:PORT, such as "
            "tcp://*:5557, or ipc:///PATH"
        )
