"""Members that the specs of mixers and of feed-forward networks have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxinfer.nn.rope import RopeConfig
    from jaxinfer.nn.state import LayerState
    from pallas_kernels.harness.pins import Pins


def part(count: int, devices: int, what: str) -> int:
    """One device's part of ``count``; raises ``ConfigError`` if it cannot be divided."""
    own, rest = divmod(count, devices)
    if rest:
        raise ConfigError(f"{count} {what} cannot be divided among {devices} devices")
    return own


def kv_part(count: int, devices: int) -> int:
    """One device's part of so many KV heads; several devices may have the same one.

    Raises ``ConfigError`` if they cannot be divided.
    """
    return 1 if devices % count == 0 else part(count, devices, "KV heads")


class StepShape(NamedTuple):
    """The facts on which a block's workspace depends, besides its spec and its parameters."""

    x: jax.ShapeDtypeStruct  # [T, D]
    num_prompts: int  # prefill rows
    platform: str
    pins: Pins


class QueryGrowth(NamedTuple):
    """Queries at position p are multiplied by 1 + beta log(1 + floor((p + offset) / original)).

    Llama 4's attention temperature.
    """

    beta: float
    original: int
    offset: int = 0


class BlockSpec(Protocol):
    """A mixer or a feed-forward network as data. Hashable.

    Specs inherit the members that have a default. Code outside ``nn`` and ``models`` reads these
    members and never asks for a block's type (``tests/test_floors.py`` checks that).

    ``is_invariant``: with ``Pins.invariant`` the module's output for a token has the same bits
    whatever else is in the step and however the tokens before it were divided among steps.
    ``is_invariant_on_gpu`` says so of GPUs, the other one of CPUs.
    """

    is_invariant: ClassVar[bool] = False
    is_invariant_on_gpu: ClassVar[bool] = False

    def module(self) -> nn.Module:
        """The module; its parameters are part of the layer's."""
        ...

    @property
    def is_absent(self) -> bool:
        """True if the layer has no such block, and no norm before it (``nn.absent``)."""
        return False

    def share(self, devices: int) -> Self:
        """One device's part of a block that is divided among ``devices``, as its parameters are.

        Raises ``ConfigError`` if it cannot be divided, which is the default.
        """
        raise ConfigError(f"{type(self).__name__} cannot be divided among {devices} devices")

    def points(self) -> Mapping[str, tuple[int, ...]]:
        """The points within the block that steps have, in the order of the pass, and the shapes of
        a token's activations there. The default is none.

        Names are those of ``core.points.IN_LAYER``. Inputs and outputs of every block are points,
        too, which ``nn/decoder.py`` passes.
        """
        return {}

    def words(self) -> str:
        """The sizes of the block, in a description of a model. The default is no words."""
        return ""

    def workspace(self, params: Mapping[str, Any], step: StepShape) -> int:
        """A bound on the bytes that a step needs in this block, in addition to the inputs and
        outputs of its matrices. The default is 0.

        ``params`` are the abstract parameters of the layer.
        """
        del params, step
        return 0


class MixerSpec(BlockSpec, Protocol):
    """The mixer of a layer; its module is called like ``mixers.attention.Attention``.

    A spec without rope inherits this class, one with a field ``rope`` inherits ``BlockSpec``.
    """

    @property
    def rope(self) -> RopeConfig | None:
        """The rope config whose rotation tables the layer uses. The default is None."""
        return None

    def for_context(self, length: int) -> Self:
        """The mixer for an engine with context length ``length``. The default is itself."""
        del length
        return self

    def state(self, dtype: jnp.dtype) -> LayerState:
        """The layer state."""
        ...

    def with_pages(self, dtype: jnp.dtype) -> Self | None:
        """The mixer with pages of ``dtype``. The default is None: they have no other form."""
        del dtype
        return None


def paged_as(mixer: MixerSpec, own: jnp.dtype, dtype: jnp.dtype) -> MixerSpec | None:
    """The mixer with pages of ``dtype`` in place of its ``own``, None if they have no such form;
    without any it stays as it is.
    """
    return mixer.with_pages(dtype) if mixer.state(own).paged else mixer
