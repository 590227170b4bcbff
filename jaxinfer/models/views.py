"""Weights by layer and head under TransformerLens's names: read-only views of fused parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.base import Model, Params
from jaxinfer.nn.decoder_config import AttentionConfig, FeedForwardConfig, MixerSpec
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.mixers.looped_spec import LoopedAttentionConfig
from jaxinfer.nn.mixers.side_by_side_spec import SideBySideConfig
from jaxinfer.nn.weight import stored


@dataclass(frozen=True, repr=False)
class LayerView:
    """One weight of each layer: ``view[l]``, ``view[l, h]`` of a head, ``view[1:3]`` stacked.

    The view itself is an array [L, ...] of all layers, where those are alike: it has ``shape`` and
    ``dtype``, and functions of JAX and numpy take it, as do ``@``, ``+``, ``-`` and ``*``. Other
    attributes are those of ``view[:]``, such as ``view.T``. The arrays are computed from the
    parameters on each access, so nothing is stored twice and nothing can be written. An index out
    of range raises ``IndexError``, also one that JAX would clamp.
    """

    name: str
    num_layers: int
    of_layer: Callable[[int], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [L, ...]; computes no array. Raises ``ValueError`` if layers differ."""
        return self._whole().shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arrays."""
        return self._whole().dtype

    def _whole(self) -> jax.ShapeDtypeStruct:
        made = [jax.eval_shape(lambda at=layer: self.of_layer(at)) for layer in range(len(self))]
        if other := next((one for one in made if one.shape != made[0].shape), None):
            raise ValueError(
                f"{self.name} is {list(made[0].shape)} in one layer and {list(other.shape)} in "
                f"another, so there is no array of all layers; index one, as {self.name}[0]"
            )
        return jax.ShapeDtypeStruct((len(made), *made[0].shape), made[0].dtype)

    def __repr__(self) -> str:
        """Name, shape and dtype."""
        try:
            return f"{self.name}: {self.dtype}{list(self.shape)}, a view by layer"
        except ValueError:
            return f"{self.name}: {len(self)} arrays, a view by layer"

    def __jax_array__(self) -> jax.Array:
        """All layers, for functions of JAX."""
        return self[:]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All layers, for functions of numpy."""
        del copy  # they are computed
        return np.asarray(self[:], dtype)

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the array of all layers."""
        if name.startswith("_"):
            raise AttributeError(name)
        is_own = hasattr(type(self), name)  # a property that raised ``AttributeError``
        return getattr(self._whole() if is_own else self[:], name)

    def __matmul__(self, other: Any) -> jax.Array:
        """``view @ other``."""
        return self[:] @ other

    def __add__(self, other: Any) -> jax.Array:
        """``view + other``."""
        return self[:] + other

    def __sub__(self, other: Any) -> jax.Array:
        """``view - other``."""
        return self[:] - other

    def __mul__(self, other: Any) -> jax.Array:
        """``view * other``."""
        return self[:] * other

    def __len__(self) -> int:
        """The number of layers."""
        return self.num_layers

    def __iter__(self) -> Iterator[jax.Array]:
        """The weight of each layer."""
        return (self.of_layer(layer) for layer in range(self.num_layers))

    def __getitem__(self, index: Any) -> jax.Array:
        """See the class."""
        layer, *rest = index if isinstance(index, tuple) else (index,)
        layers = range(self.num_layers)
        if isinstance(layer, slice):
            _ = self.shape  # raises if layers differ
            found = jnp.stack([self.of_layer(one) for one in layers[layer]])
            return found[:, *rest] if rest else found
        self._check(layer, self.num_layers, "layers")
        found = self.of_layer(layers[layer])
        for number, one in enumerate(rest):
            if one is Ellipsis or one is None:
                break
            if isinstance(one, int) and number < found.ndim:
                self._check(one, found.shape[number], f"entries in dimension {number + 1}")
        return found[tuple(rest)] if rest else found

    def _check(self, index: Any, count: int, what: str) -> None:
        if not isinstance(index, int) or not -count <= index < count:
            raise IndexError(f"{self.name}[{index}]: there are {count} {what}")


class WeightViews:
    """Separate views of the weights of a model with attention and dense feed-forward networks.

    With L layers, N query heads, K kv heads of width H, a stream of width D, F feed-forward
    columns and V tokens: ``W_Q`` [L, N, D, H], ``W_K`` and ``W_V`` [L, K, D, H], ``W_O``
    [L, N, H, D], ``W_gate`` and ``W_up`` [L, D, F], ``W_down`` [L, F, D], ``W_E`` [V, D], ``W_U``
    [D, V]. A vector multiplies from the left: ``x @ m.W_Q[l, h]``. ``W_in`` and ``W_out`` are
    ``W_up`` and ``W_down``. Biases are ``b_Q`` [L, N, H], ``b_K`` and ``b_V`` [L, K, H], ``b_O``
    [L, D], ``b_in`` [L, F] and ``b_out`` [L, D], zeros in a layer without, as in TransformerLens.
    Norm weights and biases are not folded in. Components of heads that rotate in part, or by
    adjacent components, are in the kernels' order (``models.params.RotaryRows``), here and in
    activations. Matrices that are kept quantised are dequantised to
    the model's dtype. A weight that the model does not have raises ``AttributeError``.
    """

    model: Model
    params: Params

    @property
    def W_Q(self) -> LayerView:
        """Queries: ``W_Q[l, h]`` is [D, H]."""
        return self._view("W_Q", lambda layer: self._qkv(layer, 0))

    @property
    def W_K(self) -> LayerView:
        """Keys: ``W_K[l, k]`` is [D, H]; query head h reads kv head h // (N / K)."""
        return self._view("W_K", lambda layer: self._qkv(layer, 1))

    @property
    def W_V(self) -> LayerView:
        """Values: ``W_V[l, k]`` is [D, H]."""
        return self._view("W_V", lambda layer: self._qkv(layer, 2))

    @property
    def W_O(self) -> LayerView:
        """Head outputs into the stream: ``W_O[l, h]`` is [H, D]."""
        return self._view("W_O", self._output)

    @property
    def W_gate(self) -> LayerView:
        """The gate of a gated feed-forward network: ``W_gate[l]`` is [D, F]."""
        if not all(ffn.gated for ffn in self._ffns()):
            raise AttributeError(f"{self.model.architecture} has no gates, so there is no W_gate")
        return self._view("W_gate", lambda layer: self._into_ffn(layer, gate=True))

    @property
    def W_up(self) -> LayerView:
        """The input of the feed-forward network: ``W_up[l]`` is [D, F]."""
        self._ffns()
        return self._view("W_up", lambda layer: self._into_ffn(layer, gate=False))

    @property
    def W_down(self) -> LayerView:
        """The output of the feed-forward network: ``W_down[l]`` is [F, D]."""
        self._ffns()
        return self._view("W_down", lambda layer: self._matrix(layer, "down"))

    W_in, W_out = W_up, W_down

    @property
    def b_Q(self) -> LayerView:
        """The biases of queries: ``b_Q[l, h]`` is [H]."""
        return self._view("b_Q", lambda layer: self._qkv_bias(layer, 0))

    @property
    def b_K(self) -> LayerView:
        """The biases of keys: ``b_K[l, k]`` is [H]."""
        return self._view("b_K", lambda layer: self._qkv_bias(layer, 1))

    @property
    def b_V(self) -> LayerView:
        """The biases of values: ``b_V[l, k]`` is [H]."""
        return self._view("b_V", lambda layer: self._qkv_bias(layer, 2))

    @property
    def b_O(self) -> LayerView:
        """The bias of the attention's output: ``b_O[l]`` is [D]."""
        width = self.model.config.hidden_size
        return self._view("b_O", lambda layer: self._bias(layer, "o", width))

    @property
    def b_in(self) -> LayerView:
        """The bias of ``W_up``, without that of a gate: ``b_in[l]`` is [F]."""
        self._ffns()
        return self._view("b_in", self._bias_into_ffn)

    @property
    def b_out(self) -> LayerView:
        """The bias of ``W_down``: ``b_out[l]`` is [D]."""
        self._ffns()
        width = self.model.config.hidden_size
        return self._view("b_out", lambda layer: self._bias(layer, "down", width))

    @property
    def W_E(self) -> jax.Array:  # [V, D]
        """The embedding, before ``embed_scale``, with the projection to the stream's width."""
        embed = self._dense(self.params["embed"], by_output=True)
        return embed @ self.params["project_in"] if "project_in" in self.params else embed

    @property
    def W_U(self) -> jax.Array:  # [D, V]
        """The unembedding, after the projection to its width; a tied head is the embedding's."""
        if self.model.config.tie_word_embeddings:
            head = self._dense(self.params["embed"], by_output=True).T
        else:
            head = self._dense(self.params["lm_head"])
        return self.params["project_out"] @ head if "project_out" in self.params else head

    def _view(self, name: str, of_layer: Callable[[int], jax.Array]) -> LayerView:
        return LayerView(name, len(self.model.config.layers), of_layer)

    def _dense(self, weight: Any, *, by_output: bool = False) -> jax.Array:
        return stored(weight, by_output=by_output).dense(self.model.config.dtype)

    def _matrix(self, layer: int, name: str) -> jax.Array:  # [I, O]
        return self._dense(self._own(layer)[name])

    def _own(self, layer: int) -> Any:
        """The parameters of a layer, or of the one whose weights it borrows."""
        of = self.model.config.layers[layer].weights_of
        return self.params[f"layers_{layer if of is None else of}"]

    def _mixer(self, layer: int) -> MixerSpec:
        """The mixer of a layer; of two beside each other attention, whose parameters it has, and
        of a later pass that of the first.
        """
        mixer = self.model.config.layers[layer].mixer
        has_attention = isinstance(mixer, SideBySideConfig | LoopedAttentionConfig)
        return mixer.attention if has_attention else mixer

    def _attention(self, layer: int) -> AttentionConfig:
        mixer = self._mixer(layer)
        if not isinstance(mixer, AttentionConfig):
            raise AttributeError(
                f"layer {layer} makes its queries, keys and values of latents, or has none; there "
                "are no such weights"
            )
        return mixer

    def _ffns(self) -> list[FeedForwardConfig]:
        found = [layer.ffn for layer in self.model.config.layers]
        dense = [ffn for ffn in found if isinstance(ffn, FeedForwardConfig)]
        if len(dense) != len(found):
            raise AttributeError("not all feed-forward networks are dense")
        return dense

    def _qkv(self, layer: int, part: int) -> jax.Array:  # [heads, D, H]
        self._attention(layer)  # which says what a layer without such weights has
        whole = self._heads_of(layer, self._matrix(layer, "qkv"), part)
        return jnp.moveaxis(whole, 1, 0)

    def _heads_of(self, layer: int, qkv: jax.Array, part: int) -> jax.Array:  # [..., heads, H]
        """The queries, keys or values of the columns of qkv; gates are before them."""
        mixer = self._attention(layer)
        part = min(part, 1) if mixer.values == "keys" else part  # values are made of the keys
        counts = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        each = (mixer.head_dim, mixer.head_dim, mixer.value_dim)
        widths = [count * width for count, width in zip(counts, each, strict=True)]
        first = widths[0] * mixer.gate + sum(widths[:part])
        own = qkv[..., first : first + widths[part]]
        return own.reshape(*qkv.shape[:-1], counts[part], each[part])

    def _qkv_bias(self, layer: int, part: int) -> jax.Array:  # [heads, H]
        mixer = self._attention(layer)
        gates = mixer.num_heads * mixer.head_dim if mixer.gate and not mixer.gate_bias else 0
        heads = mixer.num_heads * (1 + mixer.gate) + mixer.num_kv_heads
        values = 0 if mixer.values == "keys" else mixer.num_kv_heads * mixer.value_dim
        bias = self._bias(layer, "qkv", heads * mixer.head_dim + values - gates)
        return self._heads_of(layer, jnp.pad(bias, (gates, 0)), part)

    def _bias_into_ffn(self, layer: int) -> jax.Array:  # [F]
        ffn = self._ffns()[layer]
        if not ffn.gated:
            return self._bias(layer, "up", ffn.width)
        return self._bias(layer, "gate_up", 2 * ffn.width)[ffn.width :]

    def _bias(self, layer: int, name: str, width: int) -> jax.Array:  # [width]
        found = self._own(layer).get(f"{name}_bias")
        return jnp.zeros(width, self.model.config.dtype) if found is None else found

    def _output(self, layer: int) -> jax.Array:  # [N, H, D]
        mixer = self._mixer(layer)
        if not isinstance(mixer, AttentionConfig | LatentAttentionConfig):
            raise AttributeError(f"layer {layer} has no attention heads")
        matrix = self._matrix(layer, "o")
        return matrix.reshape(mixer.num_heads, -1, matrix.shape[1])

    def _into_ffn(self, layer: int, *, gate: bool) -> jax.Array:  # [D, F]
        ffn = self._ffns()[layer]
        if not ffn.gated:
            return self._matrix(layer, "up")
        both = self._matrix(layer, "gate_up")
        return both[:, : ffn.width] if gate else both[:, ffn.width :]
