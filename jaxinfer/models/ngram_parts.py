"""Parts of the families with n-grams of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.wrappers import OWN_END


def boundary(config: Mapping[str, Any]) -> int:
    """The token that n-grams do not pass: the first that ends a text."""
    given = config.get("eos_token_id") if OWN_END not in config else config[OWN_END]
    first = given[0] if isinstance(given, list | tuple) and given else given
    if not isinstance(first, int) or not 0 <= first < hf.positive_int(config, "vocab_size"):
        raise ConfigError(
            f"config key 'eos_token_id' is {short(given)}, and the n-grams of this family need a "
            "token of the vocabulary; add it"
        )
    return first
