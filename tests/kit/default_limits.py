"""The limits of an engine as users start it, without a model.

Owns: ``default_limits``.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import PageGroup
from jaxinfer.exec.compile.page_pools import split_pages
from jaxinfer.exec.compile.sizes import limits_of, with_device_defaults


def default_limits(
    platform: str,
    *,
    max_model_len: int = 4096,
    num_pages: int = 0,
    groups: tuple[PageGroup, ...] = (PageGroup(),),
    **settings: Any,
) -> Limits:
    """The limits of a platform by configs/engine, with its real bucket table."""
    config = with_device_defaults(EngineConfig(**settings), platform)
    limits = limits_of(config, max_model_len, groups, platform=platform)
    return replace(limits, num_pages=split_pages(limits, num_pages))
