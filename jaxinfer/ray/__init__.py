"""A server of several machines on Ray Serve: ``build_app`` (the extra ``ray``).

Two deployments: ``Ingress`` gets HTTP requests from Ray's proxy and chooses a replica of the model
by the text of the prompt, ``Replica`` has an engine and the app of ``jaxinfer serve``. There are
two because Ray's prefix-aware router compares arguments of calls, which a request of the proxy does
not have yet. Ray is imported when ``build_app`` is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.ray.application import build_app

__all__ = ("build_app",)


def __getattr__(name: str) -> Any:
    if name != "build_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module("jaxinfer.ray.application").build_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "jaxinfer.ray needs Ray Serve; install it with pip install 'jaxinfer[ray]'"
        ) from error
