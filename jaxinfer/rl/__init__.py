"""Rollouts for reinforcement learning in JAX: ``TunixRollout`` for google-tunix (the extra ``rl``).

The class derives from one of Tunix's, so Tunix is imported when the class is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.rl.tunix_rollout import TunixRollout

__all__ = ("TunixRollout",)


def __getattr__(name: str) -> Any:
    if name != "TunixRollout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module("jaxinfer.rl.tunix_rollout").TunixRollout
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "tunix":
            raise
        raise ConfigError(
            "TunixRollout needs google-tunix; install it with pip install 'jaxinfer[rl]'"
        ) from error
