"""``batch_invariant``: the kernels whose bits do not depend on the batch, and what has none."""

from __future__ import annotations

import jax.numpy as jnp

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.base import Model
from pallas_kernels.harness.pins import Pins, invariant_pins
from pallas_kernels.lib.checks import without_triton
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.native.library import missing

BLOCK = 16  # keys that attention on a CPU adds at a time, counted from the first page


def fixed_pins(config: EngineConfig, platform: str) -> Pins:
    """The pins of an engine with ``batch_invariant``; raises ``ConfigError`` if there are none."""
    if config.kernels is not None:
        raise ConfigError("batch_invariant chooses the kernels; leave out kernels")
    if platform == "cpu" and (reason := missing()) is not None:
        raise _refused(reason)
    if platform == "gpu" and (reason := without_triton()) is not None:
        raise _refused(reason)
    try:
        return invariant_pins(platform)
    except ValueError as error:
        raise _refused(str(error)) from error


def check_invariant(program: Program) -> None:
    """Raise ``ConfigError`` if a request's bits would depend on its batch after all.

    A kernel that does not take this model's shapes is found when a step is traced.
    """
    if program.pins.invariant and (reason := _misfit(program)) is not None:
        raise _refused(reason)


def _misfit(program: Program) -> str | None:
    model, limits, on_gpu = program.model, program.limits, program.platform == "gpu"
    if program.placement.num_devices > 1:
        return f"{program.placement.num_devices} devices add their results in XLA's order"
    if not on_gpu and model.config.dtype != jnp.float32:
        return f"the dtype is {model.config.dtype}, not float32, on a CPU"
    if on_gpu and model.forms:
        return "kernels of quantised weights add in an order that depends on the number of rows"
    if on_gpu and program.drafter is not None:
        return "drafts are verified by other kernels than tokens are decoded"
    if any(entry.dtype == BITS for entry in model.state.arrays):
        return "pages have 8 bits"
    if limits.pooling:
        return "vectors of embeddings are pooled by XLA"
    if (kind := _varying(model)) is not None:
        return f"{model.architecture} has {kind}, and chunks of it have other bits than tokens"
    if on_gpu and (kind := _varying_on_gpu(model)) is not None:
        return f"{model.architecture} has {kind}, which is computed so on CPUs alone"
    if not on_gpu and any(group.window for group in limits.groups) and limits.page_size % BLOCK:
        return f"pages of {limits.page_size} tokens before a window do not hold blocks of {BLOCK}"
    return None


def _varying(model: Model) -> str | None:
    """A part of the model without an invariant form, in words."""
    if not model.config.residual.is_invariant:
        return "several residual streams"
    blocks = [block for layer in model.config.layers for block in (layer.mixer, layer.ffn)]
    varying = (block for block in blocks if not block.is_invariant)
    return next((block.words() or "layers without an invariant form" for block in varying), None)


def _varying_on_gpu(model: Model) -> str | None:
    """A block of the model that has an invariant form on CPUs alone, in words."""
    blocks = [block for layer in model.config.layers for block in (layer.mixer, layer.ffn)]
    varying = (block for block in blocks if not block.is_invariant_on_gpu)
    return next((block.words() or type(block).__name__ for block in varying), None)


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"batch_invariant cannot be kept: {reason}; leave it out")
