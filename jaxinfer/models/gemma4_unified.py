"""Gemma 4 12B (text), a dense Gemma 4 whose other parts are named otherwise.

Source: ``modeling_gemma4_unified`` of Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jaxinfer.models import gemma4

_WINDOW = 1024  # transformers' default

FAMILY = replace(
    gemma4.FAMILY,
    name="gemma4_unified",
    config_from_hf=partial(gemma4.gemma4_config, window=_WINDOW),
)
